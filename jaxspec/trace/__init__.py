"""A generation round by round: what became of each draft token (`rounds`), and a picture of it (`html`).

rounds = trace.of_row(out.tokens[0, : out.lengths[0]], out.trace, 0)
pathlib.Path("trace.html").write_text(trace.page(rounds, target.tokenizer), encoding="utf-8")
"""

from jaxspec.trace.html import html, page
from jaxspec.trace.rounds import (
    Branch,
    Judged,
    Prefix,
    Round,
    Spelt,
    branches,
    judge,
    of_row,
    spell,
    spelt,
    spelt_branches,
)

__all__ = [
    "Branch",
    "Judged",
    "Prefix",
    "Round",
    "Spelt",
    "branches",
    "html",
    "judge",
    "of_row",
    "page",
    "spell",
    "spelt",
    "spelt_branches",
]
