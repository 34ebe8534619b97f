"""`jaxspec models`: the shipped checkpoints, and what each size of the networks takes."""

from __future__ import annotations

import functools
from typing import Any

from rich import filesize
from rich.console import Console

from jaxspec.cli import console
from jaxspec.cli.options import Json


def models(as_json: Json = False) -> None:
    """List the shipped checkpoints and drafters, and the sizes of networks with their memory.

    A size is a network without weights: `jaxspec bench --target random:SIZE` builds it, `jaxspec.load` and `jaxspec
    convert` read published weights of it. The cache per token is what decoding keeps for each token of a row; an
    encoder-decoder keeps as much again for each token of its prompt (cross-attention), and bfloat16 takes half of it.

    \b
        jaxspec models
    """
    from jaxspec.analysis import memory
    from jaxspec.draft_heads import load as draft_heads
    from jaxspec.weights.hf_families import FAMILIES

    with Console(stderr=True).status("counting"):
        families = {
            family.title: [memory.of_config(name, config) for name, config in family.sizes.items()]
            for family in FAMILIES
        }
        published = published_heads()
        checkpoints = shipped()
        heads = draft_heads.shipped().items()
        sizes_of_heads = {name: sum(file.stat().st_size for file in folder.iterdir()) for name, folder in heads}
    if as_json:
        tables = {"shipped": checkpoints, "heads": sizes_of_heads, "families": families, "published_heads": published}
        return console.print_json(tables)
    out, cache = Console(highlight=False), "cache a\ntoken,\n"
    table = console.table(
        ("parameters", "stored as", "on disk", cache + "float32"), first="name", title="Shipped checkpoints"
    )
    for checkpoint in checkpoints:
        cells = console.count(checkpoint["parameters"]), checkpoint["stored_as"], filesize.decimal(checkpoint["bytes"])
        table.add_row(checkpoint["name"], *cells, filesize.decimal(checkpoint["cache_bytes_per_token"]["float32"]))
    if checkpoints:
        console.show(out, table)
    else:
        out.print("no checkpoints come with this installation")
    if sizes_of_heads:
        named = ", ".join(f"{name} ({filesize.decimal(size)})" for name, size in sizes_of_heads.items())
        out.print(f"\nDrafters that read the hidden states of one of these (--draft head:NAME): {named}")
    for title, sizes in families.items():
        heads = ("para-\nmeters", "float32", "bfloat16", "int8", "int4", cache + "float32")
        table = console.table(heads, first="name", title=title)
        for size in sizes:
            cells = map(short, (*size.memory_bytes.values(), size.cache_bytes_per_token["float32"]))
            table.add_row(size.name, console.count(size.parameters), *cells)
        out.print()
        console.show(out, table)
    table = console.table(("parameters", "bfloat16"), first="name", title="Draft heads")
    for name, parameters in published.items():
        table.add_row(name, console.count(parameters), short(2 * parameters))
    out.print()
    console.show(out, table)


def published_heads() -> dict[str, int]:
    """Counts the parameters of draft heads of published sizes, by name."""
    import jax
    import jax.numpy as jnp

    from jaxspec.draft_heads import KINDS

    counts = {}
    for head in KINDS:
        for name, config in head.published.items():
            leaves = jax.tree.leaves(jax.eval_shape(functools.partial(head.init, config), jax.random.key(0)))
            counts[name] = sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))
    return counts


def short(size: int) -> str:
    """Writes a number of bytes in at most three digits and a unit.

    >>> short(448), short(24_576), short(307_764_224), short(999_900_000)
    ('448 bytes', '24.6 kB', '308 MB', '1000 MB')
    """
    number, unit = filesize.decimal(size, precision=2).split()
    return f"{float(number):.3g} {unit}" if float(number) < 999.5 else f"{float(number):.0f} {unit}"


def shipped() -> list[dict[str, Any]]:
    """Describes the shipped checkpoints by their manifests; no weights are read."""
    from jaxspec.analysis import memory
    from jaxspec.weights import loading, orbax

    checkpoints = []
    for name, folder in loading.shipped().items():
        manifest = orbax.read_manifest(folder)
        size = memory.of_config(name, manifest.model)
        files = {"stored_as": manifest.dtype, "bytes": sum(entry[0] for entry in manifest.files.values())}
        checkpoints.append(size._asdict() | files | {"about": manifest.about, "folder": folder})
    return checkpoints
