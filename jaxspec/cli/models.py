"""`jaxspec models`: what is shipped, and what each size of the networks takes."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from jaxspec.cli import console
from jaxspec.cli.options import Json


def models(as_json: Json = False) -> None:
    """List the shipped checkpoints, and the sizes of networks with their memory.

    A size is a network without weights: `jaxspec bench --target random:SIZE` builds it, `jaxspec.load` and `jaxspec
    convert` read published weights of it. The cache per token is what decoding keeps for each token of a row; an
    encoder-decoder keeps as much again for each token of its prompt (cross-attention).

    \b
        jaxspec models
    """
    from jaxspec.analysis.measure import memory
    from jaxspec.families import FAMILIES

    with Console(stderr=True).status("counting"):
        families = {
            family.title: [memory.of_config(name, config) for name, config in family.sizes.items()]
            for family in FAMILIES
        }
        report = {"shipped": shipped(), "families": families}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    out, cache = Console(highlight=False), "cache per token,\n"
    table = console.table(
        ("parameters", "stored as", "on disk", cache + "float32"), first="name", title="Shipped checkpoints"
    )
    for row in report["shipped"]:
        cells = console.count(row["parameters"]), row["stored_as"], console.size(row["bytes"])
        table.add_row(row["name"], *cells, console.size(row["cache_bytes_per_token"]["float32"]))
    out.print(table if report["shipped"] else "no checkpoints come with this installation")
    for title, rows in families.items():
        heads = ("parameters", "float32", "bfloat16", "int8", cache + "float32", cache + "bfloat16")
        table = console.table(heads, first="name", title=title)
        for row in rows:
            sizes = [*row["memory_bytes"].values(), *(row["cache_bytes_per_token"][d] for d in ("float32", "bfloat16"))]
            table.add_row(row["name"], console.count(row["parameters"]), *map(console.size, sizes))
        out.print("", table, sep="\n")


def shipped() -> list[dict[str, Any]]:
    """The shipped checkpoints, from their manifests; no weights are read."""
    from jaxspec import model
    from jaxspec.analysis.measure import memory
    from jaxspec.weights import orbax

    rows = []
    for name, folder in model.shipped().items():
        manifest = orbax.read_manifest(folder)
        stored = {"stored_as": manifest.dtype, "bytes": sum(entry[0] for entry in manifest.files.values())}
        described = memory.of_config(name, manifest.model)
        rows.append({**described, **stored, "about": manifest.about, "folder": str(folder)})
    return rows
