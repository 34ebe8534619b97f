"""Token trees: who precedes whom, how deep, and how to write a tree down.

A tree is an array `parent` [B, N]: parent[b, i] < i is the node that node i follows, -1 stands for
"follows what comes before the tree". `Draft.parent` counts the last committed token as node 0 and
so needs one entry fewer; `fed` adds it. Depth and ancestors are derived here and nowhere else.
Chains are parent=None everywhere and need none of this.

Axis letters as in `jaxspec.core`; N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def fed(parent: Int[Array, "B N"]) -> Int[Array, "B N+1"]:
    """`Draft.parent` with the last committed token in front, as `LanguageModel.extend` takes it.

    >>> fed(jnp.array([[0, 0, 1]])).tolist()
    [[-1, 0, 0, 1]]
    """
    return jnp.pad(parent, ((0, 0), (1, 0)), constant_values=-1)


def ancestors(parent: Int[Array, "B N"]) -> Bool[Array, "B N N"]:
    """`ancestors[b, i, j]`: node j lies on the path to node i, itself included.

    Uses pointer jumping in log2(N) steps. Each step doubles how far up every node sees, and gathers
    N rows.

    >>> ancestors(jnp.array([[-1, 0, 0, 1]]))[0].astype(int).tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    nodes = parent.shape[1]

    def of_row(above: Int[Array, " N"]) -> Bool[Array, "N N"]:
        # Pointer jumping: each step doubles the distance that `jump` covers, so log2(N) steps reach
        # every ancestor. The last column is a node N before the tree, the parent of its roots.
        seen = jnp.pad(jnp.eye(nodes, dtype=bool), ((0, 1), (0, 0)))
        jump = jnp.append(jnp.where(above < 0, nodes, above), jnp.asarray(nodes, above.dtype))
        for _ in range(max(nodes - 1, 0).bit_length()):
            seen = seen | seen[jump]
            jump = jump[jump]
        return seen[:-1]

    return jax.vmap(of_row)(parent)


