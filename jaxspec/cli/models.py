"""`jaxspec models`: what is shipped, and what each size of the networks takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from jaxspec.cli import console
from jaxspec.cli.options import Json

if TYPE_CHECKING:
    from jaxspec.analysis.memory import NetSize


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
        here = shipped()
        read = {name: sum(file.stat().st_size for file in at.iterdir()) for name, at in draft_heads.shipped().items()}
    if as_json:
        return console.print_json({"shipped": [one.to_dict() for one in here], "heads": read, "families": families})
    out, cache = Console(highlight=False), "cache per token,\n"
    table = console.table(
        ("parameters", "stored as", "on disk", cache + "float32"), first="name", title="Shipped checkpoints"
    )
    for one in here:
        cells = console.count(one.size.parameters), one.stored_as, console.size(one.bytes)
        table.add_row(one.size.name, *cells, console.size(one.size.cache_bytes_per_token["float32"]))
    out.print(table if here else "no checkpoints come with this installation")
    if read:
        named = ", ".join(f"{name} ({console.size(size)})" for name, size in read.items())
        out.print(f"\nDrafters that read the hidden states of one of these (--draft head:NAME): {named}")
    for title, sizes in families.items():
        heads = ("parameters", "float32", "bfloat16", "int8", cache + "float32")
        table = console.table(heads, first="name", title=title)
        for size in sizes:
            cells = map(console.size, (*size.memory_bytes.values(), size.cache_bytes_per_token["float32"]))
            table.add_row(size.name, console.count(size.parameters), *cells)
        out.print("", table, sep="\n")


class Shipped(NamedTuple):
    """A checkpoint that comes with jaxspec.

    Attributes:
        size: of its network.
        stored_as: the dtype of its matrices.
        bytes: of its files.
        about: what its manifest says.
        folder: where it is.
    """

    size: NetSize
    stored_as: str
    bytes: int
    about: dict[str, Any]
    folder: Path

    def to_dict(self) -> dict[str, Any]:
        """What `jaxspec models --json` has of it: in one object."""
        found = self._asdict()
        return found.pop("size")._asdict() | found


def shipped() -> list[Shipped]:
    """The shipped checkpoints, from their manifests; no weights are read."""
    from jaxspec.analysis import memory
    from jaxspec.weights import loading, orbax

    found = []
    for name, folder in loading.shipped().items():
        manifest = orbax.read_manifest(folder)
        size, stored = memory.of_config(name, manifest.model), sum(entry[0] for entry in manifest.files.values())
        found.append(Shipped(size, manifest.dtype, stored, manifest.about, folder))
    return found
