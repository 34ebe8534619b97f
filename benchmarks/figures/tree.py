"""A token tree as `jaxspec plan --tree` chose it: which nodes it has, and how often each is
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.figures.style import BLUE, GREY, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST = 260  # area of a node that is always accepted, in square points


def tree_diagram(
    shape: Sequence[Sequence[int]],
    acceptance: Sequence[Sequence[float]] | np.ndarray | None = None,
    title: str = "",
) -> Figure:
    """A static tree, from the last committed token down; a node's area is the probability that it
    is accepted.

    Example:
        >>> len(
        ...     tree_diagram([(0,), (1,), (0, 0)]).axes[0].collections[1].get_offsets()
        ... )  # with the root
        4
    """
    nodes = [(), *sorted((tuple(node) for node in shape), key=lambda node: (len(node), node))]
    children = {node: [other for other in nodes[1:] if other[:-1] == node] for node in nodes}
    across: dict[tuple[int, ...], float] = {}
    leaves = 0

    def place(node: tuple[int, ...]) -> float:
        nonlocal leaves
        if not children[node]:
            across[node], leaves = float(leaves), leaves + 1
        else:
            across[node] = float(np.mean([place(child) for child in children[node]]))
        return across[node]

    place(())
    reached = {(): 1.0}
    for node in nodes[1:]:
        count = len(children[node[:-1]])
        chance = 0.5 if acceptance is None else float(np.asarray(acceptance)[count - 1][node[-1]])
        reached[node] = chance if acceptance is None else reached[node[:-1]] * chance
    deepest = max(map(len, nodes))
    figure, axes = canvas(max(4.0, 0.32 * leaves + 1.5), 0.8 * deepest + 1.6)
    from matplotlib.collections import LineCollection

    lines = [[(across[node[:-1]], len(node) - 1), (across[node], len(node))] for node in nodes[1:]]
    axes.add_collection(LineCollection(lines, colors=GREY, linewidths=0.8, zorder=1))
    areas = [max(6.0, LARGEST * reached[node]) for node in nodes]
    axes.scatter(
        [across[n] for n in nodes],
        [len(n) for n in nodes],
        s=areas,
        color=BLUE,
        edgecolor="white",
        zorder=2,
    )
    axes.set(
        ylabel="draft tokens on the path",
        xlim=(-0.8, leaves - 0.2),
        ylim=(deepest + 0.5, -0.5),
        title=title,
    )
    axes.set_xticks([])
    axes.set_yticks(range(deepest + 1))
    axes.spines["bottom"].set_visible(False)
    return figure
