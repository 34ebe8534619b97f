"""A round of speculative decoding: what became of its guesses, in token ids and spelt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

HALF_CHARACTER = "\ufffd"


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


class Spelt(NamedTuple):
    """A round as text: what was committed before it, and its tokens by what became of them."""

    before: str
    accepted: str
    rejected: str
    own: str


def of_row(tokens: Sequence[int], trace: Any, row: int) -> list[Round]:
    """The rounds of one row of a generation; the first token, which costs none, is a round without guesses.

    Args:
        tokens: the new tokens of the row, without padding.
        trace: of the generation (`Generation.trace`: draft, draft_length, num_accepted, kept, rows first).
        row: which row.

    Two rounds of two guesses: of 6 7 the first is kept, of 8 9 both are, and 3 follows:

    >>> import numpy as np
    >>> trace = np.array([[[6, 7], [8, 9]]]), np.array([[2, 2]]), np.array([[1, 2]]), np.array([[2, 3]])
    >>> [(step.new, step.draft, step.num_accepted) for step in of_row([5, 6, 2, 8, 9, 3], trace, 0)]
    [([5], [], 0), ([6, 2], [6, 7], 1), ([8, 9, 3], [8, 9], 2)]
    """
    tokens = [int(token) for token in tokens]
    rounds, at = [Round([], tokens[:1], [], 0)], 1
    for draft, length, accepted, kept in zip(*(field[row].tolist() for field in trace), strict=True):
        if kept:
            rounds.append(Round(tokens[:at], tokens[at : at + kept], draft[:length], accepted))
            at += kept
    return rounds


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


def spelt(tokenizer: Any, step: Round) -> Spelt:
    """A round as text; without a tokenizer, as ids."""
    accepted, rejected, own = judge(step)
    kept = [*step.before, *accepted]
    if tokenizer is None:
        return Spelt(*("".join(f" {token}" for token in part) for part in (step.before, accepted, rejected, own)))
    parts = spell(tokenizer, step.before, accepted), spell(tokenizer, kept, rejected), spell(tokenizer, kept, own)
    return Spelt(_decode(tokenizer, step.before), *("".join(part) for part in parts))


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
