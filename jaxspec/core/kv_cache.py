"""The functional key-value cache: fixed shape, one length per row, free rewind.

Entries at or past a row's length are garbage: they are masked on read and overwritten on write. Keys and values are
separate arrays per layer (a stacked array would be copied at each step), laid out with batch and heads leading so
that attention is a batched matrix product without a transpose.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import tree

Layer = Float[Array, "batch kv_heads capacity head_dim"]


class KVCache(NamedTuple):
    """Keys and values of every layer, and how many tokens of each row they hold."""

    keys: tuple[Layer, ...]
    values: tuple[Layer, ...]
    length: Int[Array, " batch"]


def empty(
    batch: int, layers: int, kv_heads: int, capacity: int, head_dim: int, dtype: jnp.dtype = jnp.float32
) -> KVCache:
    """An empty cache with room for `capacity` tokens a row.

    >>> empty(batch=2, layers=1, kv_heads=1, capacity=4, head_dim=8).keys[0].shape
    (2, 1, 4, 8)
    """
    shape = (batch, kv_heads, capacity, head_dim)
    zeros = tuple(jnp.zeros(shape, dtype) for _ in range(layers))
    return KVCache(zeros, tuple(jnp.zeros_like(z) for z in zeros), jnp.zeros((batch,), jnp.int32))


def write(buffer: Layer, new: Float[Array, "batch kv_heads step head_dim"], length: Int[Array, " batch"]) -> Layer:
    """Writes `step` entries into each row at its own length.

    With lengths (1, 2) and step 1: before [[a . .], [b c .]], after [[a X .], [b c Y]].

    `dynamic_update_slice` clamps a start that does not fit, and so would overwrite committed entries without an error:
    the maker of the buffer makes it large enough (`token_rows.headroom`).
    """
    new = new.astype(buffer.dtype)
    zero = jnp.zeros((), length.dtype)
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice(buffer, new, (zero, zero, length[0], zero))
    return jax.vmap(lambda b, n, at: jax.lax.dynamic_update_slice(b, n, (zero, at, zero)))(buffer, new, length)


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
    length: Int[Array, " B"], step: int, capacity: int, parent: Int[Array, "B N"] | None = None
) -> Int[Array, "B S"]:
    """The position in its row of each cache entry: its index, but for the nodes of a tree.

    >>> key_positions(jnp.array([2]), 3, 6, jnp.array([[-1, 0, 0]])).tolist()  # slots 3 and 4 are siblings
    [[0, 1, 2, 3, 3, 3]]
    """
    slot = jnp.broadcast_to(jnp.arange(capacity, dtype=length.dtype)[None, :], (length.shape[0], capacity))
    if parent is None:
        return slot
    start = _tree_start(length, step, parent)[:, None]
    node = jnp.clip(slot - start, 0, parent.shape[1] - 1)
    return jnp.where(slot < start, slot, start + jnp.take_along_axis(tree.depth(parent).astype(length.dtype), node, 1))


def mask(
    length: Int[Array, " B"], step: int, capacity: int, parent: Int[Array, "B N"] | None = None
) -> Bool[Array, "B T S"]:
    """Says which cache entries each of `step` tokens, just written at its row's `length`, may read.

    >>> mask(jnp.array([1]), 2, 4).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    >>> mask(jnp.array([1]), 3, 4, jnp.array([[-1, 0, 0]])).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]]
    """
    slot = jnp.arange(capacity, dtype=length.dtype)[None, None, :]
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
    """Forgets all but the first `length` tokens of each row.

    length 2 after tokens a b X Y: before [a b X Y] holding 4, after [a b X Y] holding 2: X and Y are now garbage.
    """
    return cache._replace(length=length)


def select(cache: KVCache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
    """Moves entry `start + path[:, i]` to `start + i`; see `core.Select`.

    start 2, path (1, 3): before [a b W X Y Z], after [a b X Z Y Z]. `start` is a row's own length, so never negative
    (`dynamic_update_slice` would count a negative start from the end).
    """
    source = start[:, None] + path

    def compact(buffer: Layer) -> Layer:
        return write(buffer, jnp.take_along_axis(buffer, source[:, None, :, None], axis=2), start)

    return cache._replace(keys=tuple(map(compact, cache.keys)), values=tuple(map(compact, cache.values)))
