"""A trace as HTML for notebooks and files: Figure 1 of Leviathan et al., arXiv 2211.17192.

Accepted draft tokens are green, the rejected one red and struck through, the target's own token
blue and underlined: nothing is told by colour alone. All styles are inline, so that the result can
be put anywhere.
"""

from __future__ import annotations

import html as escaping
from collections.abc import Sequence
from typing import Any

from jaxspec.trace import numbers
from jaxspec.trace.history import CONTEXT, TracedRound, spelt, spelt_branches

BOX = (
    "background:#fff;color:#222;font:14px/1.6 ui-monospace,Menlo,Consolas,monospace;padding:0.6em "
    "0.8em"
)
LINE = "white-space:pre-wrap;overflow-wrap:anywhere"
STYLES = {
    "committed": "color:#666",
    "accepted draft token": "color:#007a5a",
    "rejected draft token": "color:#c0392b;text-decoration:line-through",
    "the target's own token": "color:#0059b3;text-decoration:underline",
}
TABLE = "margin:0.2em 0 0.6em 3em;border-collapse:collapse;font-size:12px;color:inherit"
CELL = "padding:0 0.6em;text-align:right;border:none;white-space:pre"
WORDS = {"accepted": "accepted", "rejected": "rejected", "untried": "not tried"}
FATES = {
    "accepted": "accepted draft token",
    "rejected": "rejected draft token",
    "own": "the target's own token",
}
# Visible signs for line ends and other control characters, which HTML would drop or reject.
SIGNS = {code: chr(0x2400 + code) for code in range(32)} | {
    127: "\u2421",
    ord("\n"): "⏎",
    ord("\t"): "⇥",
}


def html(rounds: Sequence[TracedRound], tokenizer: Any = None, *, context: int = 120) -> str:
    """Draws a `<div>` with one line a round, for `IPython.display.HTML`; a tree unfolds on a click.

    Args:
        rounds: the rounds of a row, from `of_row`.
        tokenizer: spells the tokens; without one they are shown as ids.
        context: most characters of committed text in front of each round.

    Example:
        >>> markup = html([TracedRound([], [5], [], 0), TracedRound([5], [6, 2], [6, 7], 1)])
        >>> markup.count("<div"), "line-through\\"> 7</span>" in markup
        (4, True)
    """
    legend = " · ".join(
        f'<span style="white-space:nowrap">{_span(name, name)}</span>' for name in STYLES
    )
    lines = [f'<div style="{LINE};margin-bottom:0.4em">one line a round: {legend}</div>']
    if any(step.numbers is not None for step in rounds):
        lines.append(
            f'<div style="{LINE};margin-bottom:0.4em;color:#666">{_escaped(numbers.LEGEND)}</div>'
        )
    width = len(str(len(rounds)))
    for number, step in enumerate(rounds):
        before, *parts = spelt(tokenizer, step, max(context, CONTEXT))
        if len(before) > context:
            before = "…" + before[len(before) - context :]
        spans = [
            _span(name, text) for name, text in zip(STYLES, (before, *parts), strict=True) if text
        ]
        line = f"{number:>{width}}  <bdi>{''.join(spans)}</bdi>"
        lines.append(
            "<div "
            f'style="{LINE}">{_unfolding(line, tokenizer, step)}</div>{_numbers(tokenizer, step)}'
        )
    return f'<div style="{BOX}">' + "\n".join(lines) + "</div>"


def page(
    rounds: Sequence[TracedRound],
    tokenizer: Any = None,
    *,
    title: str = "Trace",
    context: int = 120,
) -> str:
    """Makes a complete HTML document; write it as UTF-8.

    Args:
        rounds, tokenizer, context: the arguments of `html`.
        title: the document's title.

    Example:
        >>> page([TracedRound([], [5], [], 0)], title="a < b").splitlines()[0][:54]
        '<!doctype html><html><head><meta charset="utf-8"><titl'
    """
    body = html(rounds, tokenizer, context=context)
    head = f'<meta charset="utf-8"><title>{_escaped(title)}</title>'
    return f"<!doctype html><html><head>{head}</head><body>\n{body}\n</body></html>\n"


def _unfolding(line: str, tokenizer: Any, step: TracedRound) -> str:
    """Makes a line that shows, on a click, the tree of its round."""
    branches = spelt_branches(tokenizer, step)
    if not branches:
        return line
    drawn = [
        lead + "".join(_span(FATES.get(fate, "committed"), text) for text, fate in tokens)
        for lead, tokens in branches
    ]
    tree = "\n".join(drawn)
    return f'<details><summary>{line}</summary><div style="margin-left:3em">{tree}</div></details>'


def _numbers(tokenizer: Any, step: TracedRound) -> str:
    """Makes a table of the round's draft tokens with their numbers; "" without numbers."""
    numbered = numbers.numbered(tokenizer, step)
    if not numbered:
        return ""
    heading = f"{CELL};color:#666;font-weight:normal"
    headings = "".join(f'<th style="{heading}">{_escaped(x)}</th>' for x in ("", *numbers.HEADINGS))
    rows = [f'{headings}<th style="{heading};text-align:left">{numbers.of_whole_round(step)}</th>']
    for token, cells, fate in numbered:
        piece = (
            f'<td style="{CELL};text-align:left">{_span(FATES.get(fate, "committed"), token)}</td>'
        )
        word = f'<td style="{CELL};color:#666;text-align:left">{WORDS[fate]}</td>'
        rows.append(piece + "".join(f'<td style="{CELL}">{cell}</td>' for cell in cells) + word)
    body = "".join(f'<tr style="background:none">{row}</tr>' for row in rows)
    return f'<table style="{TABLE}">{body}</table>'


def _span(name: str, text: str) -> str:
    return f'<span style="{STYLES[name]}">{_escaped(text)}</span>'


def _escaped(text: str) -> str:
    return escaping.escape(text.translate(SIGNS))
