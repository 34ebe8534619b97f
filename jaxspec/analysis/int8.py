"""What int8 does to a pair: memory, acceptance, text and speed, beside float32 and bfloat16.

    python -m jaxspec.analysis.int8 --target debian-t5-base --draft debian-t5-small --rows 64 --json OUT

Both models in each dtype, decoded in one process. "Overlap" is E[Σ min(p, q)] between the distribution of the target in
float32 and its distribution in the dtype, at temperature 1: 1 where they are the same. Speculative text is compared
with plain text of the same target.

What a checkpoint stores as int8, as the shipped ones do, was rounded before, and is the same model in float32: give
folders of unrounded weights to see what rounding costs. Where these are gone, `--unrounded SEED` draws others that are
rounded to the same int8 matrices, and the comparison is with them. They lie about as far from what is stored as the
lost ones do, which tells how far rounding moves loss, distributions, α and text; not which way, since the lost ones
were trained, and these are the stored ones with noise.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import typer
from jaxtyping import Array, Float, Int8
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec import corpus
from jaxspec.analysis import report
from jaxspec.analysis.measure import acceptance, environment, jobs, memory, quality, timing
from jaxspec.analysis.measure.statistics import median_min_max
from jaxspec.base import Model, Params
from jaxspec.decode.request import Job, prepare
from jaxspec.files import write_text
from jaxspec.model import DTYPES, load
from jaxspec.nets import quantised
from jaxspec.weights import orbax

SIDES = ("target", "draft")
TIMED = 4  # prompts of a timed run, one at a time


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        gamma: draft tokens a round.
        new_tokens: most new tokens per prompt.
        repeats: timed runs.
        data: folder with held-out data, for the loss per token; None for none.
    """

    gamma: int = 4
    new_tokens: int = 64
    repeats: int = 5
    data: Path | None = None


def compare(
    pairs: dict[str, tuple[Model, Model]],
    tasks: Mapping[str, Sequence[dict[str, Any]]],
    settings: Settings,
    advance: Callable[[str], object] = lambda doing: None,
) -> dict[str, Any]:
    """All numbers.

    Args:
        pairs: target and drafter by dtype; the first is what the others are compared with.
        tasks: held-out rows, "input" and "reference", by task.
        settings: what to measure.
        advance: called with what is being done.

    Returns:
        "environment", and "dtypes": for each "bytes" by side, "program" (bytes of arguments and temporaries, where the
        compiler gives them), "tasks", and "speed": generations of one prompt, plain and speculative, as times the plain
        speed of the first dtype.

    Raises:
        ImportError: a task is scored, and the `train` extra is not installed.
    """
    first = next(iter(pairs.values()))[0]
    found: dict[str, Any] = {"environment": environment.current(), "gamma": settings.gamma, "dtypes": {}}
    prompts = [row["input"] for rows in tasks.values() for row in rows][:TIMED]
    calls = []
    for dtype, (target, draft) in pairs.items():
        advance(f"{dtype}: memory")
        # One generation for each prompt, of as many tokens in every dtype.
        whole = prepare(target, prompts, drafter=draft, max_new_tokens=settings.new_tokens, eos_ids=())
        whole = whole.replace(gamma=settings.gamma)
        speculative = [jobs.take(whole, [row]) for row in range(len(prompts))]
        stats = memory.program_stats(speculative[0])
        program = {"arguments": stats.argument_size_in_bytes, "temporaries": stats.temp_size_in_bytes} if stats else {}
        about: dict[str, Any] = {
            "bytes": {side: _bytes(model) for side, model in zip(SIDES, (target, draft), strict=True)},
            "program": program,
            "tasks": {},
        }
        for task, rows in tasks.items():
            advance(f"{dtype}: {task}")
            about["tasks"][task] = _of_task(task, rows, first, target, draft, settings)
        found["dtypes"][dtype] = about
        variants = [job.plain() for job in speculative], speculative
        calls += [functools.partial(timing.run_all, some) for some in variants]
    advance("speed")
    for call in calls:
        call()
    seconds = timing.interleave(calls, settings.repeats).reshape(len(pairs), 2, settings.repeats)
    for about, (plain, speculative) in zip(found["dtypes"].values(), seconds, strict=True):
        both = {"plain": plain, "speculative": speculative}
        about["speed"] = {name: median_min_max(seconds[0, 0] / one) for name, one in both.items()}
    return found


def pairs_of(names: Sequence[str], seed: int | None = None) -> dict[str, tuple[Model, Model]]:
    """Target and drafter in each dtype: of the stored weights, or, with a seed, of `unrounded` ones."""

    def loaded(side: int, dtype: str) -> Model:
        model = load(names[side], dtype=dtype)
        if seed is None:
            return model
        drawn = unrounded(load(names[side], dtype="int8").params, jax.random.fold_in(jax.random.key(seed), side))
        return model._replace(params=orbax.cast(drawn, dtype))

    return {dtype: (loaded(0, dtype), loaded(1, dtype)) for dtype in DTYPES}


