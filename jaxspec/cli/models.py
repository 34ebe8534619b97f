"""`jaxspec models`: shipped checkpoints, models in this folder, memory of published sizes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import filesize

from jaxspec.analysis import sizes
from jaxspec.cli import console
from jaxspec.cli.console import Console, Record
from jaxspec.cli.options import Json, flag
from jaxspec.weights.shipped import shipped

MANIFEST = "manifest.toml"
CONFIG = "config.json"
WEIGHTS = (".safetensors", ".bin")
LOOKED_AT = 1_000  # entries of this folder, at most


class StoredModel(NamedTuple):
    """A model on disk, as far as its small files tell."""

    name: str  # the name of its folder or file
    family: str  # the network's family, or what config.json calls it
    parameters: int | None  # None if no small file says how many
    stored_as: str  # the dtype of matrices; empty if unknown
    size: int  # bytes


def models(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Sizes of a family or of models whose name has this: llama, qwen3-8b.",
        ),
    ] = "",
    all_sizes: Annotated[bool, flag("All sizes of all families.", "--all")] = False,
    as_json: Json = False,
) -> None:
    """List the shipped models, those in this folder, and the sizes of networks with their memory.

    A size is a network without weights: `jaxspec bench --target random:SIZE` builds it,
    `jaxspec.load` and `jaxspec convert` read published weights of it. The cache per token is what
    decoding keeps for each token of a row; an encoder-decoder keeps as much again for each token of
    its prompt (cross-attention), and bfloat16 takes half of it.

    \b
        jaxspec models
        jaxspec models llama
        jaxspec models --all
    """
    if as_json:
        return console.print_json(report(name))
    chosen = sizes.read()
    if name:
        chosen = matching(chosen, name)
    out = console.out()
    if name or all_sizes:
        show_sizes(out, chosen)
    else:
        show_stored(out)
        show_families(out, chosen)
    return None


def matching(size_table: sizes.SizeTable, name: str) -> sizes.SizeTable:
    """Returns the sizes whose name, or whose family's title, contains a name.

    Args:
        size_table: the sizes of all families.
        name: a part of a family's title or of a size's name, or a hub id, whose owner is left out.

    Raises:
        ValueError: nothing has this name.
    """
    sought = name.rpartition("/")[2].casefold()
    families = {}
    for title, rows in size_table.families.items():
        is_family = sought in title.casefold()
        families[title] = tuple(row for row in rows if is_family or sought in row.name)
    families = {title: rows for title, rows in families.items() if rows}
    heads = {head: parameters for head, parameters in size_table.heads.items() if sought in head}
    if not (families or heads):
        raise ValueError(
            f"no family and no size has {name!r} in its name: `jaxspec models` lists the families"
        )
    return sizes.SizeTable(families, heads)


def show_stored(out: Console) -> None:
    """Prints the shipped models and drafters, and the models in this folder."""
    checkpoints = shipped(MANIFEST)
    heads = shipped(CONFIG)
    if checkpoints:
        console.show(out, table_of(map(stored_of, checkpoints.values()), "Shipped models"))
    else:
        out.print("no checkpoints come with this installation")
    if heads:
        named = ", ".join(
            f"{name} ({filesize.decimal(bytes_of(folder))})" for name, folder in heads.items()
        )
        out.print(f"\nDrafters that read the hidden states of one of these (--draft NAME): {named}")
    out.print()
    local_models = list(models_in(Path()))
    if local_models:
        console.show(out, table_of(local_models, "In this folder"))
    else:
        out.print("No models in this folder.")


def table_of(models: Any, title: str) -> Any:
    """Makes a table of models on disk."""
    table = console.table(
        ("family", "parameters", "stored as", "on disk"), first="name", title=title
    )
    for model in models:
        count = "" if model.parameters is None else console.count(model.parameters)
        table.add_row(
            model.name, model.family, count, model.stored_as, filesize.decimal(model.size)
        )
    return table


def show_families(out: Console, size_table: sizes.SizeTable) -> None:
    """Prints which families have sizes, in a few lines."""
    titles = "; ".join(title for title, rows in size_table.families.items() if rows)
    total = sum(map(len, size_table.families.values()))
    out.print(f"\nPublished families, {total} sizes: {titles}.", highlight=False)
    out.print(
        "`jaxspec models NAME` shows the sizes of a family, or those with NAME in their names; "
        "--all shows all."
    )


def show_sizes(out: Console, chosen: sizes.SizeTable) -> None:
    """Prints a table of sizes for each family."""
    cache = "cache a\ntoken,\n"
    heads = ("para-\nmeters", "float32", "bfloat16", "int8", "int4", cache + "float32")
    tables = []
    for title, rows in chosen.families.items():
        table = console.table(heads, first="name", title=title)
        for size in rows:
            cells = map(short, (*size.memory_bytes.values(), size.cache_bytes_per_token["float32"]))
            table.add_row(size.name, console.count(size.parameters), *cells)
        if rows:
            tables.append(table)
    if chosen.heads:
        table = console.table(("parameters", "bfloat16"), first="name", title="Draft heads")
        for name, parameters in chosen.heads.items():
            table.add_row(name, console.count(parameters), short(2 * parameters))
        tables.append(table)
    for number, table in enumerate(tables):
        if number:
            out.print()
        console.show(out, table)


def report(name: str) -> Record:
    """Returns the tables for JSON, with configurations: sizes that match a name, or all sizes."""
    from jaxspec.weights.hf_families import FAMILIES

    size_table = sizes.read()
    if name:
        size_table = matching(size_table, name)
    configs = {size: config for family in FAMILIES for size, config in family.sizes.items()}
    families = {
        title: [row._asdict() | {"config": configs[row.name]} for row in rows]
        for title, rows in size_table.families.items()
    }
    return {
        "shipped": described(),
        "heads": {drafter: bytes_of(folder) for drafter, folder in shipped(CONFIG).items()},
        "here": [model._asdict() for model in models_in(Path())],
        "families": families,
        "published_heads": size_table.heads,
    }


def short(size: int) -> str:
    """Writes a number of bytes in at most three digits and a unit.

    >>> short(448), short(24_576), short(307_764_224), short(999_900_000)
    ('448 bytes', '24.6 kB', '308 MB', '1000 MB')
    """
    number, unit = filesize.decimal(size, precision=2).split()
    if float(number) < 999.5:
        return f"{float(number):.3g} {unit}"
    return f"{float(number):.0f} {unit}"


def described() -> list[Record]:
    """Describes the shipped checkpoints by their manifests; no weights are read."""
    from jaxspec.analysis import memory
    from jaxspec.weights import orbax

    checkpoints = []
    for name, folder in shipped(MANIFEST).items():
        manifest = orbax.read_manifest(folder)
        size = memory.of_config(name, manifest.model)
        files = {
            "stored_as": manifest.dtype,
            "bytes": sum(entry[0] for entry in manifest.files.values()),
        }
        checkpoints.append(size._asdict() | files | {"about": manifest.about, "folder": folder})
    return checkpoints


def models_in(folder: Path) -> Iterator[StoredModel]:
    """Yields the models in a folder and its subfolders, except shipped ones."""
    shipped_folders = {
        path.resolve() for marker in (MANIFEST, CONFIG) for path in shipped(marker).values()
    }
    num_seen = 0
    for pattern in ("*", "*/*"):
        for path in sorted(folder.glob(pattern)):
            num_seen += 1
            if num_seen > LOOKED_AT:  # a home folder, say
                return
            is_hidden = any(name.startswith(".") for name in path.parts)
            if is_hidden or path.resolve() in shipped_folders:
                continue
            model = stored_of(path)
            if model is not None:
                yield model._replace(name=path.relative_to(folder).as_posix())


def stored_of(path: Path) -> StoredModel | None:
    """Describes a model by its small files; None if `jaxspec.load` would not open the path."""
    try:
        if path.suffix == ".gguf" and path.is_file():
            return StoredModel(path.name, "gguf", None, "", path.stat().st_size)
        if (path / MANIFEST).is_file():
            table = tomllib.loads((path / MANIFEST).read_text("utf-8"))
            if "family" not in table:  # a datastore's
                return None
            return StoredModel(
                path.name, table["family"], table["parameters"], table["dtype"], bytes_of(path)
            )
        if (path / CONFIG).is_file() and any(file.suffix in WEIGHTS for file in path.iterdir()):
            table = json.loads((path / CONFIG).read_text("utf-8"))
            family = table.get("model_type") or table.get("speculators_model_type") or ""
            dtype = table.get("dtype") or table.get("torch_dtype") or ""
            return StoredModel(path.name, family, None, dtype, bytes_of(path))
    except (OSError, ValueError, KeyError, AttributeError):
        # unreadable, damaged, or something else of this name
        pass
    return None


def bytes_of(folder: Path) -> int:
    """Adds up the sizes of all files under a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
