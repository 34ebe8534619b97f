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
KINDS = ("encoder and decoder", "recurrent", "sliding windows", "full attention", "experts")


def sections() -> Iterator[str]:
    """Yields the table, a line for each combination of kinds of layers, with its families."""
    groups: dict[str, list[str]] = {}
    for family in FAMILIES:
        if family.model_types:
            groups.setdefault(kinds(family), []).append(named(family))
    rows = (f"| {group} | {'; '.join(names)} |\n" for group, names in groups.items())
    yield f"| layers | families and their `model_type` |\n|---|---|\n{''.join(rows)}"


def named(family: Family) -> str:
    """Returns a family's title and its types.

    >>> named(next(family for family in FAMILIES if family.title == "Mixtral"))
    'Mixtral (`mixtral`)'
    """
    types = ", ".join(f"`{name}`" for name in family.model_types)
    return f"{family.title} ({types})"


def kinds(family: Family) -> str:
    """Returns the kinds of layers that a family's sizes have.

    >>> kinds(next(family for family in FAMILIES if family.title == "Mixtral"))
    'full attention, experts'
    """
    present = {kind for config in family.sizes.values() for kind in layers(config)}
    return ", ".join(kind for kind in KINDS if kind in present) or "by its `config.json`"


def layers(config: Any) -> Iterator[str]:
    """Yields the kinds of layers that a network has."""
    if "encoder" in net_of(config).stacks(config):
        yield "encoder and decoder"
    for layer in getattr(config, "layers", ()):
        if isinstance(layer.attention, DeltaShape):
            yield "recurrent"
        else:
            yield "sliding windows" if layer.attention.window else "full attention"
        if "Experts" in type(layer.ff).__name__:
            yield "experts"


if __name__ == "__main__":
    PAGE.write_text(pairs.updated(PAGE.read_text("utf-8"), BEGIN, sections()), "utf-8")
