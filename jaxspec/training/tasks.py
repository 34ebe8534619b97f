"""A recipe's examples, task by task, and the batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxspec.training import data
from jaxspec.training.recipes import Data, HeadRecipe, Recipe, check_data

Tasks = dict[str, list[data.Example]]


def examples(about: Data, encoder: bool, folder: Path, tokenizer, held: bool = False) -> Tasks:
    """The examples of each task of a recipe (of the one task "text" for a language model, which has no encoder).

    Args:
        about: the recipe's data.
        encoder: whether the model has one.
        folder: holds the files.
        tokenizer: of the model.
        held: the held-out examples instead of those to train on.

    Raises:
        RecipeError: the data are not those of such a model.
        FileNotFoundError, ValueError: a file is missing, or has no examples.
    """
    check_data(about, encoder)
    path = folder / (about.heldout if held else about.train)
    also = () if held else [folder / name for name in about.also]
    source = max(s for s, _ in about.shapes)
    target = max(t for _, t in about.shapes)
    if not encoder:
        return {"text": [example for file in (path, *also) for example in data.read_texts(file, tokenizer, target)]}
    return {task: data.read_pairs(path, tokenizer, [task], source, target, also) for task in about.tasks}


def batches(recipe: Recipe | HeadRecipe, tasks: Tasks, repeat: Sequence[int] = ()) -> data.Batches:
    """The batches of some examples, those of each task as often as `repeat` has it."""
    repeated = [e for some, n in zip(tasks.values(), repeat or (1,) * len(tasks), strict=True) for e in list(some) * n]
    shapes = data.buckets(recipe.data.shapes, recipe.train.batch_tokens)
    return data.Batches(repeated, shapes, recipe.train.seed)
