"""What `jaxspec verify` prints: certificates of rules, and a pair's greedy texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from jaxspec.analysis.exactness import DRAFTERS, ROUNDING, TREE, VOCAB, Certificate
from jaxspec.analysis.numerics import Summary
from jaxspec.cli import console


def of_rules(rules: Sequence[Certificate]) -> Table:
    """Total variations, and by how much bounds are exceeded."""
    table = console.table([*DRAFTERS, "above\nits bound", "verdict"], first="rule", title="Total variation, by drafter")
    for one in rules:
        off = [f"{one.total_variation[kind]:.1e}" if kind in one.total_variation else "–" for kind in DRAFTERS]
        over = "–" if one.above_bound is None else f"{max(*one.above_bound.values(), 0.0):.1e}"
        table.add_row(one.rule, *off, over, _verdict(one.as_stated))
    return table


def about_rules(steps: int, gamma: int) -> str:
    """What the table of rules is of."""
    return (
        f"By enumeration: {steps} tokens of {VOCAB}, γ = {gamma}, a tree of {TREE[0]} branches that "
        f"go on for {len(TREE)} tokens. Below {ROUNDING:g} is rounding. Inexact rules need only keep to their bound."
    )


def of_texts(numerics: Mapping[str, Summary]) -> Table:
    """Greedy texts beside plain decoding's, by dtype."""
    heads = ["same\ntext", "first mismatch:\nprompt, token", "top-two\nmargin there", "largest\nsuch margin"]
    table = console.table(heads, first="greedy", title="Greedy texts against plain decoding's, margins in nats")
    for dtype, found in numerics.items():
        first, cells = found.first, ["none", "–", "–"]
        if first is not None:
            margins = f"{first.top_two_margin:.3g}", f"{found.largest_top_two_margin:.3g}"
            cells = [f"{first.row}, {first.position}", *margins]
        table.add_row(dtype, f"{found.same} of {found.prompts}", *cells)
    return table


def _verdict(right: bool) -> Text:
    return Text("as stated", "green") if right else Text("WRONG", "bold red")
