"""A round of speculative decoding: what became of its guesses, and the line of a trace that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.text import Text

ACCEPTED, REJECTED, TARGETS_OWN, COMMITTED = "green", "red strike", "blue", "dim"
HALF_CHARACTER = "\ufffd"
SHORTEST_CONTEXT = 12  # columns of committed text that a trace line keeps on a narrow terminal


class Round(NamedTuple):
    """One round of one prompt, in token ids.

    Attributes:
        before: new tokens committed by earlier rounds.
        new: tokens that this round committed.
        draft: its guesses; none for the first token, which the target reads off the prompt.
        num_accepted: how many of them the rule kept.
    """

    before: list[int]
    new: list[int]
    draft: list[int]
    num_accepted: int


class Judged(NamedTuple):
    """A round's tokens by what became of them."""

    accepted: list[int]
    rejected: list[int]
    own: list[int]


def judge(step: Round) -> Judged:
    """Splits a round into accepted guesses, the rejected one, and the target's own token behind them.

    A round that was cut, at an end token or at the limit, has no token of the target's own.

    >>> judge(Round([], new=[5, 6, 9], draft=[5, 6, 7, 8], num_accepted=2))
    Judged(accepted=[5, 6], rejected=[7], own=[9])
    >>> judge(Round([], new=[5, 1], draft=[5, 1, 7], num_accepted=3))
    Judged(accepted=[5, 1], rejected=[], own=[])
    """
    n = step.num_accepted
    if len(step.new) <= n:
        return Judged(step.new, [], [])
    return Judged(step.new[:n], step.draft[n : n + 1], step.new[n:])


def spell(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text that each of `tokens` adds behind `before`; a special token is spelt by its name."""
    so_far, shown, pieces = list(before), _decode(tokenizer, before).rstrip(HALF_CHARACTER), []
    for token in tokens:
        so_far.append(token)
        whole = _decode(tokenizer, so_far)
        piece = whole[len(shown) :] if whole.startswith(shown) else ""
        pieces.append(piece or tokenizer.convert_ids_to_tokens(token))
        shown = whole.rstrip(HALF_CHARACTER)
    return pieces


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def trace(tokenizer: Any, number: int, step: Round, *, width: int, colour: bool) -> Text:
    """One line for one round, as in the paper's Figure 1."""
    accepted, rejected, own = judge(step)
    kept = [*step.before, *accepted]
    return trace_line(
        number,
        _decode(tokenizer, step.before),
        "".join(spell(tokenizer, step.before, accepted)),
        "".join(spell(tokenizer, kept, rejected)),
        "".join(spell(tokenizer, kept, own)),
        width=width,
        colour=colour,
    )


def trace_line(number: int, before: str, accepted: str, rejected: str, own: str, *, width: int, colour: bool) -> Text:
    """Committed text (cut on the left to fit), accepted guesses, the rejected guess, the target's own token.

    Without colour, what colour would say is said by marks.

    >>> trace_line(3, "Das ist", " ein", " Haus", " Hund", width=60, colour=False).plain
    '  3  Das ist| ein[- Haus-]{+ Hund+}'
    """
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{number:>3}  ", "dim")
    tail = Text()
    for text, style, marks in (
        (accepted, ACCEPTED, ("|", "")),
        (rejected, REJECTED, ("[-", "-]")),
        (own, TARGETS_OWN, ("{+", "+}")),
    ):
        if text:
            _append(tail, _one_line(text), style, None if colour else marks)
    before = _one_line(before)
    room = max(SHORTEST_CONTEXT, width - cell_len(line.plain) - tail.cell_len)
    if cell_len(before) > room:
        before = "…" + _last_columns(before, room - 1)
    line.append(before, COMMITTED)
    return line.append_text(tail)


def legend(colour: bool) -> Text:
    """What the colours or marks of a trace mean."""
    if not colour:
        return Text("one line a round: committed|accepted guesses[-rejected guess-]{+the target's own token+}")
    said = [("committed", COMMITTED), ("accepted guess", ACCEPTED), ("rejected guess", REJECTED)]
    return Text("one line a round: ") + Text(" · ").join(
        Text(text, style) for text, style in [*said, ("the target's own token", TARGETS_OWN)]
    )


def _append(line: Text, text: str, style: str, marks: tuple[str, str] | None) -> None:
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
