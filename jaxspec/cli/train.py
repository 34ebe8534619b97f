"""`jaxspec train`: from a recipe to a checkpoint, and from package descriptions to the recipes' data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import options


def train(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of one that comes with jaxspec.")
    ] = "",
    data: Annotated[Path, options.text("FOLDER", "Of the training data.")] = Path("data"),
    out: Annotated[Path | None, options.text("FOLDER", "For the checkpoint. Default: trained/NAME.")] = None,
    work: Annotated[Path | None, options.text("FOLDER", "For the state of the run. Default: runs/NAME.")] = None,
    steps: Annotated[int | None, options.text("N", "Train for so many steps instead of the recipe's.")] = None,
    minutes: Annotated[float | None, options.text("M", "Of a language model or a head: as many steps as fit.")] = None,
    dtype: Annotated[str, options.text("DTYPE", "Store matrices as float32, bfloat16 or int8.")] = "float32",
    overwrite: options.Overwrite = False,
    prepare_data: Annotated[
        bool, typer.Option("--prepare-data", help="First make the Debian recipes' data and tokenizers, in --data.")
    ] = False,
    lists: Annotated[
        Path | None, options.text("FOLDER", "For --prepare-data: description indices, instead of fetching them.")
    ] = None,
    releases: Annotated[
        str, options.text("NAMES", "For --prepare-data: other Debian releases to add texts of: trixie,sid.")
    ] = "",
    catalogues: Annotated[
        bool, typer.Option("--catalogues", help="For --prepare-data: also pairs from catalogues and manuals (0.7 GB).")
    ] = False,
) -> None:
    """Train a model, or a head on a model, by a recipe, or make the data that the recipes train on.

    A run that was interrupted goes on where it was when the same command is given again. The data of the recipes that
    come with jaxspec are Debian's package descriptions, which --prepare-data fetches with apt-get (on Debian or Ubuntu;
    no root needed, the system's lists stay as they are). Tables of n-grams are counted, not trained: that takes a
    minute, and no --steps, --work or --dtype.

    \b
        jaxspec train --prepare-data --data data
        jaxspec train debian-t5-small --data data --out my-t5-small
    """
    from jaxspec import recipes

    if not recipe and not prepare_data:
        names = ", ".join(recipes.shipped()) or "a .toml file"
        raise ValueError(f"got nothing to do: expected a RECIPE ({names}), --prepare-data, or both")
    if not prepare_data:
        of_data = [name for name in ("lists", "releases", "catalogues") if name in options.given.get()]
        options.refuse(of_data, "train without --prepare-data")
    found = recipes.load(recipe) if recipe else None
    if isinstance(found, recipes.TableRecipe):
        trained = [name for name in ("steps", "minutes", "work") if name in options.given.get()]
        options.refuse(trained, f"{found.name}, which is counted and not trained,")
    elif found is not None and steps is not None:
        found = dataclasses.replace(found, train=dataclasses.replace(found.train, steps=steps))
    if prepare_data:
        from jaxspec.training import debian

        out_, doing = Console(highlight=False), "preparing the data"
        with out_.status(doing):
            debian.prepare(data, lists, tuple(releases.split(",")) if releases else (), catalogues, out_.print)
    if found is not None:
        from jaxspec.training import run

        work = work or Path("runs", found.name)
        if minutes is not None and isinstance(found, recipes.Recipe | recipes.HeadRecipe):
            from jaxspec.training import budget

            found = budget.within(found, minutes, work)
        try:
            made = run.checkpoint(
                found, data, out or Path("trained", found.name), work, dtype=dtype, overwrite=overwrite
            )
        except KeyboardInterrupt:
            if work.is_dir():
                resumed = f"interrupted: the same command goes on from the last state in {work}"
                Console(stderr=True, highlight=False).print(Text(resumed, "dim"))
            raise
        print(made)
