"""The token tree with the most accepted tokens of each size: Sequoia's dynamic program.

Shapes: K children of a node at most, L levels, M nodes at most.

Reference: Chen et al., Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from jaxspec.drafters.trees.shape import Choices

DEEPEST = 16  # levels that are tried


def best_trees(
    acceptance: Sequence[float] | Float[np.ndarray, "*shape K"],
    nodes: int,
    sizes: Sequence[int] | None = None,
    deepest: int = DEEPEST,
) -> list[tuple[Choices, float]]:
    """Finds for each number of nodes and of levels at most the tree with the most accepted tokens.

    Args:
        acceptance: how probably a child of an accepted node is accepted, by its rank [K]. With [K,
            K] entry [k - 1, r] is for child r of k: mixed children are fewer, or more of the
            likeliest ones. [L, K, K] adds the depth; deeper levels count as the last.
        nodes: most draft tokens.
        sizes: numbers of nodes; by default 1, 2, ... nodes.
        deepest: most levels.

    Returns:
        Shapes, and the tokens of a round, the target's own among them. No size that acceptance is
        of too few children for.

    >>> [(shape, round(tokens, 2)) for shape, tokens in best_trees([0.6, 0.2], 3, [3])]
    [(((0,), (1,), (0, 0)), 2.16), (((0,), (0, 0), (0, 0, 0)), 2.18)]
    """
    rates = by_count(acceptance)
    tokens_by_shape = dict[Choices, float]()
    for levels in range(1, min(nodes, deepest) + 1):
        table = _Table(rates, levels, nodes)
        for size in range(1, nodes + 1) if sizes is None else sizes:
            if table.gain[0][size] > -np.inf:
                tokens_by_shape[table.shape(size)] = 1 + float(table.gain[0][size])
    return list(tokens_by_shape.items())


class _Table:
    """The dynamic program for trees of at most so many levels.

    gain[d][m]: most accepted tokens expected below a node of depth d that was accepted, with m
    nodes there.
    """

    def __init__(self, acceptance: Float[np.ndarray, "L K K"], levels: int, nodes: int):
        self.gain = np.full((levels + 1, nodes + 1), -np.inf)
        self.gain[:, 0] = 0.0
        self.count = np.zeros((levels, nodes + 1), np.int64)  # of children
        # by depth, by number of children, by rank: how many nodes the child has, with itself
        self.share = []
        sizes = np.arange(nodes + 1)
        # [nodes of all children, nodes of the last] -> nodes of those before
        others = sizes[:, None] - sizes[None, :]
        for depth in reversed(range(levels)):
            rates = acceptance[min(depth, len(acceptance) - 1)]  # [K, K]
            # of a child, by its nodes
            if_accepted = np.concatenate([[-np.inf], 1 + self.gain[depth + 1][:-1]])
            shares = []
            for count in range(1, len(rates) + 1):
                # total[m]: most accepted tokens of the children so far, with m nodes; one more
                # child in each step.
                total = np.where(sizes == 0, 0.0, -np.inf)
                by_rank = []
                for rank in range(count):
                    worth = rates[count - 1, rank] * np.maximum(if_accepted, 0)
                    worth = np.where(if_accepted > -np.inf, worth, -np.inf)
                    tried = np.where(
                        others >= 0, total[np.maximum(others, 0)] + worth[None, :], -np.inf
                    )
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
        tree = []
        count = int(self.count[len(path), nodes])
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
    if rates.ndim == 2:
        rates = rates[None]
    if (
        rates.ndim != 3
        or rates.shape[1] != rates.shape[2]
        or not np.all((rates >= 0) & (rates <= 1))
    ):
        raise ValueError(
            f"acceptance has the shape {np.shape(acceptance)}: expected probabilities by rank [K], "
            "by number of children and rank [K, K], or by depth, too [L, K, K]"
        )
    return rates
