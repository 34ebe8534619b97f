"""Static trees: the parent of each node, the same for every row and round, and the order of
drafting.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.core import tree as trees
from jaxspec.core.checks import integer

Choices = tuple[tuple[int, ...], ...]
"""A tree as the ranks on the way to each node: (1, 0) is the first child of the root's second
child.
"""


class Level(NamedTuple):
    """The children of the nodes of one depth."""

    # the fed tokens whose children these are: 0 the last committed one, j node j - 1
    parents: tuple[int, ...]
    counts: tuple[int, ...]  # how many children each of them has; of the first ranks, in order
    # those of the children that are fed in their turn, as numbers among all of `parents` times the
    # most children, rank by rank
    deeper: tuple[int, ...]


class Shape(NamedTuple):
    """A static tree. Nodes that are fed come first, level by level; then those that end a path.

    Only nodes with children are fed to the drafter, since feeding is what costs. Its distributions
    lie side by side: entry i comes after fed token i.
    """

    parents: tuple[int, ...]  # the same as in `core.Draft`
    depths: tuple[int, ...]  # each node's depth, 1 after the last committed token
    fed: int  # how many of the nodes are fed
    levels: tuple[Level, ...]  # from the last committed token down
    # of each node, its place among the children of all levels (each with as many as the most of its
    # level)
    order: tuple[int, ...]


def branching(counts: Sequence[int]) -> Choices:
    """Makes the tree whose nodes of depth d have counts[d] children.

    >>> branching((2, 1))
    ((0,), (1,), (0, 0), (1, 0))
    """
    depths = range(1, len(counts) + 1)
    return tuple(
        node for depth in depths for node in itertools.product(*map(range, counts[:depth]))
    )


def by_rank(acceptance: Sequence[float], nodes: int, depth: int) -> Choices:
    """Makes the tree with the most accepted tokens if a child of rank r is accepted with
    probability acceptance[r].

    The nodes that are reached most often, one after the other. `analysis.plan` weighs costs, too.

    `acceptance` falls, and no node is deeper than `depth`.

    >>> by_rank((0.6, 0.3), nodes=4, depth=3)
    ((0,), (0, 0), (1,), (0, 0, 0))
    """
    nodes_chosen: list[tuple[int, ...]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(-acceptance[0], (0,))]
    while frontier and len(nodes_chosen) < nodes:
        reached, node = heapq.heappop(frontier)
        nodes_chosen.append(node)
        rank = node[-1]
        if rank + 1 < len(acceptance):
            heapq.heappush(
                frontier,
                (reached / acceptance[rank] * acceptance[rank + 1], (*node[:-1], rank + 1)),
            )
        if len(node) < depth:
            heapq.heappush(frontier, (reached * acceptance[0], (*node, 0)))
    return tuple(nodes_chosen)


def shape_of(choices: Sequence[Sequence[int]]) -> Shape:
    """Converts a tree of ranks to a `Shape`.

    >>> shape = shape_of(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))  # a b, c d after a, e after c
    >>> shape.parents, shape.fed  # a c are fed, b d e end paths
    ((0, 1, 0, 1, 2), 2)
    >>> shape.levels[1]
    Level(parents=(1,), counts=(2,), deeper=(0,))
    """
    try:
        nodes = tuple(
            tuple(integer(rank, "a rank", "an integer") for rank in node) for node in choices
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"the tree is {choices!r}: expected the ranks on the way to each node, such as [(0,), "
            "(1,), (0, 0)]"
        ) from None
    return _shape_of(nodes)


@functools.lru_cache
def _shape_of(choices: Choices) -> Shape:
    if not choices:
        raise ValueError("the tree has no nodes: expected at least one, such as (0,)")
    trees.of_choices(choices)  # raises ValueError if they do not form a tree
    nodes = sorted(choices, key=lambda node: (len(node), node))
    _check_siblings(nodes)
    # A node's younger siblings come after it, so the elder siblings of a fed one are fed, too.
    inner = {(*node[:-2], rank) for node in nodes if len(node) > 1 for rank in range(node[-2] + 1)}
    nodes.sort(key=lambda node: node not in inner)
    number = {(): 0} | {node: index + 1 for index, node in enumerate(nodes)}
    levels = []
    order = {}
    width = 0
    for depth in range(max(map(len, nodes))):
        parents = [node for node in [(), *nodes[: len(inner)]] if len(node) == depth]
        counts = [sum(node[:-1] == parent for node in nodes) for parent in parents]
        slots = _slots(parents, counts)
        deeper = (slot for child, slot in slots.items() if child in inner)
        levels.append(
            Level(tuple(number[parent] for parent in parents), tuple(counts), tuple(deeper))
        )
        order |= {child: width + slot for child, slot in slots.items()}
        width += len(parents) * max(counts)
    return Shape(
        tuple(number[node[:-1]] for node in nodes),
        tuple(map(len, nodes)),
        len(inner),
        tuple(levels),
        tuple(order[node] for node in nodes),
    )


def _check_siblings(nodes: Sequence[tuple[int, ...]]) -> None:
    """Raises ValueError if a node lacks an elder sibling."""
    existing = set(nodes)
    for node in nodes:
        elder = (*node[:-1], node[-1] - 1)
        if node[-1] and elder not in existing:
            raise ValueError(
                f"the tree has the node {node} and not its elder sibling {elder}: add it, ranks "
                "have no gaps"
            )


def _slots(parents: Sequence[tuple[int, ...]], counts: Sequence[int]) -> dict[tuple[int, ...], int]:
    """Numbers the children of a level, which are drawn side by side.

    Each parent has as many slots as the parent with the most children; some stay empty.

    >>> _slots([(0,), (1,)], [1, 2])
    {(0, 0): 0, (1, 0): 2, (1, 1): 3}
    """
    slots_per_parent = max(counts)
    slots = dict[tuple[int, ...], int]()
    for index, (parent, count) in enumerate(zip(parents, counts, strict=True)):
        for rank in range(count):
            slots[(*parent, rank)] = index * slots_per_parent + rank
    return slots


def turns(shape: Shape, drafters: int) -> list[np.ndarray]:
    """Numbers the drafter that chooses each child, for each level [parents, children]; they take
    turns.

    The drafter that chose a node chooses its first child, the next drafter the second, and so on.
    The first drafter begins.

    >>> [of_level.tolist() for of_level in turns(shape_of(branching((2, 2))), drafters=2)]
    [[[0, 1]], [[0, 1], [1, 0]]]
    """
    levels = []
    chosen_by = np.zeros(1, np.int32)
    for level in shape.levels:
        rank = np.arange(max(level.counts), dtype=np.int32)[None, :]
        levels.append((chosen_by[:, None] + rank) % drafters)
        chosen_by = levels[-1].reshape(-1)[list(level.deeper)]
    return levels


def sources(shape: Shape, drafters: int) -> np.ndarray:
    """Numbers the drafter that chooses each node, in the order of the draft.

    >>> sources(shape_of(branching((2, 2))), drafters=2).tolist()
    [0, 1, 0, 1, 1, 0]
    """
    of_levels = [of_level.reshape(-1) for of_level in turns(shape, drafters)]
    return np.concatenate(of_levels)[list(shape.order)]


def seen(shape: Shape) -> np.ndarray:
    """Marks the draft tokens i on the path to each fed token j, itself included: `seen[j, i]` [1 +
    fed, nodes].

    >>> seen(shape_of(branching((2, 1)))).astype(int).tolist()
    [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    """
    on_path = np.zeros((len(shape.parents) + 1, len(shape.parents)), bool)
    for node, parent in enumerate(shape.parents):
        on_path[node + 1] = on_path[parent]
        on_path[node + 1, node] = True
    return on_path[: shape.fed + 1]
