"""From a recipe to a trained checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import transformers

from jaxspec.base import Params
from jaxspec.model import load
from jaxspec.nets.resize import resize
from jaxspec.recipes import Distil, Recipe, net_of
from jaxspec.training import data, optimizer
from jaxspec.training.distil import answers, distillation
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.training.loop import fit
from jaxspec.training.losses import LossFunction, cross_entropy

HELDOUT_EXAMPLES = 256  # per task; enough for a loss to two digits

Tasks = dict[str, list[data.Example]]


def examples(recipe: Recipe, folder: Path, tokenizer, file: str) -> Tasks:
    """The examples of each task of a recipe (of the one task "text" for a language model)."""
    source = max(s for s, _ in recipe.data.shapes)
    target = max(t for _, t in recipe.data.shapes)
    if recipe.family != "t5":
        return {"text": data.read_texts(folder / file, tokenizer, target)}
    return {task: data.read_pairs(folder / file, tokenizer, [task], source, target) for task in recipe.data.tasks}


def teach(recipe: Recipe, distil: Distil, tasks: Tasks, work: Path, progress: bool) -> tuple[LossFunction, Tasks]:
    """The distillation loss, and the examples of each task: the data's, or the teacher's answers to their sources."""
    config = _in_training(recipe)
    loss = cross_entropy(config)
    if distil.weight:  # without it, a pass is saved
        teacher = load(distil.teacher, dtype=recipe.train.dtype)
        loss = distillation(config, teacher, distil.weight, DIVERGENCES[distil.divergence])
    if not distil.answers:
        return loss, tasks
    if len(distil.answers) != len(tasks):
        raise ValueError(f"distil.answers is {list(distil.answers)}: expected a number for each of {list(tasks)}")
    teacher = load(distil.teacher, dtype=recipe.model.dtype)
    longest = max(t for _, t in recipe.data.shapes)
    learnt = {}
    for (task, asked), count in zip(tasks.items(), distil.answers, strict=True):
        some = asked[:: max(1, len(asked) // max(1, count))][:count]
        learnt[task] = list(asked) * distil.texts
        for temperature in distil.temperatures:
            path = work / (f"answers.{task}.{temperature}.jsonl" if temperature else f"answers.{task}.jsonl")
            learnt[task] += answers(teacher, some, path, longest, progress, temperature)
    return loss, learnt


def _in_training(recipe: Recipe) -> Any:
    """The model's configuration, in the dtype that it is trained in."""
    return dataclasses.replace(recipe.model, dtype=recipe.train.dtype)


def start(recipe: Recipe) -> Params:
    """The parameters that a run begins with: random ones, or those of a checkpoint, brought to the recipe's shape."""
    key = jax.random.key(recipe.train.seed)
    if not recipe.train.start:
        return net_of(recipe.model).init(recipe.model, key)
    model = load(recipe.train.start)
    return model.params if model.config == recipe.model else resize(model.params, model.config, recipe.model, key)


def train(recipe: Recipe, folder: Path, work: Path, log: Callable[[str], None] = print, progress: bool = True):
    """Trains a recipe's model on the data in `folder`, keeping its state in `work`.

    Returns:
        The parameters, and the held-out negative log likelihood per token in nats.
    """
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / recipe.data.tokenizer)
    likelihood = cross_entropy(recipe.model)
    loss, tasks = cross_entropy(_in_training(recipe)), examples(recipe, folder, tokenizer, recipe.data.train)
    if recipe.distil is not None:
        loss, tasks = teach(recipe, recipe.distil, tasks, work, progress)
    held = examples(recipe, folder, tokenizer, recipe.data.heldout)
    few = [e for task in held.values() for e in task[:: max(1, len(task) // HELDOUT_EXAMPLES)]]
    repeats = recipe.data.repeat or (1,) * len(tasks)
    repeated = [e for task, repeat in zip(tasks.values(), repeats, strict=True) for _ in range(repeat) for e in task]
    shapes = data.buckets(recipe.data.shapes, recipe.train.batch_tokens)
    training, heldout = (data.Batches(some, shapes, recipe.train.seed) for some in (repeated, few))
    params = start(recipe)
    count = sum(x.size for x in jax.tree.leaves(params))
    log(f"{recipe.name}: {count:,} parameters; {training.per_epoch} steps an epoch")
    return fit(
        params,
        loss,
        optimizer.make(recipe.train),
        training,
        heldout,
        work / "state",
        heldout_loss=likelihood,
        steps=recipe.train.steps,
        evaluate_every=recipe.train.evaluate_every,
        save_every=recipe.train.save_every,
        average=recipe.train.average,
        log=log,
        progress=progress,
    )
