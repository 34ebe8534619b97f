"""The rounds of a generation, with the fates of their draft tokens, in token ids and spelt."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

HALF_CHARACTER = "\ufffd"
CONTEXT = 256  # most tokens before a round to spell: more than any line shows


class TokensView(Sequence[int]):
    """A view of the first `length` tokens of a list, which all rounds of a row share.

    >>> text = [5, 6, 7]
    >>> TokensView(text, 2), TokensView(text, 2)[-1:], TokensView(text, 2) == [5, 6]
    ([5, 6], [6], True)
    """

    def __init__(self, tokens: list[int], length: int):
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        places = range(self._length)[index]
        if isinstance(places, int):
            return self._tokens[places]
        return [self._tokens[i] for i in places]

    def __eq__(self, value: object) -> bool:
        return (
            isinstance(value, Sequence)
            and len(self) == len(value)
            and all(map(operator.eq, self, value))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


class TracedRound(NamedTuple):
    """One round of one prompt, in token ids."""

    before: Sequence[int]  # new tokens committed by earlier rounds
    new: list[int]  # tokens that this round committed
    # its draft tokens; empty for the first token, which prefill makes
    draft: list[int]
    num_accepted: int  # how many of them the rule accepted
    # these two: a tree's `core.Draft.parent` and `core.Verdict.path`, the path cut to its length;
    # None for a chain
    parent: list[int] | None = None
    path: list[int] | None = None
    # the numbers of each draft token by name, an entry None if unknown; None if not traced
    numbers: dict[str, list[float | None]] | None = None


class TokenFates(NamedTuple):
    """A round's tokens by fate: accepted and rejected draft tokens, and the target's token."""

    accepted: list[int]
    rejected: list[int]
    target: list[int]


class RoundText(NamedTuple):
    """A round as text: the end of the text before it, and its tokens by their fates."""

    before: str
    accepted: str
    rejected: str
    target: str


def of_row(tokens: Sequence[int], trace: Any, row: int) -> list[TracedRound]:
    """Returns the rounds of a row; prefill's first token is a round without a draft.

    Args:
        tokens: the new tokens of the row, without padding.
        trace: the generation's trace (`Generation.trace`, with the fields of `core.RoundInfo`, rows
            first).
        row: the row's number.

    In two rounds of two draft tokens, only 6 of 6 7 is accepted, then both of 8 9, and 3 follows:

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> counts = {"draft_length": [[2, 2]], "num_accepted": [[1, 2]], "num_committed": [[2, 3]]}
    >>> trace = SimpleNamespace(
    ...     draft=np.array([[[6, 7], [8, 9]]]),
    ...     parent=None,
    ...     path=None,
    ...     numbers=None,
    ...     **{name: np.array(count) for name, count in counts.items()},
    ... )
    >>> [(step.new, step.draft, step.num_accepted) for step in of_row([5, 6, 2, 8, 9, 3], trace, 0)]
    [([5], [], 0), ([6, 2], [6, 7], 1), ([8, 9, 3], [8, 9], 2)]
    """
    tokens = [int(token) for token in tokens]
    rounds = [TracedRound([], tokens[:1], [], 0)]
    start = 1
    for index, committed in enumerate(trace.num_committed[row].tolist()):
        if not committed:  # the row had ended
            continue
        accepted = int(trace.num_accepted[row, index])
        draft = trace.draft[row, index].tolist()
        parent = None
        path = None
        if trace.parent is None:
            draft = draft[: trace.draft_length[row, index]]
        else:
            parent = trace.parent[row, index].tolist()
            path = trace.path[row, index, :accepted].tolist()
        numbers = None
        if trace.numbers is not None:
            numbers = numbers_of(trace.numbers, (row, index, slice(len(draft))))
        step = TracedRound(
            before=TokensView(tokens, start),
            new=tokens[start : start + committed],
            draft=draft,
            num_accepted=accepted,
            parent=parent,
            path=path,
            numbers=numbers,
        )
        rounds.append(step)
        start += committed
    return rounds


def numbers_of(numbers: Any, index: Any = ...) -> dict[str, list[float | None]]:
    """Returns the numbers of some draft tokens by name, as plain values: None for NaN.

    >>> import numpy as np
    >>> from jaxspec.core import TraceNumbers
    >>> nothing = np.array([[np.nan, np.nan]])
    >>> numbers_of(TraceNumbers(np.array([[0.5, 0.25]]), *[nothing] * 6), 0)["q"]
    [0.5, 0.25]
    """
    columns = {name: values[index].tolist() for name, values in numbers._asdict().items()}
    return {
        name: [None if math.isnan(x) else x for x in column] for name, column in columns.items()
    }


def judge(step: TracedRound) -> TokenFates:
    """Splits a round into accepted draft tokens, rejected ones, and the target's token after them.

    A chain has at most one rejected token; in a tree, all children of the last accepted node are.

    A round that was cut, at an end token or at the limit, has no token from the target.

    >>> judge(TracedRound([], new=[5, 6, 9], draft=[5, 6, 7, 8], num_accepted=2))
    TokenFates(accepted=[5, 6], rejected=[7], target=[9])
    >>> judge(TracedRound([], new=[5, 1], draft=[5, 1, 7], num_accepted=3))
    TokenFates(accepted=[5, 1], rejected=[], target=[])
    """
    n = step.num_accepted
    if len(step.new) <= n:  # cut
        return TokenFates(step.new, [], [])
    if step.parent is None or step.path is None:
        rejected = step.draft[n : n + 1]
    else:
        last = step.path[-1] + 1 if step.path else 0  # the last accepted node, as a parent
        rejected = [
            token for token, parent in zip(step.draft, step.parent, strict=True) if parent == last
        ]
    return TokenFates(step.new[:n], rejected, step.new[n:])


def fates(step: TracedRound) -> list[str]:
    """Returns the fate of each draft token: "accepted", "rejected", "untried" (not tested), or
    "none" for a node of a tree that was not verified.

    >>> fates(TracedRound([], new=[5, 6, 9], draft=[5, 6, 7, 8], num_accepted=2))
    ['accepted', 'accepted', 'rejected', 'untried']
    >>> tree = {"draft": [4, 5, 8, 2, 3], "parent": [0, 0, 2, 2, 1], "path": [1, 2]}
    >>> fates(TracedRound([], new=[5, 8, 9], num_accepted=2, **tree))
    ['rejected', 'accepted', 'accepted', 'untried', 'untried']
    """
    if step.parent is None or step.path is None:
        results = ["untried"] * len(step.draft)
        results[: step.num_accepted] = ["accepted"] * step.num_accepted
        if step.num_accepted < len(step.draft):
            results[step.num_accepted] = "rejected"
        return results
    # Fed tokens: 0 is the last committed one, draft token i is i + 1.
    path = [0, *(node + 1 for node in step.path)]
    child_on_path = dict(itertools.pairwise(path))
    verified = {0}
    results = []
    for node, parent in enumerate(step.parent, 1):
        if parent not in verified:
            results.append("none")  # cut off, or below such a node
            continue
        verified.add(node)
        if node in path:
            results.append("accepted")
        elif parent in path and node < child_on_path.get(parent, node + 1):
            # A sibling was accepted later, or none was.
            results.append("rejected")
        else:
            results.append("untried")
    return results


class Branch(NamedTuple):
    """A line of a drawn tree: a run of nodes without siblings."""

    lead: str  # the lines that lead to it, drawn
    # each with its fate: "accepted", "rejected", "untried" (not tested), or "own", the target's
    # token after the others
    tokens: list[tuple[int, str]]
    before: list[int]  # the last tokens before them


def branches(step: TracedRound) -> list[Branch]:
    """Draws a round's tree, a line per branch, siblings in test order; [] for a chain.

    >>> tree = {"draft": [4, 5, 8, 2, 3], "parent": [0, 0, 2, 2, 1], "path": [1, 2]}
    >>> step = TracedRound([], new=[5, 8, 9], num_accepted=2, **tree)
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
        if parent >= 0:  # -1: cut off, and not verified
            children.setdefault(parent, []).append(node + 1)
    accepted = [0, *(node + 1 for node in step.path)]
    target_token = step.new[step.num_accepted :]  # one, or none
    lines: list[Branch] = []
    fate = fates(step)

    def nodes_below(parent: int) -> list[int]:
        nodes = list(children.get(parent, []))
        # The target's token is one more child of the last accepted node: -1, which has no children.
        if parent == accepted[-1] and target_token:
            nodes.append(-1)
        return nodes

    def token_of(node: int) -> tuple[int, str]:
        if node < 0:
            return target_token[0], "own"
        return step.draft[node - 1], fate[node - 1]

    def draw(parent: int, lead: str, before: list[int]) -> None:
        nodes = nodes_below(parent)
        for node in nodes:
            is_last = node == nodes[-1]
            tokens = [token_of(node)]
            below = nodes_below(node)
            while len(below) == 1:  # down to a leaf, or to a node with several children
                node = below[0]
                tokens.append(token_of(node))
                below = nodes_below(node)
            lines.append(Branch(lead + ("└─ " if is_last else "├─ "), tokens, before))
            if below:
                inner_lead = lead + ("   " if is_last else "│  ")
                draw(node, inner_lead, [*before, *(token for token, _ in tokens)])

    draw(0, "", list(step.before[-CONTEXT:]))
    return lines


