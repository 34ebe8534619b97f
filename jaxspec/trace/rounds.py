"""A round of speculative decoding: what became of its draft tokens, in token ids and spelt."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

HALF_CHARACTER = "\ufffd"
CONTEXT = 256  # tokens before a round that are spelt: more than any line shows


class Prefix(Sequence[int]):
    """The first `length` tokens of a list that all rounds of a row share, so that a round's size is that of its own.

    >>> text = [5, 6, 7]
    >>> Prefix(text, 2), Prefix(text, 2)[-1:], Prefix(text, 2) == [5, 6]
    ([5, 6], [6], True)
    """

    def __init__(self, tokens: list[int], length: int):
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        places = range(self._length)[index]
        return self._tokens[places] if isinstance(places, int) else [self._tokens[place] for place in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


class Round(NamedTuple):
    """One round of one prompt, in token ids.

    Attributes:
        before: new tokens committed by earlier rounds.
        new: tokens that this round committed.
        draft: its draft tokens; none for the first token, which the target reads off the prompt.
        num_accepted: how many of them the rule accepted.
        parent, path: of a tree, as in `core.Draft` and `core.Verdict`, the path cut to its length; None: a chain.
    """

    before: Sequence[int]
    new: list[int]
    draft: list[int]
    num_accepted: int
    parent: list[int] | None = None
    path: list[int] | None = None


class Judged(NamedTuple):
    """A round's tokens by what became of them."""

    accepted: list[int]
    rejected: list[int]
    own: list[int]


class Spelt(NamedTuple):
    """A round as text: the end of what was committed before it, and its tokens by what became of them."""

    before: str
    accepted: str
    rejected: str
    own: str


def of_row(tokens: Sequence[int], trace: Any, row: int) -> list[Round]:
    """The rounds of one row of a generation; the first token, which costs none, is a round without draft tokens.

    Args:
        tokens: the new tokens of the row, without padding.
        trace: of the generation (`Generation.trace`, with the fields of `core.RoundInfo`, rows first).
        row: which row.

    Two rounds of two draft tokens: of 6 7 the first is accepted, of 8 9 both are, and 3 follows:

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> trace = SimpleNamespace(draft=np.array([[[6, 7], [8, 9]]]), draft_length=np.array([[2, 2]]), parent=None,
    ...                         path=None, num_accepted=np.array([[1, 2]]), num_committed=np.array([[2, 3]]))
    >>> [(step.new, step.draft, step.num_accepted) for step in of_row([5, 6, 2, 8, 9, 3], trace, 0)]
    [([5], [], 0), ([6, 2], [6, 7], 1), ([8, 9, 3], [8, 9], 2)]
    """
    tokens = [int(token) for token in tokens]
    rounds, at = [Round([], tokens[:1], [], 0)], 1
    for index, committed in enumerate(trace.num_committed[row].tolist()):
        if committed:
            accepted, draft = int(trace.num_accepted[row, index]), trace.draft[row, index].tolist()
            made = Round(Prefix(tokens, at), tokens[at : at + committed], draft, accepted)
            if trace.parent is None:
                made = made._replace(draft=draft[: trace.draft_length[row, index]])
            else:
                path = trace.path[row, index, :accepted].tolist()
                made = made._replace(parent=trace.parent[row, index].tolist(), path=path)
            rounds.append(made)
            at += committed
    return rounds


def judge(step: Round) -> Judged:
    """Splits a round into accepted draft tokens, the rejected one (of a tree: all children of the last accepted one),
    and the target's own token after them.

    A round that was cut, at an end token or at the limit, has no token of the target's own.

    >>> judge(Round([], new=[5, 6, 9], draft=[5, 6, 7, 8], num_accepted=2))
    Judged(accepted=[5, 6], rejected=[7], own=[9])
    >>> judge(Round([], new=[5, 1], draft=[5, 1, 7], num_accepted=3))
    Judged(accepted=[5, 1], rejected=[], own=[])
    """
    n = step.num_accepted
    if len(step.new) <= n:
        return Judged(step.new, [], [])
    if step.parent is None or step.path is None:
        return Judged(step.new[:n], step.draft[n : n + 1], step.new[n:])
    last = step.path[-1] + 1 if step.path else 0
    children = [token for token, parent in zip(step.draft, step.parent, strict=True) if parent == last]
    return Judged(step.new[:n], children, step.new[n:])


