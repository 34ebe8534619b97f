"""Training in a time that is given: how many of a recipe's steps fit, so that its schedule ends in time."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model import load
from jaxspec.recipes import Recipe, net_of
from jaxspec.training import data, optimizer
from jaxspec.training.distil import distillation
from jaxspec.training.loop import TrainState, make_step
from jaxspec.training.losses import cross_entropy

SHARE = 0.8  # of the minutes, for the steps; the rest goes to reading data, held-out losses and saving
TIMED = 10  # steps, to learn how long one takes
STEPS = "steps.json"  # beside a run's state: what was decided when it began


def within(recipe: Recipe, minutes: float, work: Path) -> Recipe:
    """A language model's recipe with as many of its steps as fit the minutes; a run that goes on has those it had.

    Args:
        recipe: of a GPT or another decoder.
        minutes: for the training, about.
        work: holds the state of the run.

    Raises:
        ValueError: a recipe of an encoder-decoder, or no time at all.
    """
    if minutes <= 0:
        raise ValueError(f"minutes is {minutes:g}: expected more than 0")
    if recipe.family == "t5":
        raise ValueError(f"{recipe.name} is a recipe of an encoder-decoder: steps are timed of language models alone")
    decided = work / STEPS
    if not decided.is_file():
        each = seconds_per_step(recipe)
        steps = max(1, min(recipe.train.steps, int(60 * SHARE * minutes / each)))
        work.mkdir(parents=True, exist_ok=True)
        decided.write_text(json.dumps({"steps": steps, "seconds_per_step": each}), encoding="utf-8")
    steps = json.loads(decided.read_text(encoding="utf-8"))["steps"]
    return dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, steps=steps))


def seconds_per_step(recipe: Recipe) -> float:
    """What a step takes in the largest shape, compiled, on random tokens; the teacher's pass included."""
    config, random = recipe.model, np.random.default_rng(0)
    buckets = data.buckets(recipe.data.shapes, recipe.train.batch_tokens)
    shape = max(buckets, key=lambda bucket: bucket.rows * bucket.width)
    rows = random.integers(0, config.vocab_size, (shape.rows, shape.width))
    batch = data.collate([data.Example(np.zeros(0, np.int32), row) for row in rows], shape)
    loss = cross_entropy(config)
    if recipe.distil is not None:
        loss = distillation(config, load(recipe.distil.teacher, dtype=config.dtype), recipe.distil.weight)
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
