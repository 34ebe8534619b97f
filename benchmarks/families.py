"""Writes the table of docs/models.md: the families of models that load, by the table that loading
goes by.

    python -m benchmarks.families       seconds; no weights are read

It replaces what lies between two comments of the page. A test compares the page with what is
computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pairs
from jaxspec.nets import net_of
from jaxspec.nets.delta import DeltaShape
from jaxspec.weights.hf_families import FAMILIES, Family

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN = "<!-- python -m benchmarks.families writes what follows -->\n"


def sections() -> Iterator[str]:
    """Yields the table, a line for each family: its types, its kinds of layers, and its sizes."""
    rows = (f"| {' | '.join(cells(family))} |\n" for family in FAMILIES if family.model_types)
    yield f"| family | `model_type` | layers | shapes by name |\n|---|---|---|---|\n{''.join(rows)}"


def cells(family: Family) -> tuple[str, str, str, str]:
    """Returns the cells of a family's line.

    >>> cells(next(family for family in FAMILIES if family.title == "Mixtral"))
    ('Mixtral', '`mixtral`', 'attention, experts', '`mixtral-8x7b`, `mixtral-8x22b`')
    """
    kinds = dict.fromkeys(kind for config in family.sizes.values() for kind in layers(config))
    types, sizes = (
        ", ".join(f"`{name}`" for name in names) for names in (family.model_types, family.sizes)
    )
    return family.title, types, ", ".join(kinds) or "by its `config.json`", sizes or "–"


def layers(config: Any) -> Iterator[str]:
    """Yields the kinds of layers that a network has."""
    if "encoder" in net_of(config).stacks(config):
        yield "encoder and decoder"
    for layer in getattr(config, "layers", ()):
        is_recurrent = isinstance(layer.attention, DeltaShape)
        yield "recurrent" if is_recurrent else "windows" if layer.attention.window else "attention"
        if "Experts" in type(layer.ff).__name__:
            yield "experts"


if __name__ == "__main__":
    PAGE.write_text(pairs.updated(PAGE.read_text("utf-8"), BEGIN, sections()), "utf-8")
