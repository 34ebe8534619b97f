"""The training of drafters that read their target's hidden states: EAGLE, Medusa, MTP, block
drafters.
"""

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
from jaxspec.training.data import Batches, Tasks, TrainingBatch, batches, counts, examples, few
from jaxspec.training.distil import own_texts
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.training.head_loss import (
    TARGET,
    HeadTask,
    HeldOutAcceptance,
    Lesson,
    combined_loss,
    head_loss,
    held_out_acceptance,
)
from jaxspec.training.loop import Destination, Objective, TrainingRun, mean_loss
from jaxspec.training.losses import LossFunction, cross_entropy
from jaxspec.training.recipes import HeadRecipe, RecipeError
from jaxspec.weights import huggingface, quantisation, tokenizers
from jaxspec.weights.loading import load, with_taps

HELDOUT_TEXTS = 32  # per task and temperature
DTYPES = ("float32", "bfloat16")


class HeadInTraining(NamedTuple):
    """A drafter in training."""

    target: Model  # with the taps that it reads, and the parameters that it has before it learns
    task: HeadTask  # the drafter, its target and what it learns
    # without those that are not trained; with the target's, where it learns, too
    # (`head_loss.TARGET`)
    params: Params


def prepare(recipe: HeadRecipe, folder: Path, work: Path, progress: bool) -> TrainingRun:
    """Makes the untrained drafter of a recipe, and its objective on the data in `folder`, as
    `run.train` takes them.
    """
    languages = {
        "source_language": recipe.source_language,
        "target_language": recipe.target_language,
    }
    target = load(recipe.target, dtype=recipe.train.dtype, **languages)
    config_of(recipe, target)  # a wrong recipe is refused before its texts are made
    tasks, heldout_tasks = (
        texts(recipe, target, folder, split, work, progress) for split in ("train", "heldout")
    )
    head = start(recipe, target, counts(tasks, target.lm.vocab_size))
    (_, first), *later = losses(recipe, head.task)
    acceptance = held_out_acceptance(head.task)
    learns = TARGET in head.params

    def lesson(batch: TrainingBatch, step: int) -> Lesson:
        return Lesson(batch, {} if learns else target.params)

    objective = Objective(
        first,
        batches(recipe, tasks, recipe.data.repeat),
        lambda params, heldout: acceptance(params, (lesson(batch, 0) for batch in heldout)),
        batches(recipe, heldout_tasks),
        tuple(later),
        lesson,
        {TARGET: recipe.learn.target_rate} if learns else {},
    )
    return TrainingRun(
        head.params, head.task.frozen, objective, functools.partial(write, head, objective.heldout)
    )


def losses(recipe: HeadRecipe, task: HeadTask) -> list[tuple[int, LossFunction]]:
    """Returns the losses of a run, each with the step that it begins at.

    A run begins with the forward KL. A target that learns does so after `learn.heads_first` of the
    run.
    """
    learn = recipe.learn
    steps = recipe.train.steps
    blended = round(learn.kl * steps)
    joined = round(learn.heads_first * steps)
    starts = sorted({0, blended, joined} if learn.target_rate else {0, blended})

    def loss_from(step: int) -> LossFunction:
        divergence = DIVERGENCES[learn.divergence if step >= blended else "kl"]
        return (combined_loss if learn.target_rate and step >= joined else head_loss)(
            task, divergence
        )

    return [(step, loss_from(step)) for step in starts]


def texts(
    recipe: HeadRecipe, target: Model, folder: Path, split: str, work: Path, progress: bool
) -> Tasks:
    """Returns the examples of each task, training or held-out: the data's, the target's own, or
    both.

    A decoder-only target continues the first `learn.prompt` tokens of a text.
    """
    options = recipe.data
    learn = recipe.learn
    encoder = target.lm.limits.start_token is not None
    if options.tokenizer:
        tokenizer = tokenizers.load(folder / options.tokenizer)
    else:
        tokenizer = target.tokenizer
    tasks = examples(options, encoder, folder, tokenizer, heldout=split == "heldout")
    if split == "heldout":
        tasks = {task: rows[:HELDOUT_TEXTS] for task, rows in few(tasks, HELDOUT_TEXTS).items()}
        learn = dataclasses.replace(
            learn, answers=tuple(HELDOUT_TEXTS for _ in learn.answers), texts=0
        )
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
    """Makes the drafter that a run begins with: random, with the parts that its kind copies from
    the target, or a trained one.

    Args:
        frequencies: counts of tokens; a smaller vocabulary has the most frequent ones.
    """
    config = config_of(recipe, target)
    head_kind = kind_of(config)
    assert head_kind.training is not None, "recipes have the kinds that are trained"
    if recipe.learn.regression and not head_kind.training.predicts_features(config):
        raise ValueError(
            f"{recipe.name} has learn.regression: only EAGLE-1, without taps, predicts hidden "
            "states"
        )
    if recipe.learn.hard and not head_kind.training.names_candidates:
        raise ValueError(f"{recipe.name} has learn.hard: only DFlash 2 chooses among candidates")
    taps = head_kind.head(config).requirements.taps
    if taps:
        target = with_taps(target, taps)
    if recipe.train.start:
        trained_config, params = read_head(recipe.train.start, target=target)
        if trained_config != config:
            trained = f"{recipe.train.start} holds {trained_config}"
            raise ValueError(f"{trained}: expected {config}, of {recipe.name}; start from another")
    else:
        params = head_kind.init(config, jax.random.key(recipe.train.seed))
        params = head_kind.training.begin(config, params, target, frequencies)
    params = in_float32(params)
    frozen = {}
    if VOCABULARY in params:
        frozen = {VOCABULARY: params.pop(VOCABULARY)}
    if recipe.learn.target_rate:
        params |= {TARGET: in_float32(target.params)}
        # It differs from the model that it begins as.
        target = target._replace(name=f"{recipe.name}-target")
    return HeadInTraining(target, HeadTask(target.lm, config, frozen, recipe.learn), params)


def in_float32(params: Params) -> Params:
    """Returns parameters as they are trained, whatever the dtype of the computation."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def write(
    head: HeadInTraining,
    heldout: Batches,
    params: Params,
    held_out: HeldOutAcceptance,
    to: Destination,
) -> str:
    """Writes a drafter as `jaxspec.load_drafter` reads it; returns a line that describes it.

    A target that has learnt with its heads is written beside them: a model in `target`, and its
    heads in `heads`.
    """
    config = in_dtype(head.task.config, to.dtype)
    folder = to.out
    beside = ""
    size = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    if TARGET in params:
        folder = to.out / "heads"
        trained = quantisation.quantise(params[TARGET], to.dtype)
        params = {name: params[name] for name in params if name != TARGET}
        config_then = dataclasses.replace(head.target.config, dtype=to.dtype)
        huggingface.save(
            head.target._replace(params=trained, config=config_then),
            to.out / "target",
            overwrite=to.overwrite,
        )
        loss = mean_loss(cross_entropy(head.target.config))
        before, after = (loss(x, heldout.once()) for x in (head.target.params, in_float32(trained)))
        beside = (
            f". The target's own loss there: {before:.4f} nats per token before, {after:.4f} now"
        )
    save(
        config, params, folder, target=head.target, tokens=head.task.depths, overwrite=to.overwrite
    )
    return f"{to.out}: {size:,} parameters as {to.dtype}. On held-out texts at {held_out}{beside}"
