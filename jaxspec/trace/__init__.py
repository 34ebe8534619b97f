"""A generation round by round: the fate of each draft token (`history`).

`html` and `terminal` make a picture of it, `table` columns.

rounds = trace.of_row(out.tokens[0, : out.lengths[0]], out.trace, 0)
pathlib.Path("trace.html").write_text(trace.page(rounds, target.tokenizer), encoding="utf-8")
"""

from jaxspec import optional_imports
from jaxspec.trace.history import (
    Branch,
    RoundText,
    TokenFates,
    TokensView,
    TracedRound,
    branches,
    fates,
    judge,
    numbers_of,
    of_row,
    spell,
    spelt,
    spelt_branches,
)
from jaxspec.trace.html import html, page
from jaxspec.trace.table import table

__all__ = [
    name for name, value in list(globals().items()) if callable(value) and not name.startswith("_")
]

__getattr__ = optional_imports.submodules(__name__)
