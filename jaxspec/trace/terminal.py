"""A round of speculative decoding as a line of a trace, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.text import Text

from jaxspec.trace.history import TracedRound, spelt, spelt_branches

ACCEPTED, REJECTED, TARGETS_OWN, COMMITTED = "green", "red strike", "blue", "dim"
FATES = {  # of a tree's tokens: style, and the marks that stand for it where there is no colour
    "accepted": (ACCEPTED, ("|", "")),
    "rejected": (REJECTED, ("[-", "-]")),
    "own": (TARGETS_OWN, ("{+", "+}")),
    "untried": (COMMITTED, ("", "")),
}
SHORTEST_CONTEXT = 12  # columns of committed text that a trace line keeps on a narrow terminal


def trace(tokenizer: Any, number: int, step: TracedRound, *, width: int, colour: bool) -> Text:
    """Draws a line for a round, as in the paper's Figure 1; a tree's branches are below it."""
    line = trace_line(number, *spelt(tokenizer, step), width=width, colour=colour)
    for lead, tokens in spelt_branches(tokenizer, step):
        line.append(f"\n     {lead}", "dim")
        for text, fate in tokens:
            style, marks = FATES[fate]
            _append(line, _one_line(text), style, None if colour else marks)
    return line


def trace_line(
    number: int, before: str, accepted: str, rejected: str, target: str, *, width: int, colour: bool
) -> Text:
    """Draws committed text (cut on the left to fit), accepted draft tokens, rejected ones, and the target's own token.

    Without colour there are marks instead.

    >>> trace_line(3, "Das ist", " ein", " Haus", " Hund", width=60, colour=False).plain
    '  3  Das ist| ein[- Haus-]{+ Hund+}'
    >>> trace_line(3, "Das ist", "", " ", ".", width=60, colour=False).plain  # a space was drafted
    '  3  Das ist[-␣-]{+.+}'
    """
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{number:>3}  ", "dim")
    tail = Text()
    for text, fate in ((accepted, "accepted"), (rejected, "rejected"), (target, "own")):
        style, marks = FATES[fate]
        if text:
            _append(tail, _one_line(text), style, None if colour else marks)
    before = _one_line(before)
    room = max(SHORTEST_CONTEXT, width - cell_len(line.plain) - tail.cell_len)
    if cell_len(before) > room:
        before = "…" + _last_columns(before, room - 1)
    line.append(before, COMMITTED)
    return line.append_text(tail)


def legend(colour: bool) -> Text:
    """Explains the colours or marks of a trace."""
    if not colour:
        return Text(
            "one line a round: committed|accepted draft tokens[-rejected draft token-]{+the target's own token+}; "
            "in a tree, unmarked: not tried"
        )
    parts = [
        ("committed, or in a tree not tried", COMMITTED),
        ("accepted draft token", ACCEPTED),
        ("rejected draft token", REJECTED),
    ]
    return Text("one line a round: ") + Text(" · ").join(
        Text(text, style) for text, style in [*parts, ("the target's own token", TARGETS_OWN)]
    )


def _append(line: Text, text: str, style: str, marks: tuple[str, str] | None) -> None:
    text = text if text.strip(" ") else "␣" * len(text)  # a token that is a space is to be seen
    if marks:
        line.append(f"{marks[0]}{text}{marks[1]}")
        return
    word = text.lstrip(" ")
    line.append(text[: len(text) - len(word)])  # a struck-through space would look like a dash
    line.append(word, style)


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", " ")


def _last_columns(text: str, columns: int) -> str:
    start = len(text)
    while start > 0 and cell_len(text[start - 1 :]) <= columns:
        start -= 1
    return text[start:]
