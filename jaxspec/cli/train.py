"""`jaxspec train`: from a recipe to a checkpoint, and from package descriptions to the recipes' data."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from jaxspec.recipes import Recipe, TableRecipe

TOKENIZERS = ("tokenizer-t5", "tokenizer-gpt")


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(help="A recipe file, or the name of one that comes with jaxspec.", metavar="RECIPE"),
    ] = None,
    data: Annotated[Path, typer.Option(help="Folder of the training data.")] = Path("data"),
    out: Annotated[
        Path | None,
        typer.Option(help="Where the trained checkpoint goes. Default: trained/NAME."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Where the state of the run is stored. Default: runs/NAME."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Train for so many steps instead of the recipe's.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Of a language model: as many steps as fit.")] = None,
    dtype: Annotated[str, typer.Option(help="How matrices are stored: float32, bfloat16 or int8.")] = "float32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint at --out.")] = False,
    prepare_data: Annotated[
        bool,
        typer.Option("--prepare-data", help="First make the Debian recipes' data and tokenizers, in --data."),
    ] = False,
    lists: Annotated[
        Path | None,
        typer.Option(help="For --prepare-data: a folder that has the description indices, instead of fetching them."),
    ] = None,
    releases: Annotated[
        str | None,
        typer.Option(help="For --prepare-data: other Debian releases to add texts of, such as trixie,sid."),
    ] = None,
) -> None:
    """Train a model by a recipe, or make the data that the recipes train on.

    A run that was interrupted goes on where it was when the same command is given again. The data of the
    recipes that come with jaxspec are Debian's package descriptions, which --prepare-data fetches with
    apt-get (on Debian or Ubuntu; no root needed, the system's lists stay as they are):

        jaxspec train --prepare-data --data data

        jaxspec train debian-t5-small --data data --out my-t5-small

    A recipe of n-gram tables is counted, not trained: it takes a minute and no --steps, --work or --dtype.
    """
    if recipe is None and not prepare_data:
        raise ValueError(f"got nothing to do: expected a RECIPE ({_names()}), --prepare-data, or both")
    found = None if recipe is None else _load(recipe, steps)
    if prepare_data:
        _prepare(data, lists, releases.split(",") if releases else [])
    if found is not None:
        out = out or Path("trained", found.name)
        if found.family == "ngram":
            _count(found, data, out, dtype, overwrite)
        else:
            folder = work or Path("runs", found.name)
            if minutes is not None:
                from jaxspec.training import budget

                found = budget.within(found, minutes, folder)
            _train(found, data, out, folder, dtype, overwrite)


def recipe_files() -> dict[str, Path]:
    """The recipes that come with jaxspec, by name: those of a wheel, else those of a checkout."""
    import jaxspec

    package = Path(jaxspec.__file__).resolve().parent
    found: dict[str, Path] = {}
    for folder in (package / "data" / "recipes", package.parent / "models"):
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def _names() -> str:
    return ", ".join(recipe_files()) or "a .toml file"


def _load(recipe: str, steps: int | None) -> Any:
    from jaxspec import recipes

    path, known = Path(recipe), recipe_files()
    if not path.is_file():
        if recipe not in known:
            near = difflib.get_close_matches(recipe, known, n=1)
            meant = f": did you mean {near[0]!r}?" if near else f": expected a .toml file, or one of {_names()}"
            raise FileNotFoundError(f"no recipe {recipe!r}{meant}")
        path = known[recipe]
    found = recipes.load(path)
    if steps is None:
        return found
    if isinstance(found, recipes.TableRecipe):
        raise ValueError(f"{found.name} is counted, not trained: it has no --steps")
    return dataclasses.replace(found, train=dataclasses.replace(found.train, steps=steps))


def _prepare(data: Path, lists: Path | None, releases: list[str]) -> None:
    """Fetches the indices, builds the data files, trains the tokenizers that are not there yet."""
    from jaxspec.training import debian, debian_edits, debian_index, tokenizer

    out = Console(highlight=False)
    try:
        if lists is None:
            lists = data / "lists"
            with out.status("fetching the description indices with apt-get"):
                debian_index.fetch(lists)
        made = debian.build(lists, data) | debian_edits.build(data)
        if releases:
            with out.status(f"fetching the description indices of {', '.join(releases)}"):
                debian_index.fetch(data / "releases", releases=releases)
            made |= debian.build_releases(lists, data / "releases", data)
        for file, rows in made.items():
            out.print(f"{data / file}: {rows:,} rows")
    except ModuleNotFoundError as error:
        raise ValueError(f'{error.name} is not installed: pip install "jaxspec-decoding[train]"') from error
    except RuntimeError as error:  # apt-get is absent, or failed
        raise ValueError(str(error)) from error
    folders = [data / name for name in TOKENIZERS]
    if all((folder / "tokenizer.json").is_file() for folder in folders):
        out.print("the tokenizers are there already, and are not made again: models trained with them fit no others")
        return
    with out.status("training the tokenizers"):
        tokenizer.train_tokenizers(data, folders[0], folders[1])
    out.print(f"tokenizers: {', '.join(map(str, folders))}")


def _train(recipe: Recipe, data: Path, out: Path, work: Path, dtype: str, overwrite: bool) -> None:
    """Runs a recipe and saves what comes out; what can be refused is refused before the first step."""
    _check([recipe.data.train, recipe.data.heldout, f"{recipe.data.tokenizer}/tokenizer.json"], data, out, overwrite)
    import jaxspec
    from jaxspec.training import run
    from jaxspec.weights import orbax

    if dtype not in orbax.DTYPES:
        raise ValueError(f"dtype is {dtype!r}: expected one of {', '.join(orbax.DTYPES)}")
    err = Console(stderr=True, highlight=False)
    try:
        params, loss = run.train(recipe, data, work)
    except KeyboardInterrupt:
        err.print(Text(f"interrupted: the same command goes on from the last state in {work}", "dim"))
        raise
    about = {
        "heldout_loss": round(float(loss), 4),
        "steps": recipe.train.steps,
        "jaxspec": jaxspec.__version__,
    }
    if recipe.distil is not None:
        about["teacher"] = recipe.distil.teacher
    manifest = orbax.save(
        out,
        params,
        recipe.model,
        data / recipe.data.tokenizer,
        name=recipe.name,
        family=recipe.family,
        dtype=dtype,
        about=about,
        overwrite=overwrite,
    )
    print(f"{out}: {manifest.parameters:,} parameters as {dtype}, held-out loss {loss:.4f} nats per token")


def _count(recipe: TableRecipe, data: Path, out: Path, dtype: str, overwrite: bool) -> None:
    """Counts the tables of a recipe and saves them."""
    _check([recipe.data.train, recipe.data.heldout], data, out, overwrite)
    if dtype != "float32":
        raise ValueError(f"dtype is {dtype!r}: tables are integers and have none")
    import jaxspec
    from jaxspec import vocabulary
    from jaxspec.training import ngrams
    from jaxspec.weights import orbax

    counted = ngrams.train(recipe, data)
    with vocabulary.tokenizer_folder(counted.vocabulary) as words:
        manifest = orbax.save(
            out,
            counted.tables,
            counted.config,
            words,
            name=recipe.name,
            family=recipe.family,
            dtype=dtype,
            about={**counted.about, "jaxspec": jaxspec.__version__},
            overwrite=overwrite,
        )
    contexts = ", ".join(f"{n:,} of {length} tokens" for length, n in enumerate(counted.config.contexts, 1))
    size = sum(entry[0] for entry in manifest.files.values())
    print(
        f"{out}: {size:,} bytes; contexts: {contexts or 'none'}; the first draft token is right for "
        f"{counted.about['heldout_hits']:.1%} of held-out tokens"
    )


def _check(wanted: list[str], data: Path, out: Path, overwrite: bool) -> None:
    missing = [file for file in wanted if not (data / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{data} lacks {', '.join(missing)}: `jaxspec train --prepare-data --data {data}` makes the data "
            "of the recipes that come with jaxspec"
        )
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already: choose another --out, or --overwrite it")
