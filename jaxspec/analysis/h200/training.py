"""Training a pair on the spot, in a time that is given, and measuring its real acceptance and speed.

Training and measuring are `jaxspec train` and `jaxspec measure`, as processes. Before, a few steps on random tokens
show how long one takes; a recipe's steps are then cut to what fits, so that its schedule ends in time. A run that was
ended goes on from its last state when it is run again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import recipes
from jaxspec.model import load
from jaxspec.nets.gpt import GPTConfig
from jaxspec.recipes import Recipe, net_of
from jaxspec.training import data, optimizer
from jaxspec.training.distil import distillation
from jaxspec.training.loop import TrainState, make_step
from jaxspec.training.losses import cross_entropy
from jaxspec.weights import orbax

SHARE = 0.4  # of the minutes, for the steps of either; the rest goes to reading data, held-out losses and saving
TIMED = 10  # steps, to learn how long one takes
GAMMAS = "3,5,7"
STEPS = "steps.json"  # beside a run's state: what was decided when it began

Apart = Callable[..., Any]  # (function, arguments) -> its result, from a process of its own


class Settings(NamedTuple):
    """What to train.

    Attributes:
        target, draft: recipe files, of a GPT and of its drafter.
        minutes: for the training of both together, about.
        dtype: of the computation in `jaxspec measure`.
        new_tokens, rows, repeats: as there.
    """

    target: str
    draft: str
    minutes: float = 8.0
    dtype: str = "bfloat16"
    new_tokens: int = 64
    rows: int = 16
    repeats: int = 5


def train(settings: Settings, which: str, folder: Path, work: Path, apart: Apart) -> dict[str, Any]:
    """Trains one of the pair, "target" or "draft", for its share of the minutes.

    Args:
        settings: the recipes.
        which: of them.
        folder: of the data.
        work: holds the runs and what is trained, in `trained`, where the drafter's recipe looks for its teacher.
        apart: runs a function in a process of its own, so that this one leaves the device alone.

    Raises:
        FileNotFoundError: there is no recipe, or no data.
        RuntimeError: `jaxspec train` failed.
    """
    file = Path(settings.target if which == "target" else settings.draft).resolve()
    recipe = _recipe(file)
    for name in (recipe.data.train, recipe.data.heldout, recipe.data.tokenizer):
        if not (folder / name).exists():
            raise FileNotFoundError(f"{folder} lacks {name}: `jaxspec train --prepare-data --data {folder}` makes it")
    run, out = work / "runs" / recipe.name, work / "trained" / recipe.name
    start, decided = time.perf_counter(), run / STEPS
    if not decided.is_file():
        each = apart(seconds_per_step, file, work)
        steps = max(1, min(recipe.train.steps, int(60 * SHARE * settings.minutes / each)))
        run.mkdir(parents=True, exist_ok=True)
        decided.write_text(json.dumps({"steps": steps, "seconds_per_step": each}), encoding="utf-8")
    known = json.loads(decided.read_text(encoding="utf-8"))
    log = ""
    if not out.exists():
        paths = ["--data", str(folder.resolve()), "--out", str(out.resolve()), "--work", str(run.resolve())]
        log = _jaxspec(["train", str(file), "--steps", str(known["steps"]), *paths], work)
    manifest = orbax.read_manifest(out)
    return {
        "recipe": recipe.name,
        "parameters": manifest.parameters,
        "steps_of_the_recipe": recipe.train.steps,
        **known,
        "heldout_loss": manifest.about["heldout_loss"],
        "seconds": time.perf_counter() - start,
        "log": log.strip().splitlines(),
    }


def measure(settings: Settings, work: Path) -> dict[str, Any]:
    """What `jaxspec measure` finds of the trained pair; what it had found before it was ended is not measured again.

    Raises:
        RuntimeError: it failed.
    """
    pair = [work.resolve() / "trained" / _recipe(Path(file)).name for file in (settings.target, settings.draft)]
    how = {"target": pair[0], "draft": pair[1], "task": "text", "gamma": GAMMAS, "dtype": settings.dtype}
    how |= {
        "new-tokens": settings.new_tokens,
        "rows": settings.rows,
        "count": 4 * settings.rows,
        "repeats": settings.repeats,
    }
    options = [part for name, value in how.items() for part in (f"--{name}", str(value))]
    return json.loads(
        _jaxspec(["measure", *options, "--resume", str(work.resolve() / "measured.jsonl"), "--json"], work)
    )


def seconds_per_step(file: Path, work: Path) -> float:
    """What a step of a recipe takes in its largest shape, compiled, on random tokens; the teacher's pass included."""
    recipe = _recipe(file)
    config, random = recipe.model, np.random.default_rng(0)
    shape = max(
        data.buckets(recipe.data.shapes, recipe.train.batch_tokens), key=lambda bucket: bucket.rows * bucket.width
    )
    rows = random.integers(0, config.vocab_size, (shape.rows, shape.width))
    batch = data.collate([data.Example(np.zeros(0, np.int32), row) for row in rows], shape)
    loss = cross_entropy(config)
    if recipe.distil is not None:
        loss = distillation(config, load(work / recipe.distil.teacher, dtype=config.dtype), recipe.distil.weight)
    made = optimizer.make(recipe.train)
    params = net_of(config).init(config, jax.random.key(0))
    state, step = TrainState(jnp.zeros((), jnp.int32), params, made.init(params)), make_step(loss, made)
    state, value = step(state, batch)
    float(value)
    start = time.perf_counter()
    for _ in range(TIMED):
        state, value = step(state, batch)
        float(value)  # as the loop of training does
    return (time.perf_counter() - start) / TIMED


def _recipe(file: Path) -> Recipe:
    found = recipes.load(file)
    if not isinstance(found, Recipe) or not isinstance(found.model, GPTConfig):
        raise ValueError(f"{file} is a recipe of the family {found.family}: expected one of a GPT")
    return found


def _jaxspec(arguments: Sequence[str], work: Path) -> str:
    """What a command prints; its messages go on to standard error."""
    root = str(Path(jaxspec.__file__).resolve().parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "jaxspec", *arguments]
    done = subprocess.run(command, cwd=work, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"jaxspec {arguments[0]} ended with {done.returncode}: its messages are above")
    return done.stdout
