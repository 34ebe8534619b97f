"""`jaxspec train`: trains a checkpoint by a recipe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from jaxspec.cli import console, options


def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", help="A recipe file, or the name of one that comes with jaxspec."
        ),
    ] = "",
    data: Annotated[Path, options.text("FOLDER", "Of the training data.")] = Path("data"),
    out: Annotated[
        Path | None, options.text("FOLDER", "For the checkpoint. Default: trained/NAME.")
    ] = None,
    work: Annotated[
        Path | None, options.text("FOLDER", "For the state of the run. Default: runs/NAME.")
    ] = None,
    steps: Annotated[
        int | None, options.text("N", "Train for so many steps instead of the recipe's.")
    ] = None,
    dtype: Annotated[
        str, options.text("DTYPE", "Store matrices as float32, bfloat16, int8 or int4.")
    ] = "float32",
    overwrite: options.Overwrite = False,
) -> None:
    """Train a model, or a head on a model, by a recipe.

    A run that was interrupted goes on where it was when the same command is given again. The data
    of the recipes that come with jaxspec are Debian's package descriptions: in a checkout `python
    -m data_prep.debian` makes them. Tables of n-grams are counted, not trained: that takes a
    minute, and no --steps, --work or --dtype.

    \b
        jaxspec train debian-t5-small --data data --out my-t5-small
        jaxspec train my-recipe.toml --data my-data
    """
    from jaxspec.training import recipes

    if not recipe:
        names = ", ".join(recipes.shipped()) or "a .toml file"
        raise ValueError(f"got nothing to do: expected a RECIPE ({names})")
    plan = recipes.load(recipe)
    if isinstance(plan, recipes.TableRecipe):
        options.refuse(
            options.typed(context, ("steps", "work")),
            f"{plan.name}, which is counted and not trained,",
        )
    elif steps is not None:
        plan = dataclasses.replace(plan, train=dataclasses.replace(plan.train, steps=steps))
    from jaxspec.training import run

    work = work or Path("runs", plan.name)
    try:
        line = run.checkpoint(
            plan, data, out or Path("trained", plan.name), work, dtype=dtype, overwrite=overwrite
        )
    except KeyboardInterrupt:
        if work.is_dir():
            resumed = f"interrupted: the same command goes on from the last state in {work}"
            console.note(resumed, "dim")
        raise
    print(line)
