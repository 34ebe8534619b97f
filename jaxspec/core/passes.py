"""A pass over some tokens of each row: their positions, and the entries of a cache that they may
read.

A cache keeps its entries in slots: entry i in slot i, or, where it is a ring, in slot i % slots.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core import tree


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """A pass over `step` tokens of each row; the same for all layers.

    Attributes:
        length: how many tokens each row had before.
        step: tokens that are fed, static.
        parent: the tree that they end; None: a chain. See `core.Extend`.
        real: how many of them each row remembers; None: all.
        views: the entries that layers of each kind may read, made once.
    """

    length: Int[Array, " B"]
    step: int
    parent: Int[Array, "B N"] | None = None
    real: Int[Array, " B"] | None = None
    views: dict[tuple[int, int | None, bool], View] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.parent is not None and self.real is not None:
            raise ValueError(
                "a pass over a token tree got `real`: expected all of its nodes to be remembered"
            )

    @property
    def end(self) -> Int[Array, " B"]:
        """Counts the tokens of each row after the pass."""
        return self.length + (
            jnp.asarray(self.step, self.length.dtype) if self.real is None else self.real
        )

    def positions(self) -> Int[Array, "B T"]:
        """The position of each token in its row."""
        return positions(self.length, self.step, self.parent)

    def view(self, size: int, window: int | None = None, wraps: bool = False) -> View:
        """Returns what a layer of `size` slots may read; the same object for layers of the same
        kind.
        """
        key = size, window, wraps
        if key not in self.views:
            self.views[key] = View(self, size, window, wraps)
        return self.views[key]


class View:
    """The entries that the tokens of a pass may read.

    Attributes:
        pass_: the pass.
        size: slots of the layer.
        window: how many positions a token attends to, including itself; None: all before it.
        held: the entry in each place; None: place i has entry i.
    """

    def __init__(self, pass_: Pass, size: int, window: int | None, wraps: bool):
        self.pass_ = pass_
        self.size = size
        self.window = window
        if wraps and window is not None:
            self.held = entries(pass_.length, pass_.step, size, window)
        else:
            self.held = None

    def entries(self) -> Int[Array, "#B S"]:
        """Says which entry is in each place."""
        if self.held is None:
            return jnp.arange(self.size, dtype=self.pass_.length.dtype)[None, :]
        return self.held

    def mask(
        self, first: int | Int[Array, ""] = 0, count: int | None = None
    ) -> Bool[Array, "B T S"]:
        """Says which places may be read by `count` tokens of the pass, from token `first` on."""
        if count is None:
            count = self.pass_.step
        start = self.pass_.length + first
        parent = self.pass_.parent
        visible = mask(start, count, self.size, parent, self.held)
        if self.window is None:
            return visible
        # Windows count positions: of a tree these are depths, not slots.
        query = positions(start, count, parent)
        key = key_positions(start, count, self.size, parent, self.held)
        return visible & (key[:, None, :] > query[:, :, None] - self.window)


def positions(
    length: Int[Array, " B"], step: int, parent: Int[Array, "B N"] | None = None
) -> Int[Array, "B T"]:
    """The position in its row of each of `step` tokens fed next; a tree's count depth, not slots.

    `length` is what the cache holds; of a tree the first N - step nodes are among that (see
    `core.Extend`).

    >>> positions(jnp.array([0, 5]), 3).tolist()
    [[0, 1, 2], [5, 6, 7]]
    >>> positions(jnp.array([5]), 3, jnp.array([[-1, 0, 0]])).tolist()
    [[5, 6, 6]]
    >>> positions(
    ...     jnp.array([6]), 2, jnp.array([[-1, 0, 0]])
    ... ).tolist()  # the first node was fed before
    [[6, 6]]
    """
    if parent is None:
        return length[:, None] + jnp.arange(step, dtype=length.dtype)[None, :]
    return (_tree_start(length, step, parent)[:, None] + tree.depth(parent).astype(length.dtype))[
        :, -step:
    ]


def key_positions(
    length: Int[Array, " B"],
    step: int,
    capacity: int,
    parent: Int[Array, "B N"] | None = None,
    entries: Int[Array, "B S"] | None = None,
) -> Int[Array, "B S"]:
    """The position in its row of each cache entry: its index, but for the nodes of a tree.

    `entries`: the entry that each slot of a ring holds; None: slot i has entry i.

    >>> key_positions(
    ...     jnp.array([2]), 3, 6, jnp.array([[-1, 0, 0]])
    ... ).tolist()  # slots 3 and 4 are siblings
    [[0, 1, 2, 3, 3, 3]]
    """
    slot = entries
    if slot is None:
        slot = jnp.broadcast_to(
            jnp.arange(capacity, dtype=length.dtype)[None, :], (length.shape[0], capacity)
        )
    if parent is None:
        return slot
    start = _tree_start(length, step, parent)[:, None]
    node = jnp.clip(slot - start, 0, parent.shape[1] - 1)
    return jnp.where(
        slot < start,
        slot,
        start + jnp.take_along_axis(tree.depth(parent).astype(length.dtype), node, 1),
    )


def mask(
    length: Int[Array, " B"],
    step: int,
    capacity: int,
    parent: Int[Array, "B N"] | None = None,
    entries: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
    """Says which cache entries each of `step` tokens, just written at its row's `length`, may read.

    `entries`: as in `key_positions`.

    >>> mask(jnp.array([1]), 2, 4).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    >>> mask(jnp.array([1]), 3, 4, jnp.array([[-1, 0, 0]])).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]]
    """
    if entries is None:
        slot = jnp.arange(capacity, dtype=length.dtype)[None, None, :]
    else:
        slot = entries[:, None, :]
    if parent is None:
        return slot <= length[:, None, None] + jnp.arange(step, dtype=length.dtype)[None, :, None]
    start = _tree_start(length, step, parent)[:, None, None]
    node = jnp.clip(slot - start, 0, parent.shape[1] - 1)  # B 1 S
    on_path = jnp.take_along_axis(tree.ancestors(parent)[:, -step:], node, axis=2)  # B T S
    inside = (slot >= start) & (slot < start + parent.shape[1])
    return (slot < start) | (inside & on_path)


def _tree_start(length: Int[Array, " B"], step: int, parent: Int[Array, "B N"]) -> Int[Array, " B"]:
    """Finds where in the cache a tree begins whose last `step` nodes are fed at `length`."""
    return length - jnp.asarray(parent.shape[1] - step, length.dtype)


def entries(length: Int[Array, " B"], step: int, slots: int, window: int) -> Int[Array, "B S"]:
    """Says which entry is in each place of a ring that `step` tokens read, fed at `length`.

    These are the slots, and after them the new entries where they are more than slots beyond the
    window. A place that was never written counts as a later token, which no token attends to.

    >>> entries(jnp.array([1, 6]), 2, slots=5, window=3).tolist()
    [[0, 1, 2, 3, 4], [5, 6, 7, 3, 4]]
    >>> entries(jnp.array([6]), 3, slots=5, window=3).tolist()  # these three stand beside the ring
    [[5, 1, 2, 3, 4, 6, 7, 8]]
    """
    end = length + jnp.asarray(step, length.dtype)
    if step <= slots - window:
        return jnp.maximum(last_entries(end, slots), jnp.arange(slots, dtype=length.dtype)[None, :])
    old = last_entries(length, slots)
    new = jnp.arange(step, dtype=length.dtype)[None, :] + length[:, None]
    return jnp.concatenate([jnp.where(old >= 0, old, end[:, None]), new], axis=1)


def last_entries(end: Int[Array, " B"], slots: int) -> Int[Array, "B slots"]:
    """Returns the last entry before `end` that belongs to each slot of a ring; below 0 for an empty
    slot.

    >>> last_entries(jnp.array([6, 1]), 4).tolist()
    [[4, 5, 2, 3], [0, -3, -2, -1]]
    """
    slot = jnp.arange(slots, dtype=end.dtype)[None, :]
    size = jnp.asarray(slots, end.dtype)
    return slot + size * ((end[:, None] - 1 - slot) // size)
