"""The training of drafters that read their target's hidden states: EAGLE, Medusa, MTP, block drafters."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.core import Model, Params
from jaxspec.draft_heads import kind_of
from jaxspec.draft_heads.kind import in_dtype
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import config_json, save
from jaxspec.draft_heads.training import VOCABULARY
from jaxspec.training.data import Tasks, TrainingBatch, batches, counts, examples, few
from jaxspec.training.distil import own_texts
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.training.head_loss import HeadTask, HeldOutAcceptance, Lesson, head_loss, held_out_acceptance
from jaxspec.training.loop import Destination, Objective, TrainingRun
from jaxspec.training.recipes import HeadRecipe, RecipeError
from jaxspec.weights import tokenizers
from jaxspec.weights.loading import load, with_taps

HELDOUT_TEXTS = 32  # per task and temperature
DTYPES = ("float32", "bfloat16")


class HeadInTraining(NamedTuple):
    """A drafter in training."""

    target: Model  # with the taps that it reads
    task: HeadTask  # the drafter, its target and what it learns
    params: Params  # without those that are not trained


def prepare(recipe: HeadRecipe, folder: Path, work: Path, progress: bool) -> TrainingRun:
    """Makes the untrained drafter of a recipe, and its objective on the data in `folder`, as `run.train` takes them."""
    languages = {"source_language": recipe.source_language, "target_language": recipe.target_language}
    target = load(recipe.target, dtype=recipe.train.dtype, **languages)
    config_of(recipe, target)  # a wrong recipe is refused before its texts are made
    tasks, heldout_tasks = (texts(recipe, target, folder, split, work, progress) for split in ("train", "heldout"))
    head = start(recipe, target, counts(tasks, target.lm.vocab_size))
    # A run begins with the forward KL.
    first, later = (head_loss(head.task, DIVERGENCES[name]) for name in ("kl", recipe.learn.divergence))
    acceptance = held_out_acceptance(head.task)

    def lesson(batch: TrainingBatch, step: int) -> Lesson:
        return Lesson(batch, target.params)

    objective = Objective(
        first,
        batches(recipe, tasks, recipe.data.repeat),
        lambda params, heldout: acceptance(params, (lesson(batch, 0) for batch in heldout)),
        batches(recipe, heldout_tasks),
        (round(recipe.learn.kl * recipe.train.steps), later),
        lesson,
    )
    return TrainingRun(head.params, head.task.frozen, objective, functools.partial(write, head))


def texts(recipe: HeadRecipe, target: Model, folder: Path, split: str, work: Path, progress: bool) -> Tasks:
    """Returns the examples of each task, training or held-out: the data's, the target's own, or both.

    A decoder-only target continues the first `learn.prompt` tokens of a text.
    """
    options, learn, encoder = recipe.data, recipe.learn, target.lm.limits.start_token is not None
    tokenizer = tokenizers.load(folder / options.tokenizer) if options.tokenizer else target.tokenizer
    tasks = examples(options, encoder, folder, tokenizer, heldout=split == "heldout")
    if split == "heldout":
        tasks = {task: rows[:HELDOUT_TEXTS] for task, rows in few(tasks, HELDOUT_TEXTS).items()}
        learn = dataclasses.replace(learn, answers=tuple(HELDOUT_TEXTS for _ in learn.answers), texts=0)
    if not learn.answers:
        return tasks
    return own_texts(target, tasks, learn, options.longest, work / f"{split}.answers", progress)


def config_of(recipe: HeadRecipe, target: Model) -> Any:
    """Returns the configuration of the drafter that a recipe makes for its target.

    Raises:
        RecipeError: the sizes make no drafter of this target, or one that no format can store.
    """
    try:
        config = in_dtype(recipe.head.config(target), recipe.train.dtype)
        config_json(config, target)  # what cannot be written in the end is not trained
    except ValueError as error:
        raise RecipeError(f"{recipe.name}: [head] {error}") from error
    return config


def start(recipe: HeadRecipe, target: Model, frequencies: Int[np.ndarray, " V"]) -> HeadInTraining:
    """Makes the drafter that a run begins with: random, with what its kind copies of the target, or a trained one.

    Args:
        frequencies: counts of tokens, of which a vocabulary of its own has the most frequent ones.
    """
    config = config_of(recipe, target)
    head_kind = kind_of(config)
    assert head_kind.training is not None, "recipes have the kinds that are trained"
    if recipe.learn.regression and not head_kind.training.predicts_features(config):
        raise ValueError(f"{recipe.name} has learn.regression: only EAGLE-1, without taps, predicts hidden states")
    if recipe.learn.hard and not head_kind.training.names_candidates:
        raise ValueError(f"{recipe.name} has learn.hard: only DFlash 2 chooses among candidates")
    if taps := head_kind.head(config).requirements.taps:
        target = with_taps(target, taps)
    if recipe.train.start:
        trained_config, params = read_head(recipe.train.start, target=target)
        if trained_config != config:
            trained = f"{recipe.train.start} holds {trained_config}"
            raise ValueError(f"{trained}: expected {config}, of {recipe.name}; start from another")
    else:
        params = head_kind.init(config, jax.random.key(recipe.train.seed))
        params = head_kind.training.begin(config, params, target, frequencies)
    params = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    frozen = {VOCABULARY: params.pop(VOCABULARY)} if VOCABULARY in params else {}
    return HeadInTraining(target, HeadTask(target.lm, config, frozen, recipe.learn), params)


def write(head: HeadInTraining, params: Params, held_out: HeldOutAcceptance, to: Destination) -> str:
    """Writes a drafter as `jaxspec.load_drafter` reads it; returns a line that describes it."""
    config = in_dtype(head.task.config, to.dtype)
    save(config, params, to.out, target=head.target, tokens=head.task.depths, overwrite=to.overwrite)
    size = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    return f"{to.out}: {size:,} parameters as {to.dtype}. On held-out texts at {held_out}"
