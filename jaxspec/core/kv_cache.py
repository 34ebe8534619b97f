"""The cache of a row's tokens, layer by layer: fixed shape, one length per row, free rewind.

Each layer has its kind of cache (`core.layer_caches`). Its methods define the entries that a pass
reads, the cache after the pass, and how it keeps the path of a tree. A family of models is free to
mix kinds and sizes.

A row's length says how many of its tokens count. Entries at or past it are garbage: they are masked
on read (`core.passes`) and overwritten on write. Keys and values are separate arrays per layer (a
stacked array would be copied at each step), laid out with batch and heads leading, so that
attention is a batched matrix product without a transpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core.language_model import Room
from jaxspec.core.layer_caches import (
    CacheMaker,
    LayerArray,
    LayerCache,
    Recurrent,
    recurrent,
    shared,
    whole,
    window,
)
from jaxspec.core.passes import Pass, View, key_positions, mask, positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The caches of all layers, and how many tokens of each row they hold.

    Attributes:
        layers: one for each layer.
        length: tokens of each row.
        written: the most tokens that each row has had since it was empty; None where no layer is a
            ring.
        rewind: how many of these may be taken back (`core.Room`); None: all. Static.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]
    written: Int[Array, " B"] | None
    rewind: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def keys(self) -> tuple[LayerArray, ...]:
        """Keys of all layers that store any."""
        return tuple(layer.own[0] for layer in self.layers if layer.own is not None)

    @property
    def values(self) -> tuple[LayerArray, ...]:
        """Values of all layers that store any."""
        return tuple(layer.own[1] for layer in self.layers if layer.own is not None)

    @property
    def capacity(self) -> int:
        """Slots of the largest layer."""
        return max((keys.shape[2] for keys in self.keys), default=0)

    @property
    def takes_trees(self) -> bool:
        """Tells whether every layer can keep the path of a tree."""
        return not any(layer.keeps_state for layer in self.layers)

    def _replace(self, **changes: Any) -> KVCache:
        """Returns a copy with other fields, as a NamedTuple's `_replace`."""
        return dataclasses.replace(self, **changes)

    def views(self, pass_: Pass) -> list[Any]:
        """Returns the `View` of each layer in a pass; None for one without keys."""
        views: list[Any] = []
        for layer in self.layers:
            views.append(layer.view(pass_) if layer.source is None else views[layer.source])
        return views

    def grown(self, layers: Sequence[Any], pass_: Pass) -> KVCache:
        """Returns the cache after a pass, with the layers' new caches."""
        if self.written is None:
            written = None
        else:
            written = jnp.maximum(self.written, pass_.end)
        return KVCache(tuple(layers), pass_.end, written, self.rewind)


class MappedCache(NamedTuple):
    """The cache of a model that reads some of the target's tokens as several (`vocab.remap`).

    Attributes:
        inner: the model's.
        length: the rows' lengths in the target's tokens.
        ends: how many of the model's tokens the first n of these are, for every n.
    """

    inner: Any
    length: Int[Array, " B"]
    ends: Int[Array, "B S+1"]


def empty(batch: int, room: Room, layers: Sequence[CacheMaker]) -> KVCache:
    """Makes an empty cache, of layers of any kind.

    >>> cache = empty(
    ...     2, Room(64, rewind=3), [whole(1, 8), window(1, 8, width=4), shared(1), whole(2, 16)]
    ... )
    >>> [keys.shape for keys in cache.keys]
    [(2, 1, 64, 8), (2, 1, 7, 8), (2, 2, 64, 16)]
    """
    caches = tuple(make(batch, room) for make in layers)
    zeros = jnp.zeros((batch,), jnp.int32)
    has_rings = any(layer.wraps for layer in caches)
    return KVCache(caches, zeros, zeros if has_rings else None, room.rewind)


def rewind(cache: KVCache, length: Int[Array, " B"]) -> KVCache:
    """Forgets all but the first `length` tokens of each row; see `can_rewind`.

    length 2 after tokens a b X Y: before [a b X Y] holding 4, after [a b X Y] holding 2: X and Y
    are now garbage.
    """
    if cache.written is None:
        written = None
    else:
        written = jnp.where(length > 0, cache.written, 0)
    return dataclasses.replace(cache, length=length, written=written)


