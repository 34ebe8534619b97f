"""The functional key-value cache: fixed shape, one length per row, free rewind.

Entries at or past a row's length are garbage: they are masked on read and overwritten on write. Keys and values are
separate arrays per layer (a stacked array would be copied at each step), laid out with batch and heads leading so
that attention is a batched matrix product without a transpose.

A layer that attends to a window keeps a ring of its last entries, where that is smaller than the capacity: entry i lies
in slot i % slots. No slot says which entry it holds: that follows from the row's length (`entries`), and is right for
all that a query may read, as long as no row is rewound by more tokens than the ring has slots beyond the window. For
suppose that entry w was the last one written, and that its row is then rewound to length n. Slot w % slots is taken for
entry w - slots, which lies before the window of position n if w - slots <= n - window, so if w - n <= slots - window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import tree

Layer = Float[Array, "batch kv_heads capacity head_dim"]
New = Float[Array, "batch kv_heads step head_dim"]
# Slots beyond the window, so tokens by which a ring can be rewound: a chunk of a prompt that was padding
# (`chunks.LONGEST`), or the nodes of a draft, and the few tokens that drafters read again.
SLACK = 640


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Ring:
    """The rings of a cache: its layers of exactly `slots` slots. Static: a pytree without leaves.

    Attributes:
        window: how many positions these layers attend to, a token's own included.
        slots: of each, more than `window`.
    """

    window: int
    slots: int

    @property
    def slack(self) -> int:
        """Most tokens by which a row can be rewound; more than so many that are fed at once are read beside the ring.

        >>> Ring(window=4, slots=7).slack
        3
        """
        return self.slots - self.window


class KVCache(NamedTuple):
    """Keys and values of every layer, and how many tokens of each row they hold.

    Attributes:
        keys, values: of each layer; `capacity` is the number of slots of this layer.
        length: tokens of each row.
        ring: says which layers are rings; None: none is.
        written: where there may be rings, the most tokens that each row has had since it was empty; otherwise None.
    """

    keys: tuple[Layer, ...]
    values: tuple[Layer, ...]
    length: Int[Array, " batch"]
    ring: Ring | None = None
    written: Int[Array, " batch"] | None = None

    @property
    def capacity(self) -> int:
        """Slots of the largest layer."""
        return max(keys.shape[2] for keys in self.keys)

    @property
    def has_rings(self) -> bool:
        """Tells whether any layer is a ring: where the capacity is less than `ring.slots`, none is."""
        return any(is_ring(keys, self.ring) for keys in self.keys)

    def grown(self, keys: tuple[Layer, ...], values: tuple[Layer, ...], step: int) -> KVCache:
        """Returns the cache after `step` tokens were written to its layers."""
        length = self.length + jnp.asarray(step, self.length.dtype)
        written = None if self.written is None else jnp.maximum(self.written, length)
        return KVCache(keys, values, length, self.ring, written)


class MappedCache(NamedTuple):
    """The cache of a model that reads some of the target's tokens as several (`vocab.remap`).

    Attributes:
        inner: the model's.
        length: of each row, in the target's tokens.
        ends: how many of the model's tokens the first n of these are, for every n.
    """

    inner: Any
    length: Int[Array, " B"]
    ends: Int[Array, "B S+1"]


def empty(
    batch: int,
    layers: int,
    kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: jnp.dtype = jnp.float32,
    ring: Ring | None = None,
    windowed: Collection[int] = (),
) -> KVCache:
    """An empty cache with room for `capacity` tokens a row; of the `windowed` layers rings, where those are smaller.

    >>> empty(batch=2, layers=1, kv_heads=1, capacity=4, head_dim=8).keys[0].shape
    (2, 1, 4, 8)
    >>> cache = empty(1, layers=2, kv_heads=1, capacity=64, head_dim=8, ring=Ring(window=4, slots=7), windowed={0})
    >>> [keys.shape[2] for keys in cache.keys], cache.has_rings
    ([7, 64], True)
    """

    if ring is not None and capacity == ring.slots:  # which would make every layer a ring
        capacity += 1

    def zeros(layer: int) -> Layer:
        size = capacity if ring is None or layer not in windowed else min(capacity, ring.slots)
        return jnp.zeros((batch, kv_heads, size, head_dim), dtype)

    keys = tuple(zeros(layer) for layer in range(layers))
    nothing = jnp.zeros((batch,), jnp.int32)
    return KVCache(keys, tuple(jnp.zeros_like(k) for k in keys), nothing, ring, None if ring is None else nothing)


def is_ring(buffer: Layer, ring: Ring | None) -> bool:
    """Tells whether a layer is a ring: by its size, which no other layer has."""
    return ring is not None and buffer.shape[2] == ring.slots


def write(buffer: Layer, new: New, length: Int[Array, " batch"], ring: Ring | None = None) -> Layer:
    """Writes `step` entries into each row at its own length.

    With lengths (1, 2) and step 1: before [[a . .], [b c .]], after [[a X .], [b c Y]].

    `dynamic_update_slice` clamps a start that does not fit, and so would overwrite committed entries without an error:
    the maker of the buffer makes it large enough (`token_rows.headroom`). In a ring nothing is clamped.
    """
    if is_ring(buffer, ring):
        return _write_to_ring(buffer, new, length)
    new, zero = new.astype(buffer.dtype), jnp.zeros((), length.dtype)
    if buffer.shape[0] == 1:
        start = (zero, zero, length[0], zero)
        if new.shape[2] > 1:
            return jax.lax.dynamic_update_slice(buffer, new, start)
        return jax.lax.platform_dependent(buffer, new, start, cpu=_write_twice, default=jax.lax.dynamic_update_slice)
    return jax.vmap(lambda b, n, at: jax.lax.dynamic_update_slice(b, n, (zero, at, zero)))(buffer, new, length)


def _write_twice(buffer: Layer, new: New, start: tuple[Int[Array, ""], ...]) -> Layer:
    """Writes one entry to the only row, by a scatter of the entry and itself.

    On a CPU, XLA computes an update of one slice again for each of its readers, for which it copies the whole buffer; a
    scatter of two entries it computes once, in place. Beyond the end it writes the last slot, as that update does.
    """
    twice = jnp.stack([start[2], start[2]])
    return buffer.at[:, :, twice].set(jnp.concatenate([new, new], axis=2), mode="clip")


def _write_to_ring(buffer: Layer, new: New, length: Int[Array, " batch"]) -> Layer:
    """Writes entries to slots length % slots, ..., and on from slot 0.

    Length 5, three slots, step 2: before [d e c], after [Y e X]; X is entry 5.
    """
    slots, step = buffer.shape[2], new.shape[2]
    if step > slots:  # only the last ones stay
        new, length, step = new[:, :, step - slots :], length + jnp.asarray(step - slots, length.dtype), slots
    first = length % slots
    if step == 1:
        return write(buffer, new, first)
    # A slice of `step` slots from `first` on, or as near the end as it fits, then one of the first slots. In the slices
    # slots get the new entry that belongs there, or keep the one that they have.
    place = jnp.arange(step, dtype=first.dtype)[None, :]
    for start in (first, first - slots):  # the slot of the first new entry, counted from this end of the ring
        begin = jnp.clip(start, 0, slots - step)
        source = begin[:, None] + place - start[:, None]  # [B, step]: the number of each slot's new entry
        is_new = jnp.logical_and(source >= 0, source < step)
        merged = jnp.where(
            is_new[:, None, :, None],
            _take(new, jnp.clip(source, 0, step - 1)).astype(buffer.dtype),
            _slice(buffer, begin, step),
        )
        buffer = write(buffer, merged, begin)
    return buffer


def _slice(buffer: Layer, start: Int[Array, " batch"], step: int) -> New:
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, start[0], step, axis=2)
    return jax.vmap(lambda b, at: jax.lax.dynamic_slice_in_dim(b, at, step, axis=1))(buffer, start)


def _take(buffer: Layer, slots: Int[Array, "batch step"]) -> New:
    return jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2)


def readable(buffer: Layer, new: New, length: Int[Array, " batch"], ring: Ring | None = None) -> Layer:
    """Returns all that tokens fed at `length` may attend to: the layer with the new entries written to it.

    Of a ring, new entries overwrite what the first of many tokens still read. So more than `Ring.slack` are put after
    the slots instead.
    """
    if ring is not None and is_ring(buffer, ring) and new.shape[2] > ring.slack:
        return jnp.concatenate([buffer, new.astype(buffer.dtype)], axis=2)
    return write(buffer, new, length, ring)


def entries(length: Int[Array, " B"], step: int, ring: Ring) -> Int[Array, "B S"]:
    """Says which entry is in each place of a ring that is `readable` to `step` tokens fed at `length`.

    Where no token has been written, it is one that is still to come, which no token attends to.

    >>> entries(jnp.array([1, 6]), 2, Ring(window=3, slots=5)).tolist()
    [[0, 1, 2, 3, 4], [5, 6, 7, 3, 4]]
    >>> entries(jnp.array([6]), 3, Ring(window=3, slots=5)).tolist()  # these three stand beside the ring
    [[5, 1, 2, 3, 4, 6, 7, 8]]
    """
    slot, size = jnp.arange(ring.slots, dtype=length.dtype)[None, :], jnp.asarray(ring.slots, length.dtype)

    def last(end: Int[Array, " B"]) -> Int[Array, "B S"]:  # the last entry before `end` that belongs there
        return slot + size * (jnp.maximum(end[:, None] - 1 - slot, 0) // size)

    new = jnp.arange(step, dtype=length.dtype)[None, :] + length[:, None]
    end = length + jnp.asarray(step, length.dtype)
    if step <= ring.slack:
        return last(end)
    old = last(length)
    return jnp.concatenate([jnp.where(old < length[:, None], old, end[:, None]), new], axis=1)


def positions(length: Int[Array, " B"], step: int, parent: Int[Array, "B N"] | None = None) -> Int[Array, "B T"]:
    """The position in its row of each of `step` tokens fed next; a tree's count depth, not slots.

    `length` is what the cache holds; of a tree the first N - step nodes are among that (see `core.Extend`).

    >>> positions(jnp.array([0, 5]), 3).tolist()
    [[0, 1, 2], [5, 6, 7]]
    >>> positions(jnp.array([5]), 3, jnp.array([[-1, 0, 0]])).tolist()
    [[5, 6, 6]]
    >>> positions(jnp.array([6]), 2, jnp.array([[-1, 0, 0]])).tolist()  # the first node was fed before
    [[6, 6]]
    """
    if parent is None:
        return length[:, None] + jnp.arange(step, dtype=length.dtype)[None, :]
    return (_tree_start(length, step, parent)[:, None] + tree.depth(parent).astype(length.dtype))[:, -step:]


def key_positions(
    length: Int[Array, " B"],
    step: int,
    capacity: int,
    parent: Int[Array, "B N"] | None = None,
    held: Int[Array, "B S"] | None = None,
) -> Int[Array, "B S"]:
    """The position in its row of each cache entry: its index, but for the nodes of a tree.

    `held`: which entry each slot holds, of a ring (`entries`); None: slot i has entry i.

    >>> key_positions(jnp.array([2]), 3, 6, jnp.array([[-1, 0, 0]])).tolist()  # slots 3 and 4 are siblings
    [[0, 1, 2, 3, 3, 3]]
    """
    slot = held
    if slot is None:
        slot = jnp.broadcast_to(jnp.arange(capacity, dtype=length.dtype)[None, :], (length.shape[0], capacity))
    if parent is None:
        return slot
    start = _tree_start(length, step, parent)[:, None]
    node = jnp.clip(slot - start, 0, parent.shape[1] - 1)
    return jnp.where(slot < start, slot, start + jnp.take_along_axis(tree.depth(parent).astype(length.dtype), node, 1))


def mask(
    length: Int[Array, " B"],
    step: int,
    capacity: int,
    parent: Int[Array, "B N"] | None = None,
    held: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
    """Says which cache entries each of `step` tokens, just written at its row's `length`, may read.

    `held`: as in `key_positions`.

    >>> mask(jnp.array([1]), 2, 4).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    >>> mask(jnp.array([1]), 3, 4, jnp.array([[-1, 0, 0]])).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]]
    """
    slot = jnp.arange(capacity, dtype=length.dtype)[None, None, :] if held is None else held[:, None, :]
    if parent is None:
        return slot <= length[:, None, None] + jnp.arange(step, dtype=length.dtype)[None, :, None]
    start = _tree_start(length, step, parent)[:, None, None]
    node = jnp.clip(slot - start, 0, parent.shape[1] - 1)  # B 1 S
    on_path = jnp.take_along_axis(tree.ancestors(parent)[:, -step:], node, axis=2)  # B T S
    inside = jnp.logical_and(slot >= start, slot < start + parent.shape[1])
    return jnp.logical_or(slot < start, jnp.logical_and(inside, on_path))


def _tree_start(length: Int[Array, " B"], step: int, parent: Int[Array, "B N"]) -> Int[Array, " B"]:
    """Finds where in the cache a tree begins whose last `step` nodes are fed at `length`."""
    return length - jnp.asarray(parent.shape[1] - step, length.dtype)


def rewind(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    """Forgets all but the first `length` tokens of each row; with rings see `can_rewind`.

    length 2 after tokens a b X Y: before [a b X Y] holding 4, after [a b X Y] holding 2: X and Y are now garbage.
    """
    written = cache.written
    return cache._replace(length=length, written=None if written is None else jnp.where(length > 0, written, 0))


def select(cache: KVCache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
    """Moves entry `start + path[:, i]` to `start + i`; see `core.Select`.

    start 2, path (1, 3): before [a b W X Y Z], after [a b X Z Y Z]. `start` is a row's own length, so never negative
    (`dynamic_update_slice` would count a negative start from the end).
    """
    source = start[:, None] + path

    def compact(buffer: Layer) -> Layer:
        slot = source % buffer.shape[2] if is_ring(buffer, cache.ring) else source
        return write(buffer, _take(buffer, slot), start, cache.ring)

    return cache._replace(keys=tuple(map(compact, cache.keys)), values=tuple(map(compact, cache.values)))


def can_rewind(caches: Any, length: int) -> bool:
    """Says whether all rows can be rewound to `length`, and read on.

    Rounds and chunks of a prompt never rewind by more than rings allow; an earlier turn of a chat may. Length 0 always
    can: what is then read again is written again.

    Args:
        caches: a pytree with any number of caches in it, whose arrays have values.
        length: of each row; where a cache is of another vocabulary, in the target's tokens.

    >>> rings = empty(1, layers=1, kv_heads=1, capacity=64, head_dim=8, ring=Ring(window=4, slots=7), windowed={0})
    >>> rings = rings._replace(written=jnp.array([20]))
    >>> [can_rewind(rings, length) for length in (0, 16, 17)]
    [True, False, True]
    """

    def fits(cache: Any, length: int | Int[Array, " B"]) -> bool:
        if isinstance(cache, MappedCache):
            return has_room(cache.inner, cache.ends[:, length])
        if not isinstance(cache, KVCache) or cache.ring is None or cache.written is None or not cache.has_rings:
            return True
        return bool(jnp.all(cache.written - cache.ring.slots <= jnp.maximum(0, length - cache.ring.window)))

    def has_room(caches: Any, length: int | Int[Array, " B"]) -> bool:
        nodes = jax.tree.leaves(caches, is_leaf=lambda node: isinstance(node, KVCache | MappedCache))
        return all(fits(cache, length) for cache in nodes)

    return length == 0 or has_room(caches, length)


def check_nodes(caches: Any, nodes: int) -> None:
    """Refuses rounds that would rewind rows by more than rings allow.

    Raises:
        ValueError: a draft has more nodes than some ring has slots beyond its window.

    >>> rings = empty(1, layers=1, kv_heads=1, capacity=64, head_dim=8, ring=Ring(window=4, slots=7), windowed={0})
    >>> check_nodes(rings, nodes=4)
    Traceback (most recent call last):
    ValueError: a draft has 4 tokens: expected at most 3, which layers with a window take back
    """
    most = min((ring.slack for ring in _rings(caches)), default=nodes)
    if nodes > most:
        raise ValueError(f"a draft has {nodes} tokens: expected at most {most}, which layers with a window take back")


def _rings(caches: Any) -> list[Ring]:
    nodes = jax.tree.leaves(caches, is_leaf=lambda node: isinstance(node, KVCache))
    return [node.ring for node in nodes if isinstance(node, KVCache) and node.ring is not None and node.has_rings]


def without_rings(caches: Any, capacity: int) -> Any:
    """Makes every layer hold all entries from now on, for searches that come back to old ones: trees of any size.

    Args:
        caches: a pytree with any number of caches in it.
        capacity: how many entries they are to have room for, where all layers of a cache are rings; otherwise they get
            as much as the others have.

    >>> ring = Ring(window=2, slots=3)
    >>> cache = empty(1, layers=1, kv_heads=1, capacity=9, head_dim=1, ring=ring, windowed={0})
    >>> keys = write(cache.keys[0], jnp.arange(5.0)[None, None, :, None], cache.length, ring)
    >>> keys[0, 0, :, 0].tolist()
    [3.0, 4.0, 2.0]
    >>> without_rings(cache._replace(keys=(keys,)), capacity=6).keys[0][0, 0, :, 0].tolist()
    [3.0, 4.0, 2.0, 3.0, 4.0, 2.0]
    """

    def unroll(cache: Any) -> Any:
        if not isinstance(cache, KVCache) or not cache.has_rings:
            return cache
        size = max((k.shape[2] for k in cache.keys if not is_ring(k, cache.ring)), default=capacity)

        def full(buffer: Layer) -> Layer:  # entries that the ring no longer has lie before every window to come
            slots = jnp.arange(size, dtype=jnp.int32) % buffer.shape[2]
            return buffer[:, :, slots] if is_ring(buffer, cache.ring) else buffer

        return KVCache(tuple(map(full, cache.keys)), tuple(map(full, cache.values)), cache.length)

    return jax.tree.map(unroll, caches, is_leaf=lambda node: isinstance(node, KVCache))
