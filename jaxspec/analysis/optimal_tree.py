"""The static tree to draft: Sequoia's dynamic program (Chen et al., arXiv 2402.12374), for given acceptance and costs.

Shapes: K children of a node at most, L levels, M nodes at most. NumPy only; `analysis.plan` measures acceptance and
costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

DEEPEST = 16  # levels that are tried


class PlannedTree(NamedTuple):
    """A tree or a chain, and what it promises.

    Attributes:
        shape: for `drafters.tree(model, shape=...)`; empty: do not draft.
        tokens_per_round: expected, if a node's children are accepted as often as those of any other; or replayed along
            the target's texts (`analysis.plan`).
        cost: of a round, in passes of the target over one token.
        draw: how `drafters.tree` is to choose children; empty: not planned.
    """

    shape: tuple[tuple[int, ...], ...]
    tokens_per_round: float
    cost: float
    draw: str = ""

    @property
    def improvement(self) -> float:
        """Speed over plain decoding.

        >>> PlannedTree(((0,),), 1.8, 1.2).improvement
        1.5
        """
        return self.tokens_per_round / self.cost

    @property
    def depth(self) -> int:
        """Levels, each of which costs a pass of the drafter."""
        return max(map(len, self.shape), default=0)


def optimal(
    acceptance: Sequence[float] | Float[np.ndarray, "*shape K"],
    depth_cost: float,
    width_cost: Sequence[float] | Float[np.ndarray, " M+1"],
    nodes: int,
) -> PlannedTree:
    """Finds the tree that yields the most tokens per second.

    Of all trees with m nodes and l levels the one with the most accepted tokens is found by a dynamic program; the
    answer is that with the most tokens for the cost of a round, l depth_cost + width_cost[m].

    Args:
        acceptance: how probably a node's children are accepted, once the node is: by rank [K], if that depends on
            nothing else; by how many children there are, and rank [K, K] (entry [k - 1, r] of the r-th of k; mixed
            children are fewer or more of the likeliest ones); or by depth, too [L, K, K].
        depth_cost: of a pass of the drafter, of which each level takes one, in passes of the target over one token.
        width_cost: of the target's pass over 0, 1, 2, ... draft tokens and the last committed one, in the same unit.
        nodes: most draft tokens.

    Raises:
        ValueError: no nodes, costs that are too few or not positive, or probabilities outside of [0, 1].

    Example, where a wider pass is free, and where it is not:
        >>> tree = optimal([0.6, 0.2], depth_cost=0.1, width_cost=[1.0] * 7, nodes=6)
        >>> tree.shape
        ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
        >>> round(tree.tokens_per_round, 3), round(tree.improvement, 3)
        (2.44, 2.033)
        >>> optimal([0.6, 0.2], depth_cost=0.1, width_cost=[1.0, 1.6, 2.2], nodes=2).shape
        ()
    """
    by_count, costs = _by_count(acceptance), np.asarray(width_cost, np.float64)
    if nodes < 1 or len(costs) <= nodes:
        raise ValueError(f"nodes is {nodes} and there are {len(costs)} costs: expected at least 1, and one cost more")
    if depth_cost < 0 or costs.min() <= 0:
        raise ValueError(f"depth_cost is {depth_cost} and width_cost {costs.min()} at least: expected positive costs")
    best = PlannedTree((), 1.0, float(costs[0]))
    for levels in range(1, min(nodes, DEEPEST if by_count.shape[0] == 1 else by_count.shape[0]) + 1):
        table = _Table(by_count, levels, nodes)
        cost = levels * depth_cost + costs[: nodes + 1]
        speed = (1 + table.gain[0]) / cost
        count = int(np.argmax(speed))
        if speed[count] > best.improvement * (1 + 1e-9):
            best = PlannedTree(table.shape(count), float(1 + table.gain[0][count]), float(cost[count]))
    return best


def best_of_size(acceptance: Sequence[float] | np.ndarray, nodes: int, depth: int) -> tuple[tuple[int, ...], ...]:
    """Finds the tree of `nodes` nodes, none deeper than `depth`, with the most accepted tokens.

    Args:
        nodes, depth: of the tree; fewer nodes, if the acceptance is of too few children.

    >>> best_of_size([0.6, 0.2], 3, 1), best_of_size([0.6, 0.2], 3, 3)
    (((0,), (1,)), ((0,), (0, 0), (0, 0, 0)))
    """
    table = _Table(_by_count(acceptance), depth, nodes)
    return table.shape(int(np.max(np.flatnonzero(table.gain[0] > -np.inf))))


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

    def shape(self, nodes: int) -> tuple[tuple[int, ...], ...]:
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


def _by_count(acceptance: Sequence[float] | np.ndarray) -> Float[np.ndarray, "L K K"]:
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
