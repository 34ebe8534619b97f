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

from jaxspec.base import Tree

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

    `dynamic_update_slice` clamps a start that does not fit, and so would overwrite committed entries without a word:
    whoever makes the buffer makes it large enough (`buffers.capacity`).
    """
    new = new.astype(buffer.dtype)
    zero = jnp.zeros((), length.dtype)
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_update_slice(buffer, new, (zero, zero, length[0], zero))
    return jax.vmap(lambda b, n, at: jax.lax.dynamic_update_slice(b, n, (zero, at, zero)))(buffer, new, length)


def positions(length: Int[Array, " batch"], step: int, tree: Tree | None = None) -> Int[Array, "batch step"]:
    """The position in its row of each of `step` tokens fed next.

    >>> positions(jnp.array([0, 5]), 3).tolist()
    [[0, 1, 2], [5, 6, 7]]
    """
    offset = jnp.arange(step, dtype=length.dtype) if tree is None else tree.depth.astype(length.dtype)
    return length[:, None] + offset[None, :]


def mask(
    length: Int[Array, " batch"], step: int, capacity: int, tree: Tree | None = None
) -> Bool[Array, "batch step capacity"]:
    """Which cache entries each of `step` tokens, just written at its row's `length`, may read.

    >>> mask(jnp.array([1]), 2, 4).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    """
    slot = jnp.arange(capacity, dtype=length.dtype)[None, None, :]
    start = length[:, None, None]
    if tree is None:
        return slot <= start + jnp.arange(step, dtype=length.dtype)[None, :, None]
    node = jnp.clip(slot[:, 0, :] - length[:, None], 0, step - 1)  # B S
    fed = tree.ancestors[:, node].transpose(1, 0, 2)  # B T S
    inside = jnp.logical_and(slot >= start, slot < start + step)
    return jnp.logical_or(slot < start, jnp.logical_and(inside, fed))


def rewind(cache: KVCache, length: Int[Array, " batch"], path: Int[Array, "batch keep"] | None = None) -> KVCache:
    """Forgets all but the first `length` tokens of each row; see `base.Rewind` for `path`.

    length 2 after tokens a b X Y: before [a b X Y] holding 4, after [a b X Y] holding 2: X and Y are now garbage.
    """
    if path is None:
        return cache._replace(length=length)
    start = length - jnp.asarray(path.shape[1], length.dtype)

    def compact(buffer: Layer) -> Layer:
        kept = jnp.take_along_axis(buffer, path[:, None, :, None], axis=2)
        return write(buffer, kept, start)

    return KVCache(tuple(map(compact, cache.keys)), tuple(map(compact, cache.values)), length)
