"""A generation shown in a notebook, and as plain values for tables and JSON."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from jaxspec import trace
from jaxspec.trace.html import SIGNS

if TYPE_CHECKING:
    from jaxspec.decode.generate import Generation

ROWS = 4  # what a page shows of a generation, of a row's rounds, and of a text
ROUNDS = 48
CHARACTERS = 4000
BOX = "border-left:3px solid #0059b3;padding:0.2em 0.8em;margin:0.6em 0"
TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"
SHOWN = {code: sign for code, sign in SIGNS.items() if chr(code) not in "\n\t"}  # which a text may lay itself out with


def page(out: Generation) -> str:
    """The first rows as HTML: text, counts, and where there were guesses the rounds as in the paper's Figure 1.

    What is left out is counted, so that a notebook of long batches stays small.
    """
    batch = len(out.lengths)
    parts = [_row(out, row) for row in range(min(batch, ROWS))]
    if not out.exact:
        parts.insert(0, "<div><b>Inexact</b>: the acceptance rule lets text differ from the target's law.</div>")
    if batch > ROWS:
        parts.append(f"<div>… and {_count(batch - ROWS, 'more row')}: <code>out.records()</code> has them all.</div>")
    return "<div>" + "\n".join(parts) + "</div>"


def records(out: Generation) -> list[dict[str, Any]]:
    """One flat dict of plain values per row."""
    rate, per_round = out.stats.acceptance_rate, out.stats.tokens_per_round
    return [
        {"row": row, "text": out.texts[row] if out.texts else None, "tokens": _tokens(out, row)}
        | {name: int(counts[row]) for name, counts in out.stats._asdict().items()}
        | {"acceptance_rate": float(rate[row]), "tokens_per_round": float(per_round[row])}
        for row in range(len(out.lengths))
    ]


def rounds(out: Generation, row: int) -> list[dict[str, Any]]:
    """What each round of a row guessed and committed."""
    steps = trace.of_row(_tokens(out, row), out.trace, row)
    return [{"draft": s.draft, "num_accepted": s.num_accepted, "new": s.new} for s in steps]


def _row(out: Generation, row: int) -> str:
    tokens = _tokens(out, row)
    text = out.texts[row] if out.texts else " ".join(map(str, tokens))
    cut = len(text) - CHARACTERS
    shown = html.escape(text[:CHARACTERS].translate(SHOWN)) + (f" … {_count(cut, 'more character')}" if cut > 0 else "")
    lines = [f'<div dir="auto" style="{TEXT}">{shown}</div>', f'<div style="color:#666">{_counts(out, row)}</div>']
    if out.trace.draft.shape[2]:
        steps = trace.of_row(tokens, out.trace, row)
        figure = trace.html(steps[:ROUNDS], out._tokenizer)
        if len(steps) > ROUNDS:
            figure += f"<div>… and {_count(len(steps) - ROUNDS, 'more round')}</div>"
        unfolded = " open" if len(out.lengths) == 1 else ""
        lines.append(f"<details{unfolded}><summary>{_count(len(steps) - 1, 'round')}</summary>{figure}</details>")
    return f'<div style="{BOX}">' + "".join(lines) + "</div>"


def _counts(out: Generation, row: int) -> str:
    one = {name: int(counts[row]) for name, counts in out.stats._asdict().items()}
    said = f"{_count(one['emitted'], 'token')}, {_count(one['rounds'], 'pass', 'passes')} after prefill"
    if not one["drafted"]:
        return said
    per_round = float(out.stats.tokens_per_round[row])
    return (
        f"{said} ({per_round:.2f} tokens each), {one['accepted']} of {_count(one['drafted'], 'guess', 'guesses')} kept"
    )


def _tokens(out: Generation, row: int) -> list[int]:
    return out.tokens[row, : out.lengths[row]].tolist()


def _count(number: int, what: str, many: str = "") -> str:
    return f"{number} {what if number == 1 else many or what + 's'}"