class Branch(NamedTuple):
    """A line of a tree: nodes that follow each other without a sibling.

    Attributes:
        lead: the lines that lead to it, drawn.
        tokens: with what became of each: "accepted", "rejected", "untried" (not tested), or "own", which is the
            target's, after the accepted ones.
        before: the last of the tokens that precede them.
    """

    lead: str
    tokens: list[tuple[int, str]]
    before: list[int]


def branches(step: Round) -> list[Branch]:
    """A round's tree, a line for each branch, siblings in the order in which they are tested; none for a chain.

    >>> step = Round([], new=[5, 8, 9], draft=[4, 5, 8, 2, 3], num_accepted=2, parent=[0, 0, 2, 2, 1], path=[1, 2])
    >>> for lead, tokens, _ in branches(step):
    ...     print(lead + " ".join(f"{token}{fate[0]}" for token, fate in tokens))
    ├─ 4r 3u
    └─ 5a
       ├─ 8a 9o
       └─ 2u
    """
    if step.parent is None or step.path is None:
        return []
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(step.parent):
        children.setdefault(parent, []).append(node + 1)
    accepted = [0, *(node + 1 for node in step.path)]
    following = dict(itertools.pairwise(accepted))
    own = step.new[step.num_accepted :]
    found: list[Branch] = []

    def fate(node: int, parent: int) -> str:
        if node in accepted:
            return "accepted"
        return "rejected" if parent in accepted and node < following.get(parent, node + 1) else "untried"

    def below(parent: int, lead: str, before: list[int]) -> None:
        # The target's own token is one more child of the last accepted node: -1.
        nodes = [*children.get(parent, []), *([-1] if parent == accepted[-1] and own else [])]
        for index, node in enumerate(nodes):
            last, tokens, above = index == len(nodes) - 1, [], parent
            while True:
                tokens.append((own[0], "own") if node < 0 else (step.draft[node - 1], fate(node, above)))
                under = [*children.get(node, []), *([-1] if node == accepted[-1] and own else [])] if node > 0 else []
                if len(under) != 1:
                    break
                above, node = node, under[0]
            found.append(Branch(lead + ("└─ " if last else "├─ "), tokens, before))
            if node > 0 and under:
                below(node, lead + ("   " if last else "│  "), [*before, *(token for token, _ in tokens)])

    below(0, "", list(step.before[-CONTEXT:]))
    return found


def spelt(tokenizer: Any, step: Round, context: int = CONTEXT) -> Spelt:
    """Spells a round; without a tokenizer, as ids. Of the tokens before it only the last `context` are, after a "…"."""
    accepted, rejected, own = judge(step)
    before = step.before[-context:] if context else []
    cut = "…" if len(before) < len(step.before) else ""
    if tokenizer is None:
        parts = ("".join(f" {token}" for token in part) for part in (before, accepted, rejected, own))
        return Spelt(cut + next(parts), *parts)
    committed = [*before, *accepted]
    own_text = spell(tokenizer, committed, own)
    parts = spell(tokenizer, before, accepted), spell(tokenizer, committed, rejected), own_text
    text = _decode(tokenizer, before)
    return Spelt(cut + text.lstrip(HALF_CHARACTER) if cut else text, *("".join(part) for part in parts))


def spell(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text that each of `tokens` adds after `before`; a special token is spelt by its name."""
    so_far, shown, pieces = list(before), _decode(tokenizer, before).rstrip(HALF_CHARACTER), []
    for token in tokens:
        so_far.append(token)
        whole = _decode(tokenizer, so_far)
        piece = whole[len(shown) :] if whole.startswith(shown) else ""
        pieces.append(piece or tokenizer.convert_ids_to_tokens(token) or f" {token}")  # an id may have no token
        shown = whole.rstrip(HALF_CHARACTER)
    return pieces


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text as tokens spell it, so that what they add can be told: cleaning up spaces would change earlier text."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def spelt_branches(tokenizer: Any, step: Round) -> list[tuple[str, list[tuple[str, str]]]]:
    """The lines of a round's tree as text: what leads to each, and its tokens with what became of them."""
    found = []
    for lead, tokens, before in branches(step):
        ids = [token for token, _ in tokens]
        pieces = [f" {token}" for token in ids] if tokenizer is None else spell(tokenizer, before, ids)
        found.append((lead, [(piece, fate) for piece, (_, fate) in zip(pieces, tokens, strict=True)]))
    return found
