"""Training in a time that is given: how many of a recipe's steps fit, so that its schedule ends in time."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import Params
from jaxspec.model import load
from jaxspec.nets import net_of
from jaxspec.recipes import HeadRecipe, Recipe, Train
from jaxspec.training import data, early_exit, head_loss, heads, optimizer
from jaxspec.training.loop import TrainState, make_step
from jaxspec.training.losses import LossFunction, cross_entropy
from jaxspec.training.run import distillation_of

SHARE = 0.8  # of the minutes, for the steps; the rest goes to reading data, held-out losses and saving
TIMED = 10  # steps, to learn how long one takes
STEPS = "steps.json"  # beside a run's state: what was decided when it began


AnyTrained = TypeVar("AnyTrained", bound=Recipe | HeadRecipe)


def within(recipe: AnyTrained, minutes: float, work: Path) -> AnyTrained:
    """A recipe of a language model or a head with as many of its steps as fit; a run that goes on has those it had.

    Args:
        recipe: of a GPT or another decoder, or of a drafter that reads hidden states.
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


def seconds_per_step(recipe: Recipe | HeadRecipe) -> float:
    """What a step takes in the largest shape, compiled, on random tokens; the teacher's pass included."""
    if isinstance(recipe, HeadRecipe):
        target = load(recipe.target, dtype=recipe.train.dtype)
        head = heads.start(recipe, target, np.ones(target.lm.vocab_size, np.int64))
        lesson = head_loss.Lesson(_batch(recipe, target.lm.vocab_size), target.params)
        return _seconds(head_loss.losses(head.task)[1], head.params, lesson, recipe.train)
    config = recipe.model
    loss = cross_entropy(config)
    if recipe.distil is not None:
        loss = distillation_of(recipe, recipe.distil)
    params, batch = net_of(config).init(config, jax.random.key(0)), _batch(recipe, config.vocab_size)
    if recipe.early_exit is not None:
        batch = early_exit.Numbered(batch, np.zeros((), np.int32))
        loss = early_exit.loss(config, recipe.early_exit, recipe.train)
    return _seconds(loss, params, batch, recipe.train)


def _batch(recipe: Recipe | HeadRecipe, vocab: int) -> data.Batch:
    """Random tokens in the largest shape."""
    buckets, random = data.buckets(recipe.data.shapes, recipe.train.batch_tokens), np.random.default_rng(0)
    shape = max(buckets, key=lambda bucket: bucket.rows * (bucket.source + bucket.width))
    rows = random.integers(0, vocab, (shape.rows, shape.source + shape.width)).astype(np.int32)
    return data.collate([data.Example(row[: shape.source], row[shape.source :]) for row in rows], shape)


def _seconds(loss: LossFunction, params: Params, batch: Any, train: Train) -> float:
    made = optimizer.make(train)
    state, step = TrainState(jnp.zeros((), jnp.int32), params, made.init(params)), make_step(loss, made)
    state, value = step(state, batch)
    float(value)
    start = time.perf_counter()
    for _ in range(TIMED):
        state, value = step(state, batch)
        float(value)  # as the loop of training does
    return (time.perf_counter() - start) / TIMED