def spelt(tokenizer: Any, step: TracedRound, context: int = CONTEXT) -> RoundText:
    """Spells a round; without a tokenizer, as ids. Only the last `context` tokens before it are
    spelt, after a "…".
    """
    accepted, rejected, target = judge(step)
    before = step.before[-context:] if context else []
    is_cut = len(before) < len(step.before)
    if tokenizer is None:
        text = _as_ids(before)
        parts = (_as_ids(accepted), _as_ids(rejected), _as_ids(target))
    else:
        text = _decode(tokenizer, before)
        if is_cut:  # the cut may divide a character
            text = text.lstrip(HALF_CHARACTER)
        committed = [*before, *accepted]
        parts = (
            "".join(spell(tokenizer, before, accepted)),
            "".join(spell(tokenizer, committed, rejected)),
            "".join(spell(tokenizer, committed, target)),
        )
    return RoundText(f"…{text}" if is_cut else text, *parts)


def _as_ids(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def spell(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """Spells the text that each of `tokens` adds after `before`, and special tokens by name."""
    so_far = list(before)
    shown = _decode(tokenizer, before).rstrip(HALF_CHARACTER)
    pieces = []
    for token in tokens:
        so_far.append(token)
        text = _decode(tokenizer, so_far)
        piece = ""
        if text.startswith(shown):
            piece = text[len(shown) :]
        # some ids have no token
        pieces.append(piece or tokenizer.convert_ids_to_tokens(token) or f" {token}")
        shown = text.rstrip(HALF_CHARACTER)
    return pieces


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decodes tokens without cleaning up spaces, which would change earlier text."""
    return tokenizer.decode(
        list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def spelt_branches(tokenizer: Any, step: TracedRound) -> list[tuple[str, list[tuple[str, str]]]]:
    """Spells a round's tree: for each line its lead, drawn, and its tokens with their fates."""
    lines = []
    for lead, tokens, before in branches(step):
        ids = [token for token, _ in tokens]
        if tokenizer is None:
            pieces = [f" {token}" for token in ids]
        else:
            pieces = spell(tokenizer, before, ids)
        lines.append(
            (lead, [(piece, fate) for piece, (_, fate) in zip(pieces, tokens, strict=True)])
        )
    return lines
