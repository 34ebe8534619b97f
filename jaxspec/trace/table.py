"""A trace as columns: an entry for every draft token of every round, as pandas takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int


def table(trace: Any) -> dict[str, np.ndarray]:
    """Returns the columns of a trace, with an entry for every verified draft token, row by row.

    The columns are:

    - `row`, `round`: the numbers of the prompt and of the round, as in pictures: round 1 is the
      first with a draft.
    - `draft_tokens`: how many draft tokens the round had (its gamma).
    - `position`: the index in `Generation.tokens` that the draft token was proposed for.
    - `parent`: in a tree, the draft token before it, as in `core.Draft`; absent for chains.
    - `token`: its id.
    - `tested`: whether the rule reached it, after the draft tokens or siblings before it.
    - `accepted`: whether the rule accepted it; an end token or the limit may still cut it off.

    A trace with numbers adds q, p, r, acceptance, residual_mass and entropy (see
    `core.TraceNumbers`), and ratio, p / q. Drafters that use some of the target's layers also have
    layers, their number.

    Args:
        trace: the trace of a generation (`Generation.trace`, with the fields of `core.RoundInfo`,
            rows first).

    In a round of two draft tokens the first is accepted:

    >>> from types import SimpleNamespace
    >>> counts = {
    ...     name: np.array([[n]])
    ...     for name, n in {
    ...         "draft_length": 2,
    ...         "num_accepted": 1,
    ...         "num_committed": 2,
    ...         "num_tested": 2,
    ...     }.items()
    ... }
    >>> trace = SimpleNamespace(
    ...     draft=np.array([[[6, 7]]]), parent=None, path=None, numbers=None, **counts
    ... )
    >>> {
    ...     name: column.tolist()
    ...     for name, column in table(trace).items()
    ...     if name in ("position", "token", "accepted")
    ... }
    {'position': [1, 2], 'token': [6, 7], 'accepted': [True, False]}
    """
    draft = np.asarray(trace.draft)
    nodes = _of_chains(trace, draft) if trace.parent is None else _of_trees(trace)
    committed = np.asarray(trace.num_committed)
    # Prefill makes each row's first token, so the first round's draft begins at position 1.
    begin = 1 + np.cumsum(committed, axis=1) - committed
    columns = {
        "row": np.arange(len(draft))[:, None, None],
        "round": 1 + np.arange(draft.shape[1])[:, None],
        "draft_tokens": np.asarray(trace.draft_length)[..., None],
        "position": begin[..., None] + nodes.depth - 1,
    }
    if trace.parent is not None:
        columns["parent"] = np.asarray(trace.parent)
    columns |= {"token": draft, "tested": nodes.tested, "accepted": nodes.accepted}
    if trace.numbers is not None:
        numbers = {name: np.asarray(values) for name, values in trace.numbers._asdict().items()}
        q = numbers.pop("q")
        p = numbers.pop("p")
        if np.isnan(numbers["layers"]).all():  # this drafter takes none of the target's layers
            del numbers["layers"]
        with np.errstate(divide="ignore", invalid="ignore"):
            columns |= {"q": q, "p": p, "ratio": p / q, **numbers}
    return {
        name: np.broadcast_to(column, draft.shape)[nodes.real] for name, column in columns.items()
    }


class DraftedNodes(NamedTuple):
    """The facts of each draft token of each round."""

    real: Bool[np.ndarray, "rows rounds node"]  # it was verified
    depth: Int[np.ndarray, "rows rounds node"]  # how many tokens after the last committed one
    tested: Bool[np.ndarray, "rows rounds node"]
    accepted: Bool[np.ndarray, "rows rounds node"]


def _of_chains(trace: Any, draft: np.ndarray) -> DraftedNodes:
    index = np.arange(draft.shape[2])
    counts = (trace.draft_length, trace.num_tested, trace.num_accepted)
    real, tested, accepted = (index < np.asarray(count)[..., None] for count in counts)
    return DraftedNodes(real, np.broadcast_to(index + 1, draft.shape), tested, accepted)


def _of_trees(trace: Any) -> DraftedNodes:
    parent = np.asarray(trace.parent)
    path = np.asarray(trace.path)
    count = np.asarray(trace.num_accepted)[..., None]
    shape = parent.shape
    # [rows, rounds, 1 + nodes]: 0 is the last committed token, draft tokens count from 1.
    verified = np.ones((*shape[:2], shape[2] + 1), bool)
    depth = np.zeros((*shape[:2], shape[2] + 1), np.int32)
    verified[..., 0] = np.asarray(trace.draft_length) > 0
    # the accepted child of each token on the path; 0: none
    accepted_child = np.zeros(depth.shape, np.int32)
    on_path = np.zeros(verified.shape, bool)
    on_path[..., 0] = True
    # Walk down the accepted paths of all rounds together: `last` is where each has come to.
    last = np.zeros((*shape[:2], 1), np.int32)
    for step in range(path.shape[2]):
        is_step = step < count  # [rows, rounds, 1]
        node = path[..., step : step + 1] + 1
        child = np.where(is_step, node, np.take_along_axis(accepted_child, last, axis=2))
        np.put_along_axis(accepted_child, last, child, axis=2)
        last = np.where(is_step, node, last)
        np.put_along_axis(on_path, last, True, axis=2)
    tested = np.zeros(shape, bool)
    for node in range(shape[2]):  # parents come before their children
        above = np.maximum(parent[..., node : node + 1], 0)

        def of_parent(values: np.ndarray, above: np.ndarray = above) -> np.ndarray:
            return np.take_along_axis(values, above, axis=2)[..., 0]

        is_verified = (parent[..., node] >= 0) & of_parent(verified)
        verified[..., node + 1] = is_verified
        depth[..., node + 1] = of_parent(depth) + 1
        # Siblings are tested in order, up to the one that is accepted.
        accepted_sibling = of_parent(accepted_child)
        has_turn = (accepted_sibling == 0) | (node + 1 <= accepted_sibling)
        tested[..., node] = is_verified & of_parent(on_path) & has_turn
    return DraftedNodes(
        real=verified[..., 1:], depth=depth[..., 1:], tested=tested, accepted=on_path[..., 1:]
    )
