"""From a recipe to a trained drafter that reads its target's hidden states: EAGLE, Medusa, MTP, block drafters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec.core import Model, Params
from jaxspec.draft_heads import kind_of
from jaxspec.draft_heads.kind import in_dtype
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import save
from jaxspec.draft_heads.training import VOCABULARY
from jaxspec.training.distil import own_texts
from jaxspec.training.head_loss import HeldOutAcceptance, Lessons, Task, held_out_acceptance, losses
from jaxspec.training.loop import Objective, fit
from jaxspec.training.recipes import HeadRecipe
from jaxspec.training.tasks import Tasks, batches, examples
from jaxspec.weights import huggingface
from jaxspec.weights.loading import load, with_taps

HELDOUT_TEXTS = 32  # per task and temperature
DTYPES = ("float32", "bfloat16")


class Head(NamedTuple):
    """A drafter in training.

    Attributes:
        target: with the taps that it reads.
        task: what it learns.
        params: without those that are not trained.
    """

    target: Model
    task: Task
    params: Params


def train(
    recipe: HeadRecipe, folder: Path, work: Path, log: Callable[[str], None] = print, progress: bool = True
) -> tuple[Head, HeldOutAcceptance]:
    """Trains a recipe's drafter on the data in `folder`, keeping its state in `work`.

    Returns:
        The drafter, and what it promises on held-out texts.
    """
    target = load(recipe.target, dtype=recipe.train.dtype)
    tasks, held = (texts(recipe, target, folder, split, work, progress) for split in ("train", "heldout"))
    head = start(recipe, target, counts(tasks, target.lm.vocab_size))
    training, heldout = (
        Lessons(batches(recipe, some, repeat), target.params)
        for some, repeat in ((tasks, recipe.data.repeat), (held, ()))
    )
    report = held_out_acceptance(head.task)
    log(f"{recipe.name}: {count(head.params):,} parameters; {training.batches.per_epoch} steps an epoch")
    log(f"untrained: {report(head.params, heldout.once())}")
    first, rest = losses(head.task)
    later = round(recipe.learn.kl * recipe.train.steps), rest
    objective = Objective(first, training, first, heldout, later, report)
    params, found = fit(head.params, objective, recipe.train, work / "state", log=log, progress=progress)
    return head._replace(params=params), found


def texts(recipe: HeadRecipe, target: Model, folder: Path, split: str, work: Path, progress: bool) -> Tasks:
    """The examples of each task, training or held-out: the data's, the target's own, or both.

    A decoder-only target continues the first `learn.prompt` tokens of a text.
    """
    about, learn, encoder = recipe.data, recipe.learn, target.lm.start_token is not None
    tokenizer = huggingface.tokenizer(folder / about.tokenizer) if about.tokenizer else target.tokenizer
    held = split == "heldout"
    tasks = examples(about, encoder, folder, tokenizer, held)
    if held:
        tasks = {task: some[:: max(1, len(some) // HELDOUT_TEXTS)][:HELDOUT_TEXTS] for task, some in tasks.items()}
        learn = dataclasses.replace(learn, answers=tuple(HELDOUT_TEXTS for _ in learn.answers), texts=0)
    if not learn.answers:
        return tasks
    return own_texts(target, tasks, learn, max(t for _, t in about.shapes), work / f"{split}.answers", progress)


def counts(tasks: Tasks, vocab: int) -> Int[np.ndarray, " V"]:
    """How often each token occurs in the texts that are learnt from."""
    return np.bincount(np.concatenate([e.target for some in tasks.values() for e in some]), minlength=vocab)


def start(recipe: HeadRecipe, target: Model, often: Int[np.ndarray, " V"]) -> Head:
    """Makes the drafter that a run begins with: a random one with what its kind copies of the target, or a trained one.

    Args:
        recipe: its sizes.
        target: whom it drafts for.
        often: how often tokens occur, of which a vocabulary of its own has the most frequent ones.
    """
    config = in_dtype(recipe.head.config(target), recipe.train.dtype)
    kind = kind_of(config)
    if recipe.learn.regression and not kind.training.predicts_features(config):
        raise ValueError(f"{recipe.name} has learn.regression: only EAGLE-1, without taps, predicts hidden states")
    if taps := kind.head(config).requirements.taps:
        target = with_taps(target, taps)
    if recipe.train.start:
        trained_config, params = read_head(recipe.train.start, target=target)
        if trained_config != config:
            raise ValueError(
                f"{recipe.train.start} holds {trained_config}, and {recipe.name} is {config}: start from another"
            )
    else:
        params = kind.init(config, jax.random.key(recipe.train.seed))
        params = kind.training.begin(config, params, target, often)
    params = jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    frozen = {name: x for name, x in params.items() if name == VOCABULARY}
    trained = {name: x for name, x in params.items() if name != VOCABULARY}
    return Head(target, Task(target.lm, config, frozen, recipe.learn), trained)


def count(params: Params) -> int:
    """How many numbers."""
    return sum(x.size for x in jax.tree.leaves(params))


def checkpoint(
    recipe: HeadRecipe, folder: Path, out: Path, work: Path, *, dtype: str = "float32", overwrite: bool = False
) -> str:
    """Trains a recipe's drafter and writes what `jaxspec.load_drafter` reads; arguments as `run.checkpoint`'s."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}: drafters that read hidden states are stored as {' or '.join(DTYPES)}")
    head, found = train(recipe, folder, work)
    config = in_dtype(head.task.config, dtype)
    whole, tokens = {**head.params, **head.task.frozen}, head.task.depths
    save(config, whole, out, target=head.target, tokens=tokens, overwrite=overwrite)
    return f"{out}: {count(head.params):,} parameters as {dtype}. On held-out texts at {found}"
