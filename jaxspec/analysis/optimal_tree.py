"""Drafts and their prices, and the trees with the most accepted tokens: Sequoia's dynamic program.

A chain is a tree with one child a node. NumPy only; `analysis.plan` measures acceptance and costs.

Shapes: K children of a node at most, L levels, M nodes at most.

Reference: Chen et al., arXiv 2402.12374.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

DEEPEST = 16  # levels that are tried

Choices = tuple[tuple[int, ...], ...]  # the ranks on the way to each node


class Candidate(NamedTuple):
    """A draft, and what rounds with it promise.

    Attributes:
        shape: for `drafters.tree(model, shape=...)`, of a chain with one child a node; empty: plain decoding.
        tokens_per_round: expected, of a row.
        drafting, verifying: costs of the drafter's passes, one a level, and of the target's, in one-token passes of it.
        operations: arithmetic operations over those of plain decoding.
        draw: how `drafters.tree` is to choose children; empty of chains, and where that is not planned.

    >>> pair = Candidate(((0,), (1,)), 1.8, drafting=0.1, verifying=1.1, operations=2.0)
    >>> pair.gamma, pair.is_tree, round(pair.improvement, 3)
    (1, True, 1.5)
    """

    shape: Choices
    tokens_per_round: float
    drafting: float
    verifying: float
    operations: float
    draw: str = ""

    gamma = property(
        lambda self: max(map(len, self.shape), default=0), doc="Draft tokens of a chain, levels of a tree."
    )
    is_tree = property(lambda self: len(self.shape) > self.gamma, doc="Whether some node has several children.")
    cost = property(lambda self: self.drafting + self.verifying, doc="Of a round.")
    improvement = property(lambda self: self.tokens_per_round / self.cost, doc="Speed over plain decoding, at most.")


def price(
    shape: Choices, tokens_per_round: float, c: ArrayLike, v: Sequence[float] | np.ndarray, c_hat: float, draw: str = ""
) -> Candidate:
    """Adds up a round with a draft: a pass of the drafter for each level, and the target's over all nodes.

    Args:
        shape, tokens_per_round, draw: the fields of `Candidate`.
        c: the cost of a pass of the drafter; or costs by the number of tokens that a pass is fed, from one. The first
            pass is fed two tokens, a later one the nodes of the level before that have children.
        v: the cost of the target's pass by the number of draft tokens, from none.
        c_hat: operations of the drafter over the target's.

    >>> price(((0,), (1,), (0, 0)), 2.0, c=[0.1, 0.11, 0.12], v=[1.0, 1.1, 1.2, 1.3], c_hat=0.1).cost
    1.51
    """
    by_width, depth = np.atleast_1d(c), max(map(len, shape), default=0)
    parents = [len({node[:-1] for node in shape if len(node) == level}) for level in range(1, depth + 1)]
    drafting = sum(float(by_width[min(fed, len(by_width)) - 1]) for fed in [2, *parents[1:]][:depth])
    operations = (c_hat * sum(parents) + len(shape) + 1) / tokens_per_round
    return Candidate(shape, float(tokens_per_round), drafting, float(v[len(shape)]), float(operations), draw)


def best_trees(
    acceptance: Sequence[float] | Float[np.ndarray, "*shape K"],
    nodes: int,
    sizes: Sequence[int] | None = None,
    deepest: int = DEEPEST,
) -> list[tuple[Choices, float]]:
    """Finds for each number of nodes and of levels at most the tree with the most accepted tokens.

    Args:
        acceptance: the probability that a child of an accepted node is accepted. [K] gives it by the child's rank. [K,
            K] gives it by the number of children and the rank: entry [k - 1, r] is for the r-th of k (mixed children
            are fewer or more of the likeliest ones). [L, K, K] adds the depth; deeper levels count as the last.
        nodes: most draft tokens.
        sizes: numbers of nodes; by default 1, 2, ... nodes.
        deepest: most levels.

    Returns:
        Shapes, and the tokens of a round, the target's own among them. No size that acceptance is of too few children
        for.

    Raises:
        ValueError: probabilities outside of [0, 1].

    >>> [(shape, round(tokens, 2)) for shape, tokens in best_trees([0.6, 0.2], 3, [3])]
    [(((0,), (1,), (0, 0)), 2.16), (((0,), (0, 0), (0, 0, 0)), 2.18)]
    """
    rates, tokens_by_shape = by_count(acceptance), dict[Choices, float]()
    for levels in range(1, min(nodes, deepest) + 1):
        table = _Table(rates, levels, nodes)
        for size in range(1, nodes + 1) if sizes is None else sizes:
            if table.gain[0][size] > -np.inf:
                tokens_by_shape[table.shape(size)] = 1 + float(table.gain[0][size])
    return list(tokens_by_shape.items())


class _Table:
    """The dynamic program for trees of at most so many levels.

    gain[d][m]: most accepted tokens expected below a node of depth d that was accepted, with m nodes there.
    """

    def __init__(self, acceptance: Float[np.ndarray, "L K K"], levels: int, nodes: int):
        self.gain = np.full((levels + 1, nodes + 1), -np.inf)
        self.gain[:, 0] = 0.0
        self.count = np.zeros((levels, nodes + 1), np.int64)  # of children
        self.share = []  # by depth, by number of children, by rank: how many nodes the child has, with itself
        sizes = np.arange(nodes + 1)
        others = sizes[:, None] - sizes[None, :]  # [nodes of all children, nodes of the last] -> nodes of those before
        for depth in reversed(range(levels)):
            rates = acceptance[min(depth, len(acceptance) - 1)]  # [K, K]
            if_accepted = np.concatenate([[-np.inf], 1 + self.gain[depth + 1][:-1]])  # of a child, by its nodes
            shares = []
            for count in range(1, len(rates) + 1):
                # total[m]: most accepted tokens of the children so far, with m nodes; one more child in each step.
                total, by_rank = np.where(sizes == 0, 0.0, -np.inf), []
                for rank in range(count):
                    worth = rates[count - 1, rank] * np.maximum(if_accepted, 0)
                    worth = np.where(if_accepted > -np.inf, worth, -np.inf)
                    tried = np.where(others >= 0, total[np.maximum(others, 0)] + worth[None, :], -np.inf)
                    by_rank.append(tried.argmax(axis=1))
                    total = tried.max(axis=1)
                shares.append(by_rank)
                better = total > self.gain[depth]
                self.gain[depth] = np.where(better, total, self.gain[depth])
                self.count[depth] = np.where(better, count, self.count[depth])
            self.share.insert(0, shares)

    def shape(self, nodes: int) -> Choices:
        """Returns the best tree of `nodes` nodes."""
        return tuple(sorted(self._below((), nodes), key=lambda node: (len(node), node)))

    def _below(self, path: tuple[int, ...], nodes: int) -> list[tuple[int, ...]]:
        if not nodes:
            return []
        tree, count = [], int(self.count[len(path), nodes])
        for rank in reversed(range(count)):
            share = int(self.share[len(path)][count - 1][rank][nodes])
            child = (*path, rank)
            tree += [child, *self._below(child, share - 1)]
            nodes -= share
        return tree


def by_count(acceptance: Sequence[float] | np.ndarray) -> Float[np.ndarray, "L K K"]:
    """Returns acceptance by depth, number of children and rank."""
    rates = np.asarray(acceptance, np.float64)
    if rates.ndim == 1:
        rates = np.broadcast_to(rates, (len(rates), len(rates)))
    rates = rates[None] if rates.ndim == 2 else rates
    if rates.ndim != 3 or rates.shape[1] != rates.shape[2] or not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(
            f"acceptance has the shape {np.shape(acceptance)}: expected probabilities by rank [K], by number of "
            "children and rank [K, K], or by depth, too [L, K, K]"
        )
    return rates
