"""A recipe's examples, task by task, and the batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxspec.training import data
from jaxspec.training.recipes import Data, HeadRecipe, Recipe, check_data

Tasks = dict[str, list[data.Example]]


def examples(options: Data, encoder: bool, folder: Path, tokenizer, held: bool = False) -> Tasks:
    """Reads the examples of each task of a recipe (of the one task "text" for a language model, without an encoder).

    Args:
        options: the recipe's data.
        encoder: whether the model has one.
        folder: holds the files.
        tokenizer: the model's tokenizer.
        held: the held-out examples instead of those to train on.

    Raises:
        RecipeError: the data are not those of such a model.
        FileNotFoundError, ValueError: a file is missing, or has no examples.
    """
    check_data(options, encoder)
    path = folder / (options.heldout if held else options.train)
    also = () if held else [folder / name for name in options.also]
    source, target = (max(sizes) for sizes in zip(*options.shapes, strict=True))
    if not encoder:
        return {"text": [example for file in (path, *also) for example in data.read_texts(file, tokenizer, target)]}
    return {task: data.read_pairs(path, tokenizer, [task], source, target, also) for task in options.tasks}


def batches(recipe: Recipe | HeadRecipe, tasks: Tasks, repeat: Sequence[int] = ()) -> data.Batches:
    """Makes batches of examples, each task's as often as `repeat` has it."""
    times = repeat or (1,) * len(tasks)
    repeated = [example for rows, n in zip(tasks.values(), times, strict=True) for example in list(rows) * n]
    shapes = data.buckets(recipe.data.shapes, recipe.train.batch_tokens)
    return data.Batches(repeated, shapes, recipe.train.seed)
