"""A round of speculative decoding as a line of a trace, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.text import Text

from jaxspec.trace import numbers
from jaxspec.trace.history import TracedRound, spelt, spelt_branches

ACCEPTED = "green"
REJECTED = "red strike"
TARGETS_OWN = "blue"
COMMITTED = "dim"
FATES = {  # for each fate the style, and the marks that stand for it without colour
    "accepted": (ACCEPTED, ("|", "")),
    "rejected": (REJECTED, ("[-", "-]")),
    "own": (TARGETS_OWN, ("{+", "+}")),
    "untried": (COMMITTED, ("", "")),
}
WORDS = {"accepted": "accepted", "rejected": "rejected", "untried": "not tried"}
# columns of a draft token and of a number
TOKEN_WIDTH = 14
NUMBER_WIDTH = 8
SHORTEST_CONTEXT = 12  # columns of committed text that a trace line keeps on a narrow terminal


def trace(tokenizer: Any, number: int, step: TracedRound, *, width: int, colour: bool) -> Text:
    """Draws a line for a round, as in the paper's Figure 1; a tree's branches are below it."""
    line = trace_line(number, *spelt(tokenizer, step), width=width, colour=colour)
    for lead, tokens in spelt_branches(tokenizer, step):
        line.append(f"\n     {lead}", "dim")
        for text, fate in tokens:
            style, marks = FATES[fate]
            _append(line, _one_line(text), style, None if colour else marks)
    return _append_numbers(line, tokenizer, step, colour)


def _append_numbers(line: Text, tokenizer: Any, step: TracedRound, colour: bool) -> Text:
    """Adds a line for each draft token with its numbers, if they were traced."""
    numbered = numbers.numbered(tokenizer, step)
    if not numbered:
        return line
    headings = "".join(f"{heading:>{NUMBER_WIDTH}}" for heading in numbers.HEADINGS)
    line.append(f"\n     {'':{TOKEN_WIDTH}}{headings}", "dim")
    for token, cells, fate in numbered:
        line.append("\n     ")
        piece = _one_line(token).strip() or "␣"
        style, marks = FATES[fate]
        start = len(line)
        _append(line, piece, style, None if colour else marks)
        line.append(" " * max(1, TOKEN_WIDTH - cell_len(line.plain[start:])))
        line.append("".join(f"{cell:>{NUMBER_WIDTH}}" for cell in cells))
        line.append(f"  {WORDS[fate]}", "dim")
    return line.append(f"\n     {numbers.of_whole_round(step)}", "dim")


def trace_line(
    number: int, before: str, accepted: str, rejected: str, target: str, *, width: int, colour: bool
) -> Text:
    """Draws committed text, cut on the left to fit, and the round's tokens by their fates.

    Without colour, marks stand for the colours.

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


def legend(colour: bool, *, with_numbers: bool = False) -> Text:
    """Explains the colours or marks of a trace, and its numbers."""
    if with_numbers:
        return legend(colour).append(f"; {numbers.LEGEND}")
    if not colour:
        return Text(
            "one line a round: committed|accepted draft tokens[-rejected draft token-]{+the "
            "target's own token+}; in a tree, unmarked: not tried"
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
    # make a token that is only spaces visible
    if not text.strip(" "):
        text = "␣" * len(text)
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