def select(cache: KVCache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
    """Moves entry `start + path[:, i]` to `start + i`; see `core.Select`.

    start 2, path (1, 3): before [a b W X Y Z], after [a b X Z Y Z]. `start` is a row's own length,
    so never negative (`dynamic_update_slice` would count a negative start from the end).
    """
    return dataclasses.replace(
        cache, layers=tuple(layer.select(start, path) for layer in cache.layers)
    )


def keys_values(cache: KVCache, layer: int) -> tuple[LayerArray, LayerArray, Int[Array, "B S"]]:
    """Returns the keys and values that a layer has cached, and the positions that the next token of
    a row may read.

    For networks that attend to another one's cache. A layer without keys gives those that it
    attends to.

    Args:
        cache: the caches of all layers, after whole rounds: the nodes of a tree have no positions
            here.
        layer: its number, from 0.

    Returns:
        Keys and values [B, K, S, D], and the position of each slot. It is -1 for what the layer's
        own queries at position `cache.length` would not see: garbage, and what lies before a
        window.

    Raises:
        ValueError: the layer has a recurrent state in place of keys.

    >>> ring = empty(1, Room(64, rewind=2), [window(1, 8, width=3), shared(0)])._replace(
    ...     length=jnp.array([9])
    ... )
    >>> keys_values(ring, 1)[2].tolist()  # positions 5 and 6 lie before the window of token 9
    [[-1, -1, 7, 8, -1]]
    """
    slots = cache.layers[layer]
    pass_ = Pass(cache.length, step=0)
    if slots.source is not None:
        return keys_values(cache, slots.source)
    view = slots.view(pass_)
    if slots.own is None or view is None:
        raise ValueError(
            f"layer {layer} has a recurrent state, and no keys: expected a layer with attention"
        )
    entry = view.entries()  # [#B, S]
    is_read = view.mask(count=1)[:, 0] & (entry < cache.length[:, None])
    return *slots.own, jnp.where(is_read, entry, -1)


def fitted(cache: KVCache, like: KVCache) -> KVCache:
    """Moves a cache's entries to their places in a cache of other sizes, from which only the sizes
    are read.

    >>> few, more = (empty(1, Room(9, rewind=n), [window(1, 1, width=2)]) for n in (1, 2))
    >>> at = Pass(few.length, step=5)
    >>> record = few.layers[0].read(at, (), *[jnp.arange(5.0)[None, None, :, None]] * 2)
    >>> held = few.grown([few.layers[0].after(record, at)], at)
    >>> held.keys[0][0, 0, :, 0].tolist(), fitted(held, more).keys[0][0, 0, :, 0].tolist()
    ([3.0, 4.0, 2.0], [4.0, 4.0, 2.0, 3.0])
    """
    layers = tuple(
        old.fitted(new, cache.length) for old, new in zip(cache.layers, like.layers, strict=True)
    )
    written = None if like.written is None else cache.length
    if (
        cache.written is not None
        and cache.rewind is not None
        and like.written is not None
        and like.rewind is not None
    ):
        # As much has been lost as before: with more to take back, as if the row had once been that
        # much longer.
        written = jnp.maximum(cache.written + (like.rewind - cache.rewind), cache.length)
    return KVCache(layers, cache.length, written, like.rewind)


def states(caches: Any) -> list[Any]:
    """Returns the states of recurrent layers. Each pass repeats there the updates of all tokens
    that may still be taken back.

    >>> vector = jax.ShapeDtypeStruct((3,), jnp.float32)
    >>> [x.shape for x in states(empty(2, Room(9), [whole(1, 8), recurrent(vector, vector)]))]
    [(2, 3)]
    """
    layers = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, LayerCache))
    return [layer.state for layer in layers if isinstance(layer, Recurrent)]


def can_rewind(caches: Any, length: int) -> bool:
    """Says whether all rows can be rewound to `length`, and read on.

    Rounds and chunks of a prompt never rewind by more than the room that they asked for; an earlier
    turn of a chat may. Length 0 always can, because every entry is written again before it is read.

    Args:
        caches: a pytree with any number of caches in it, whose arrays have values.
        length: the rows' new length; for a cache in another vocabulary, in the target's tokens.

    >>> rings = empty(1, Room(64, rewind=3), [window(1, 8, width=4)])._replace(
    ...     written=jnp.array([20])
    ... )
    >>> [can_rewind(rings, length) for length in (0, 16, 17)]
    [True, False, True]
    """

    def has_room(caches: Any, length: Int[Array, "#B"]) -> bool:
        nodes = jax.tree.leaves(
            caches, is_leaf=lambda node: isinstance(node, KVCache | MappedCache)
        )
        return all(fits(node, length) for node in nodes)

    def fits(cache: Any, length: Int[Array, "#B"]) -> bool:
        if isinstance(cache, MappedCache):
            return has_room(cache.inner, cache.ends[:, length[0]])
        if not isinstance(cache, KVCache):
            return True
        return all(bool(jnp.all(layer.can_rewind(length, cache.written))) for layer in cache.layers)

    return length == 0 or has_room(caches, jnp.asarray([length]))
