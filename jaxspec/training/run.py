"""From a recipe to a trained checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import transformers

from jaxspec.model import load
from jaxspec.nets import gpt, t5
from jaxspec.recipes import Distil, Recipe
from jaxspec.training import data, optimizer
from jaxspec.training.distil import answers, distillation
from jaxspec.training.loop import fit
from jaxspec.training.losses import cross_entropy

HELDOUT_EXAMPLES = 256  # per task; enough for a loss to two digits


def examples(recipe: Recipe, folder: Path, tokenizer, file: str) -> dict[str, list[data.Example]]:
    """The examples of each task of a recipe (of the one task "text" for a language model)."""
    source = max(s for s, _ in recipe.data.shapes)
    target = max(t for _, t in recipe.data.shapes)
    if recipe.family == "gpt":
        return {"text": data.read_texts(folder / file, tokenizer, target)}
    return {task: data.read_pairs(folder / file, tokenizer, [task], source, target) for task in recipe.data.tasks}


def batches(
    recipe: Recipe, folder: Path, tokenizer, extra: Sequence[data.Example] = ()
) -> tuple[data.Batches, data.Batches]:
    """Training batches (of the recipe's examples and `extra` ones) and held-out batches."""
    shapes = data.buckets(recipe.data.shapes, recipe.train.batch_tokens)
    repeats = recipe.data.repeat or (1,) * max(1, len(recipe.data.tasks))
    train = examples(recipe, folder, tokenizer, recipe.data.train)
    repeated = [e for task, repeat in zip(train.values(), repeats, strict=True) for _ in range(repeat) for e in task]
    held = examples(recipe, folder, tokenizer, recipe.data.heldout)
    few = [e for task in held.values() for e in task[:: max(1, len(task) // HELDOUT_EXAMPLES)]]
    return data.Batches([*repeated, *extra], shapes, recipe.train.seed), data.Batches(few, shapes, recipe.train.seed)


def teach(recipe: Recipe, distil: Distil, folder: Path, work: Path, tokenizer, progress: bool):
    """The distillation loss, and the teacher's answers to training inputs."""
    teacher = load(distil.teacher)
    loss = distillation(recipe.model, teacher, distil.weight)
    if not distil.answers:
        return loss, []
    train = examples(recipe, folder, tokenizer, recipe.data.train)
    each = distil.answers // len(train)
    asked = [e for task in train.values() for e in task[:: max(1, len(task) // each)][:each]]
    longest = max(t for _, t in recipe.data.shapes)
    return loss, answers(teacher, asked, work / "answers.jsonl", longest, progress)


def train(recipe: Recipe, folder: Path, work: Path, log: Callable[[str], None] = print, progress: bool = True):
    """Trains a recipe's model on the data in `folder`, keeping its state in `work`.

    Returns:
        The parameters, and the held-out negative log likelihood per token in nats.
    """
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / recipe.data.tokenizer)
    likelihood = cross_entropy(recipe.model)
    loss, extra = likelihood, []
    if recipe.distil is not None:
        loss, extra = teach(recipe, recipe.distil, folder, work, tokenizer, progress)
    training, heldout = batches(recipe, folder, tokenizer, extra)
    net = t5 if recipe.family == "t5" else gpt
    params = net.init(recipe.model, jax.random.key(recipe.train.seed))
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
        log=log,
        progress=progress,
    )