def depth(parent: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Number of nodes above each one; 0 for a node that follows what comes before the tree.

    >>> depth(jnp.array([[-1, 0, 0, 1]])).tolist()
    [[0, 1, 1, 2]]
    """
    return jnp.sum(ancestors(parent), axis=-1, dtype=parent.dtype) - 1


def in_tree(parent: Int[Array, "B N"]) -> Bool[Array, "B N"]:
    """Says which nodes of a `Draft.parent` follow the last committed token, over whichever nodes;
    -1 cuts a branch off.

    >>> in_tree(
    ...     jnp.array([[0, -1, 1, 2]])
    ... ).tolist()  # the last one follows the one that was cut off
    [[True, False, True, False]]
    """
    return ancestors(fed(parent))[:, 1:, 0]


def last_on_path(parent: Int[Array, "B N"], count: int) -> Int[Array, "B N count"]:
    """The last `count` nodes of the path to each node, itself included, oldest first; below 0:
    before the tree.

    >>> last_on_path(jnp.array([[-1, 0, 0, 1]]), 2).tolist()
    [[[-1, 0], [0, 1], [0, 2], [1, 3]]]
    """
    above = ancestors(parent)
    level = depth(parent)
    ancestor = level[:, :, None] - jnp.arange(count - 1, -1, -1, dtype=level.dtype)[None, None, :]
    is_wanted = above[:, :, None, :] & (level[:, None, None, :] == ancestor[..., None])
    return jnp.where(ancestor >= 0, jnp.argmax(is_wanted, axis=-1).astype(level.dtype), ancestor)


def path_of(
    parent: Int[Array, "B N"], chosen: Bool[Array, "B N"]
) -> tuple[Int[Array, " B"], Int[Array, "B N"]]:
    """Finds the path from the last committed token along chosen nodes. A node has at most one
    chosen child.

    A chosen node that the path does not reach is left out. `parent` is that of `Draft`.

    Returns:
        The number of nodes on the path, and the nodes in order; entries past the number are of no
        meaning (but nodes).

    >>> path_of(
    ...     jnp.array([[0, 0, 1, 2, 4]]), jnp.array([[False, True, True, True, True]])
    ... )  # 0 -> 1 -> 3 -> 4
    (Array([3], dtype=int32), Array([[1, 3, 4, 0, 2]], dtype=int32))
    """
    return _in_order(reached(parent, chosen))


def reached(parent: Int[Array, "B N"], chosen: Bool[Array, "B N"]) -> Bool[Array, "B N"]:
    """Says which nodes of a `Draft.parent` are chosen, and all above them, too.

    >>> reached(jnp.array([[0, 0, 1, 2, 4]]), jnp.array([[False, True, True, True, True]])).tolist()
    [[False, True, False, True, True]]
    """
    above = ancestors(fed(parent))
    passed = ~above | jnp.pad(chosen, ((0, 0), (1, 0)), constant_values=True)[:, None, :]
    return (jnp.all(passed, axis=-1) & above[:, :, 0])[:, 1:]


def path_to(
    parent: Int[Array, "B N"], last: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, "B N"]]:
    """The path from the last committed token to a fed token.

    It returns what `path_of` does; to fed token 0 the path is empty.

    >>> path_to(jnp.array([[0, 0, 1, 2, 4]]), jnp.array([4]))  # fed token 4 is draft token 3
    (Array([2], dtype=int32), Array([[1, 3, 0, 2, 4]], dtype=int32))
    """
    above = jnp.take_along_axis(ancestors(fed(parent)), last[:, None, None], axis=1)[:, 0, 1:]
    return _in_order(above)


def _in_order(on_path: Bool[Array, "B N"]) -> tuple[Int[Array, " B"], Int[Array, "B N"]]:
    # Parents come before children, so the nodes of a path are in order already: a stable sort
    # brings them to the front.
    order = jnp.argsort(~on_path, axis=1, stable=True).astype(jnp.int32)
    return jnp.sum(on_path, axis=1, dtype=jnp.int32), order


def same_prefix(parent: Int[Array, "B N"], tokens: Int[Array, "B N"]) -> Int[Array, "B N+1"]:
    """Finds for each fed token the first one that is reached by the same tokens, which may be
    itself.

    Nodes outside of the tree equal no other node.

    >>> same_prefix(
    ...     jnp.array([[0, 1, 0, 3, 0]]), jnp.array([[5, 6, 5, 6, 7]])
    ... ).tolist()  # 5 6, 5 6 and 7
    [[0, 1, 2, 1, 2, 5]]
    """
    batch, nodes = parent.shape
    number = jnp.arange(nodes, dtype=jnp.int32)

    def one(node: Int[Array, ""], first: Int[Array, "B N+1"]) -> Int[Array, "B N+1"]:
        # Children of one node have one number here; nodes outside of the tree get numbers of their
        # own, below 0.
        above = jnp.where(
            parent >= 0,
            jnp.take_along_axis(first, jnp.maximum(parent, 0), axis=1),
            -1 - number[None, :],
        )
        branch, token = (jax.lax.dynamic_slice_in_dim(x, node, 1, axis=1) for x in (above, tokens))
        same = (above == branch) & (tokens == token)
        # at most itself: later nodes are not known yet
        twin = jnp.argmax(same, axis=1).astype(jnp.int32)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(first, twin + 1, node + 1, axis=1)

    start = jnp.broadcast_to(jnp.arange(nodes + 1, dtype=jnp.int32)[None, :], (batch, nodes + 1))
    return jax.lax.fori_loop(0, nodes, one, start)


class BestNodes(NamedTuple):
    """Takes some of the nodes of a larger tree."""

    tokens: Int[Array, "B N"]  # theirs
    # the parents of `Draft`; -1: there is no such node, and none after it
    parent: Int[Array, "B N"]
    # the number of each among the candidates; past the last where there is none
    chosen: Int[Array, "B N"]


def best_nodes(
    tokens: Int[Array, "B C"], scores: Float[Array, "B C"], above: Int[Array, "B C"], nodes: int
) -> BestNodes:
    """The `nodes` candidates with the best scores, in their order.

    Args:
        tokens, scores: the candidates' ids and scores; -inf: no candidate.
        above: the parent of each candidate, or -1 for the root. A parent comes before its children
            and scores at least as much, so it is chosen whenever a child is.
        nodes: the number of nodes, padding included.

    >>> best_nodes(
    ...     jnp.array([[5, 6, 7]]), jnp.array([[0.6, 0.4, 0.5]]), jnp.array([[-1, -1, 0]]), 2
    ... )[:2]
    (Array([[5, 7]], dtype=int32), Array([[0, 1]], dtype=int32))
    """
    count = tokens.shape[1]
    if nodes > count:
        # The result's shape is static: with too few candidates the rest is padding that follows
        # nothing.
        missing = ((0, 0), (0, nodes - count))
        scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
        tokens = jnp.pad(tokens, missing)
        above = jnp.pad(above, missing, constant_values=-1)
    best, chosen = jax.lax.top_k(scores, nodes)  # of equals the first
    # Sorted by number parents come before children. Candidates that do not exist sort behind all
    # others.
    chosen = jnp.sort(
        jnp.where(best > -jnp.inf, chosen, count + jnp.arange(nodes)[None, :]), axis=1
    )
    source, parent_nodes = (
        jnp.take_along_axis(x, jnp.minimum(chosen, count - 1), axis=1) for x in (tokens, above)
    )
    # A parent's new number is its column among the chosen: a child is never chosen without it.
    column = jnp.argmax(parent_nodes[:, :, None] == chosen[:, None, :], axis=-1)
    parent = jnp.where(chosen < count, jnp.where(parent_nodes < 0, 0, column + 1), -1)
    return BestNodes(source, parent.astype(jnp.int32), chosen.astype(jnp.int32))


def of_choices(choices: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A static tree written as ranks on the way to each node, as Medusa and EAGLE publish theirs.

    Args:
        choices: (1, 0) is the likeliest child of the root's second child; a node's parent must be
            there.

    Returns:
        For each node its parent as in `Draft`, and its rank among its siblings; nodes sorted by
        depth, then by rank.

    >>> of_choices([(0,), (0, 0), (1,), (0, 1)])
    ((0, 0, 1, 1), (0, 1, 0, 1))
    """
    # By level, then by rank: parents precede children, and siblings stand together.
    nodes = sorted((tuple(choice) for choice in choices), key=lambda node: (len(node), node))
    number = {(): 0} | {node: index + 1 for index, node in enumerate(nodes)}
    if len(number) != len(nodes) + 1:
        raise ValueError(f"got {list(choices)}: expected each node once, and none that is empty")
    for node in nodes:
        if node[:-1] not in number:
            raise ValueError(f"the tree has the node {node} and not its parent {node[:-1]}: add it")
    return tuple(number[node[:-1]] for node in nodes), tuple(node[-1] for node in nodes)