def unrounded(params: Params, key: Array) -> Params:
    """Random float32 matrices w = s(q + u), u uniform in (-1/2, 1/2), that `int8.quantise` rounds to q and s again.

    The largest entries of a channel, which its scale s was made of, stay as they are.

    >>> from jaxspec.weights import int8
    >>> stored = int8.quantise({"weight": jax.random.normal(jax.random.key(0), (8, 16))})
    >>> drawn = unrounded(stored, jax.random.key(1))
    >>> bool((drawn["weight"] == int8.dequantise(stored)["weight"]).all())
    False
    >>> jax.tree.map(lambda a, b: bool((a == b).all()), int8.quantise(drawn), stored)
    {'weight': {'int8': True, 'scale': True}}
    """
    leaves, tree = jax.tree.flatten(params, is_leaf=quantised.is_quantised)
    keys = jax.random.split(key, len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return tree.unflatten([_drawn(**x, key=key) if quantised.is_quantised(x) else x for x, key in pairs])


@jax.jit
def _drawn(int8: Int8[Array, "rows columns"], scale: Array, key: Array) -> Float[Array, "rows columns"]:
    q = int8.astype(jnp.float32)
    # As far inside as it takes: float32 rounds s(q + u) / s by less than 2**-16.
    u = jax.random.uniform(key, q.shape, minval=2.0**-15 - 0.5, maxval=0.5 - 2.0**-15)
    size = jnp.abs(q)
    return jnp.where(size == size.max(axis=1, keepdims=True), q, q + u) * scale


def table(found: dict[str, Any]) -> Table:
    """The comparison for a screen: a column for each dtype."""
    view = Table(box=box.ROUNDED)
    view.add_column("", no_wrap=True)
    for dtype in found["dtypes"]:
        view.add_column(dtype, justify="right")
    columns = [_cells(about) for about in found["dtypes"].values()]
    for section, cells in columns[0].items():
        view.add_section()
        view.add_row(section, style="bold")
        for name in cells:
            view.add_row(name, *(column[section][name] for column in columns))
    return view


def _cells(about: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The cells of a dtype: by section, by line."""
    memory = {f"{side}, MB": f"{size / 1e6:.2f}" for side, size in about["bytes"].items()}
    memory |= {f"{what} of the program, MB": f"{size / 1e6:.2f}" for what, size in about["program"].items()}
    speed = {name: f"{x['median']:.2f} ({x['min']:.2f}..{x['max']:.2f})" for name, x in about["speed"].items()}
    found = {"memory": memory, "speed": speed}
    for task, got in about["tasks"].items():
        cells = {f"α, temperature {heat}": f"{alpha:.3f}" for heat, alpha in got["alpha"].items()}
        cells |= {"overlap": f"{got['overlap']:.4f}"}
        cells |= {name: f"{value:.3f}" for name, value in got["quality"].items()}
        found[f"{task}, {got['rows']} prompts"] = cells | {"greedy texts as plain": str(got["same_text"])}
    return found


def _of_task(
    task: str, rows: Sequence[dict[str, Any]], first: Model, target: Model, draft: Model, settings: Settings
) -> dict[str, Any]:
    prompts, references = [row["input"] for row in rows], [row["reference"] for row in rows]
    job = prepare(target, prompts, drafter=draft, gamma=settings.gamma, max_new_tokens=settings.new_tokens)
    reference = prepare(first, prompts, drafter=target, max_new_tokens=settings.new_tokens)
    plain, _ = report.decode(job.plain())
    texts, per_round = report.decode(job)

    def alpha(job: Job, temperature: float) -> float:
        return acceptance.measure(job.replace(temperature=temperature, key=jax.random.key(0))).alpha

    scored = {}
    if task in report.SCORES:
        metric, score = report.SCORES[task]
        scored[metric] = score(plain, references)
    if settings.data is not None:
        scored["loss per token, nats"] = report.heldout_loss(target, settings.data, task)
    return {
        "rows": len(rows),
        "alpha": {str(heat): alpha(job, float(heat)) for heat in (0, 1)},
        "overlap": alpha(reference, 1.0),
        "quality": scored,
        "tokens_per_round": per_round,
        "same_text": sum(a == b for a, b in zip(texts, plain, strict=True)),
    }


def _bytes(model: Model) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(model.params))


def main(
    target: Annotated[str, typer.Option(help="The larger model: a shipped checkpoint's name, or a folder.")],
    draft: Annotated[str, typer.Option(help="The smaller model.")],
    rows: Annotated[int, typer.Option(help="Held-out prompts per task.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Most tokens to generate per prompt.", min=2)] = 64,
    gamma: Annotated[int, typer.Option(help="Draft tokens a round.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Timed runs.", min=1)] = 5,
    data: Annotated[Path | None, typer.Option(help="Folder of held-out data, for losses: see `report`.")] = None,
    unrounded_seed: Annotated[
        int | None,
        typer.Option("--unrounded", help="Instead of stored int8 matrices, take random ones that int8 rounds to them."),
    ] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
) -> None:
    """Measures a pair in float32, bfloat16 and int8."""
    with Console(stderr=True).status("loading") as status:
        pairs = pairs_of((target, draft), unrounded_seed)
        tasks = {name: corpus.heldout(name)[:rows] for name in corpus.tasks_of(pairs["float32"][0])}
        if set(tasks) & set(report.SCORES):
            quality.check()
        found = compare(pairs, tasks, Settings(gamma, new_tokens, repeats, data), status.update)
        found["unrounded"] = unrounded_seed
    Console().print(table(found))
    if json_out is not None:
        write_text(json_out, [json.dumps(found, indent=2), "\n"])


if __name__ == "__main__":
    typer.run(main)
