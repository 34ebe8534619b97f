"""`jaxspec models`: what is shipped, and what each size of the networks takes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxspec.cli import console
from jaxspec.cli.options import Json


def models(
    as_json: Json = False,
) -> None:
    """List the shipped checkpoints, and every size of the networks with the memory it takes.

    A size is a network without weights: `jaxspec bench --shape` builds it, `jaxspec.load` and `jaxspec convert` read
    published weights of it. The cache per token is what decoding keeps for each token of a row; an encoder-decoder
    keeps as much again for each token of its prompt (cross-attention).
    """
    from jaxspec.families import FAMILIES

    with Console(stderr=True).status("counting"):
        families = {
            family.title: [describe(name, config) for name, config in family.sizes.items()] for family in FAMILIES
        }
        report = {"shipped": shipped(), "families": families}
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    out = Console(highlight=False)
    out.print(_shipped_table(report["shipped"]) if report["shipped"] else "no checkpoints come with this installation")
    for title, rows in families.items():
        out.print()
        out.print(_sizes_table(title, rows))


def shipped() -> list[dict[str, Any]]:
    """The shipped checkpoints, from their manifests; no weights are read."""
    from jaxspec.model import shipped as folders
    from jaxspec.weights import orbax

    rows = []
    for name, folder in folders().items():
        manifest = orbax.read_manifest(folder)
        stored = {"stored_as": manifest.dtype, "bytes": sum(entry[0] for entry in manifest.files.values())}
        rows.append({**describe(name, manifest.model), **stored, "about": manifest.about, "folder": str(folder)})
    return rows


def describe(name: str, config: Any) -> dict[str, Any]:
    """Parameters, memory and cache of a network or of n-gram tables, without making it.

    The layers of a stack are alike, so one of each is traced, and counted as often as there are layers.

    >>> from jaxspec.nets.gpt import SIZES
    >>> row = describe("gpt-6m", SIZES["gpt-6m"])
    >>> row["parameters"], row["cache_bytes_per_token"]["float32"]  # 2 layers x (key, value) x 256 x 4 bytes
    (6036480, 4096)
    """
    import jax

    from jaxspec.drafters import ngram_model
    from jaxspec.model import DTYPES
    from jaxspec.nets.t5 import T5Config
    from jaxspec.recipes import net_of
    from jaxspec.weights.int8 import is_matrix

    if isinstance(config, ngram_model.NGramConfig):
        entries = jax.tree.leaves(jax.eval_shape(lambda: ngram_model.init(config, jax.random.key(0))))
        count = sum(math.prod(x.shape) for x in entries)
        return {
            "name": name,
            "parameters": count,
            "memory_bytes": dict.fromkeys(DTYPES, 4 * count),
            "cache_bytes_per_token": dict.fromkeys(DTYPES, 4),  # the row itself
            "config": dataclasses.asdict(config),
        }
    stacks = ("encoder", "decoder") if isinstance(config, T5Config) else ("",)
    depths = {f"{stack}_layers".lstrip("_"): stack or "layers" for stack in stacks}
    shallow = dataclasses.replace(config, **dict.fromkeys(depths, 1))
    times = {f"{part}_0": getattr(config, field) for field, part in depths.items()}
    leaves = jax.tree_util.tree_leaves_with_path(
        jax.eval_shape(lambda: net_of(config).init(shallow, jax.random.key(0)))
    )
    total = matrices = channels = 0
    for path, leaf in leaves:
        count = times.get(path[0].key, 1) * math.prod(leaf.shape)
        total += count
        if is_matrix(path, leaf):
            matrices += count
            channels += count // leaf.shape[1]
    decoder_layers = times.get("decoder_0") or times["layers_0"]
    numbers = 2 * decoder_layers * getattr(config, "kv_heads", config.heads) * config.head_dim  # keys and values
    return {
        "name": name,
        "parameters": total,
        "memory_bytes": {
            "float32": 4 * total,
            "bfloat16": 4 * total - 2 * matrices,
            "int8": 4 * total - 3 * matrices + 4 * channels,  # each with a scale
        },
        "cache_bytes_per_token": {"float32": 4 * numbers, "bfloat16": 2 * numbers, "int8": 4 * numbers},
        "config": dataclasses.asdict(config),
    }


def _shipped_table(rows: list[dict[str, Any]]) -> Table:
    heads = ("parameters", "stored as", "on disk", "cache per token,\nfloat32")
    table = console.table(heads, first="name", title="Shipped checkpoints")
    for row in rows:
        cells = [console.count(row["parameters"]), row["stored_as"], console.size(row["bytes"])]
        table.add_row(row["name"], *cells, console.size(row["cache_bytes_per_token"]["float32"]))
    return table


def _sizes_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Networks and what they take: parameters, memory, cache."""
    heads = ("parameters", "float32", "bfloat16", "int8", "cache per token,\nfloat32", "cache per token,\nbfloat16")
    table = console.table(heads, first="name", title=title)
    for row in rows:
        memory, cache = row["memory_bytes"], row["cache_bytes_per_token"]
        sizes = [memory["float32"], memory["bfloat16"], memory["int8"], cache["float32"], cache["bfloat16"]]
        table.add_row(row["name"], console.count(row["parameters"]), *map(console.size, sizes))
    return table
