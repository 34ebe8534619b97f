"""The cache of a row's tokens, layer by layer: fixed shape, one length per row, free rewind.

Each layer has a cache of its own kind, a value with a few methods: what a pass reads of it, how it goes on from there,
how the path of a tree is kept. A family of models is free to mix kinds and sizes:

    Whole       keys and values of all entries
    Window      keys and values of the last entries, for a layer that attends to a window
    Shared      nothing: the layer attends to what an earlier layer has
    Recurrent   a state, and what the last few tokens did to it

A row's length says how many of its tokens count. Entries at or past it are garbage: they are masked on read and
overwritten on write. Keys and values are separate arrays per layer (a stacked array would be copied at each step), laid
out with batch and heads leading, so that attention is a batched matrix product without a transpose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import token_rows, tree
from jaxspec.core.language_model import Room

Layer = Float[Array, "batch kv_heads capacity head_dim"]
New = Float[Array, "batch kv_heads step head_dim"]
KeysValues = tuple[Layer, Layer]


# --- a pass, and what it may read


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
            raise ValueError("a pass over a token tree got `real`: expected all of its nodes to be remembered")

    @property
    def end(self) -> Int[Array, " B"]:
        """Counts the tokens of each row after the pass."""
        return self.length + (jnp.asarray(self.step, self.length.dtype) if self.real is None else self.real)

    def positions(self) -> Int[Array, "B T"]:
        """The position of each token in its row."""
        return positions(self.length, self.step, self.parent)

    def view(self, size: int, window: int | None = None, wraps: bool = False) -> View:
        """Returns what a layer of `size` slots may read; the same object for layers of the same kind."""
        key = size, window, wraps
        if key not in self.views:
            self.views[key] = View(self, size, window, wraps)
        return self.views[key]


class View:
    """The entries that the tokens of a pass may read.

    Attributes:
        at: the pass.
        size: slots of the layer.
        window: how many positions a token attends to, its own included; None: all before it.
        held: the entry in each place; None: place i has entry i.
    """

    def __init__(self, at: Pass, size: int, window: int | None, wraps: bool):
        self.at, self.size, self.window = at, size, window
        self.held = entries(at.length, at.step, size, window) if wraps and window is not None else None

    def entries(self) -> Int[Array, "#B S"]:
        """Says which entry is in each place."""
        return jnp.arange(self.size, dtype=self.at.length.dtype)[None, :] if self.held is None else self.held

    def mask(self, first: int | Int[Array, ""] = 0, count: int | None = None) -> Bool[Array, "B T S"]:
        """Says which places may be read by `count` tokens of the pass, from token `first` on."""
        count, start, parent = self.at.step if count is None else count, self.at.length + first, self.at.parent
        visible = mask(start, count, self.size, parent, self.held)
        if self.window is None:
            return visible
        # Windows count positions: of a tree these are depths, not slots.
        query = positions(start, count, parent)
        key = key_positions(start, count, self.size, parent, self.held)
        return jnp.logical_and(visible, key[:, None, :] > query[:, :, None] - self.window)


# --- the kinds of a layer's cache


class LayerCache(Protocol):
    """The cache of one layer; every leaf has the batch first, and what is static is in the type."""

    def read(self, at: Pass, records: Sequence[Any], *new: Any) -> Any:
        """Returns what the tokens of a pass may attend to; a layer calls it with what they add.

        Args:
            at: the pass.
            records: the values that the layers before this one have read in this pass.
            new: the tokens' keys and values, [B, K, T, D] each; another kind of layer has its own.
        """
        ...

    def read_whole(self, records: Sequence[Any], *new: Any) -> Any:
        """Returns what the tokens of whole rows may attend to, with nothing before them: as `read`, without a cache."""
        ...

    def after(self, record: Any, at: Pass) -> LayerCache:
        """Returns the cache after the pass; `record` is what `read` returned."""
        ...

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> LayerCache:
        """Moves entries `start + path[:, i]` to `start + i`: see `core.Select`."""
        ...

    def fitted(self, like: Any, length: Int[Array, " B"]) -> LayerCache:
        """Returns what it holds of `length` tokens in a cache with the sizes of `like`, of the same kind."""
        ...

    def can_rewind(self, length: Int[Array, " B"], written: Int[Array, " B"] | None) -> Bool[Array, " B"]:
        """Says which rows can be rewound to `length`, of `written` tokens that they had at most."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """Keys and values of every entry: entry i lies in slot i."""

    keys: Layer
    values: Layer

    def view(self, at: Pass) -> View:
        """Returns which entries a pass may read."""
        return at.view(self.keys.shape[2])

    def read(self, at: Pass, records: Sequence[Any], k: New, v: New) -> KeysValues:
        """Writes the new entries, and returns all."""
        return write(self.keys, k, at.length), write(self.values, v, at.length)

    def read_whole(self, records: Sequence[Any], k: New, v: New) -> KeysValues:
        """Returns the new entries."""
        return k, v

    def after(self, record: KeysValues, at: Pass) -> Whole:
        """Holds what was read."""
        return Whole(*record)

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Whole:
        """Moves entries of a path."""
        source = start[:, None] + path
        return Whole(*(write(x, _take(x, source), start) for x in (self.keys, self.values)))

    def fitted(self, like: Whole, length: Int[Array, " B"]) -> Whole:
        """Adds slots; none are taken away."""
        return Whole(token_rows.grow(self.keys, like.keys.shape), token_rows.grow(self.values, like.values.shape))

    def can_rewind(self, length: Int[Array, " B"], written: Int[Array, " B"] | None) -> Bool[Array, " B"]:
        """Nothing is ever lost."""
        return length >= 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Keys and values for a layer that attends to the last `window` positions, a token's own included.

    Where rows are longer it is a ring of the last entries: entry i lies in slot i % slots. No slot says which entry it
    holds: that follows from the row's length (`entries`). It is right for all that a query may read, as long as no row
    is rewound by more tokens than the ring has slots beyond the window. For suppose that entry w was the last one
    written, and that its row is then rewound to length n. Slot w % slots is taken for entry w - slots, which lies
    before the window of position n if w - slots <= n - window, so if w - n <= slots - window.

    Attributes:
        keys, values: the entries in the slots.
        window: see above.
        wraps: whether it is a ring; otherwise entry i lies in slot i.
    """

    keys: Layer
    values: Layer
    window: int = dataclasses.field(metadata={"static": True})
    wraps: bool = dataclasses.field(metadata={"static": True})

    @property
    def slots(self) -> int:
        """Counts the entries that it holds: the window, and what is ever taken back."""
        return self.keys.shape[2]

    def view(self, at: Pass) -> View:
        """Returns which entries a pass may read."""
        return at.view(self.slots, self.window, self.wraps)

    def read(self, at: Pass, records: Sequence[Any], k: New, v: New) -> KeysValues:
        """Writes the new entries, and returns all.

        In a ring, new entries overwrite what the first of many tokens still read. So of many the new entries are put
        after the slots instead.
        """
        if self.wraps and at.step > self.slots - self.window:
            pairs = (self.keys, k), (self.values, v)
            return tuple(jnp.concatenate([old, new.astype(old.dtype)], axis=2) for old, new in pairs)  # type: ignore[return-value]
        return self._written(k, v, at)

    def read_whole(self, records: Sequence[Any], k: New, v: New) -> KeysValues:
        """Returns the new entries."""
        return k, v

    def after(self, record: KeysValues, at: Pass) -> Window:
        """Holds what was read, the last entries of it in a ring."""
        k, v = record
        if k.shape[2] != self.slots:  # the new entries stand beside the ring
            k, v = self._written(k[:, :, -at.step :], v[:, :, -at.step :], at)
        return dataclasses.replace(self, keys=k, values=v)

    def _written(self, k: New, v: New, at: Pass) -> KeysValues:
        if self.wraps:
            return write_ring(self.keys, k, at.length, at.real), write_ring(self.values, v, at.length, at.real)
        return write(self.keys, k, at.length), write(self.values, v, at.length)

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Window:
        """Moves entries of a path."""
        source = start[:, None] + path
        if not self.wraps:
            k, v = (write(x, _take(x, source), start) for x in (self.keys, self.values))
        else:
            k, v = (write_ring(x, _take(x, source % self.slots), start) for x in (self.keys, self.values))
        return dataclasses.replace(self, keys=k, values=v)

    def fitted(self, like: Window, length: Int[Array, " B"]) -> Window:
        """Moves every entry to its slot in a ring of another size; a layer of all entries is never made smaller."""
        if like.wraps:
            # Entries that a ring no longer has lie before every window to come: their slots hold garbage.
            source = jnp.maximum(_last(length, like.slots), 0) % self.slots
        elif self.wraps:
            slot = jnp.arange(like.slots, dtype=length.dtype)[None, :] % self.slots
            source = jnp.broadcast_to(slot, (length.shape[0], like.slots))
        else:
            grown = (token_rows.grow(x, y.shape) for x, y in ((self.keys, like.keys), (self.values, like.values)))
            return Window(*grown, window=self.window, wraps=False)
        if self.wraps and like.wraps and self.slots == like.slots:
            return self
        return Window(_take(self.keys, source), _take(self.values, source), self.window, like.wraps)

    def can_rewind(self, length: Int[Array, " B"], written: Int[Array, " B"] | None) -> Bool[Array, " B"]:
        """The ring still has the window before `length`."""
        if not self.wraps or written is None:
            return length >= 0
        return written - self.slots <= jnp.maximum(0, length - self.window)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """The cache of a layer without keys of its own: it attends to what an earlier layer attends to.

    Attributes:
        source: the number of that layer.
    """

    source: int = dataclasses.field(metadata={"static": True})

    def read(self, at: Pass, records: Sequence[Any]) -> Any:
        """Returns what the earlier layer has read in this pass."""
        return records[self.source]

    def read_whole(self, records: Sequence[Any]) -> Any:
        """Returns what the earlier layer has read."""
        return records[self.source]

    def after(self, record: Any, at: Pass) -> Shared:
        """Holds nothing."""
        return self

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Shared:
        """Holds nothing."""
        return self

    def fitted(self, like: Shared, length: Int[Array, " B"]) -> Shared:
        """Holds nothing."""
        return self

    def can_rewind(self, length: Int[Array, " B"], written: Int[Array, " B"] | None) -> Bool[Array, " B"]:
        """Holds nothing."""
        return length >= 0


class RecurrentRecord(NamedTuple):
    """The outputs of a recurrent layer's tokens, and its cache after them."""

    outputs: Any
    after: Recurrent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrent:
    """The state of a recurrent layer some tokens ago, and what each token since then does to it.

    A state cannot be masked or rewound. So the one that is kept is as old as a rewind may be long, and each pass begins
    by doing again what the tokens do that still count. A rewind is then an assignment of a length, as for every kind.
    It repeats the updates of the state, no projections. Padding and what was taken back leave the state bit for bit.

    Attributes:
        state: after the first `base` tokens of each row; a pytree of [B, ...], zeros where a row begins.
        log: the inputs of the layer's step for the tokens from `base` on; a pytree of [B, R, ...].
        base: how many tokens of each row the state has seen.
    """

    state: Any
    log: Any
    base: Int[Array, " B"]

    @property
    def size(self) -> int:
        """The most tokens that are taken back."""
        return jax.tree.leaves(self.log)[0].shape[1]

    def read(self, at: Pass, records: Sequence[Any], step: Callable[[Any, Any], tuple[Any, Any]], new: Any) -> Any:
        """Runs the layer's recurrence over the tokens that count and the new ones.

        Args:
            at: the pass, over a chain.
            records: not read.
            step: (state [B, ...], one token's entry [B, ...]) -> (state, output [B, ...]).
            new: the entries of the tokens, a pytree of [B, T, ...].

        Returns:
            A `RecurrentRecord`, with outputs [B, T, ...].
        """
        if at.parent is not None:
            raise ValueError("a recurrent layer has one state for each row: it reads chains, no token trees")
        size, length = self.size, at.length
        is_empty = length == 0  # such rows begin again
        base = jnp.where(is_empty, 0, self.base)
        state = jax.tree.map(lambda x: jnp.where(_like(is_empty, x), jnp.zeros_like(x), x), self.state)
        # The state moves on to `size` tokens before the end: what comes after it can be taken back.
        new_base = jnp.maximum(base, at.end - size)
        # [B, R+T]: the logged tokens, at base + i, of which those below the length count; then the new ones.
        sequence = jax.tree.map(lambda x, y: jnp.concatenate([x, y.astype(x.dtype)], axis=1), self.log, new)
        index = jnp.arange(size + at.step, dtype=length.dtype)[None, :]
        position = jnp.where(index < size, base[:, None] + index, length[:, None] + index - size)
        counts = position < jnp.where(index < size, length[:, None], at.end[:, None])

        def next_token(carry: tuple[Any, Any], fed: tuple[Any, Array, Array]) -> tuple[tuple[Any, Any], Any]:
            (state, at_base), (entry, counts, position) = carry, fed
            stepped, output = step(state, entry)
            state = jax.tree.map(lambda x, y: jnp.where(_like(counts, x), x, y), stepped, state)
            is_old = jnp.logical_and(counts, position < new_base)
            at_base = jax.tree.map(lambda x, y: jnp.where(_like(is_old, x), x, y), state, at_base)
            return (state, at_base), output

        over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (sequence, counts, position))
        (_, at_base), outputs = jax.lax.scan(next_token, (state, state), over_time)
        outputs = jax.tree.map(lambda x: jnp.moveaxis(x[size:], 0, 1), outputs)
        # Slot i of the new log has token new_base + i: a logged one below the length, a new one from there on.
        token = new_base[:, None] + index[:, :size]
        source = jnp.where(token < length[:, None], token - base[:, None], size + token - length[:, None])
        source = jnp.clip(source, 0, size + at.step - 1)
        log = jax.tree.map(lambda x: jnp.take_along_axis(x, _like(source, x), axis=1), sequence)
        return RecurrentRecord(outputs, Recurrent(at_base, log, new_base))

    def read_whole(self, records: Sequence[Any], step: Callable[[Any, Any], tuple[Any, Any]], new: Any) -> Any:
        """Runs the recurrence from the first token on."""
        over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), new)  # [T, B, ...]
        batch = jax.tree.leaves(over_time)[0].shape[1]
        state = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), self.state)
        _, outputs = jax.lax.scan(step, state, over_time)
        return RecurrentRecord(jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs), self)

    def after(self, record: RecurrentRecord, at: Pass) -> Recurrent:
        """Holds what the pass has left."""
        return record.after

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Recurrent:
        """Refuses: one state cannot follow a tree."""
        raise ValueError("a recurrent layer has one state for each row: it reads chains, no token trees")

    def fitted(self, like: Recurrent, length: Int[Array, " B"]) -> Recurrent:
        """Makes room for more tokens that may be taken back; never for fewer."""
        log = jax.tree.map(lambda x, y: token_rows.grow(x, (*x.shape[:1], *y.shape[1:])), self.log, like.log)
        return dataclasses.replace(self, log=log)

    def can_rewind(self, length: Int[Array, " B"], written: Int[Array, " B"] | None) -> Bool[Array, " B"]:
        """The state is older."""
        return self.base <= length


def _like(rows: Array, x: Array) -> Array:
    """Gives an array further axes of size 1, for those of `x`."""
    return jnp.expand_dims(rows, range(rows.ndim, x.ndim))


# --- the cache of all layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The caches of all layers, and how many tokens of each row they hold.

    Attributes:
        layers: one for each layer.
        length: tokens of each row.
        written: the most tokens that each row has had since it was empty; None where no layer is a ring.
        rewind: how many of these may be taken back (`core.Room`); None: all. Static.
    """

    layers: tuple[Any, ...]
    length: Int[Array, " B"]
    written: Int[Array, " B"] | None
    rewind: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def keys(self) -> tuple[Layer, ...]:
        """Keys of the layers that have their own."""
        return tuple(layer.keys for layer in self.layers if isinstance(layer, Whole | Window))

    @property
    def values(self) -> tuple[Layer, ...]:
        """Values of the layers that have their own."""
        return tuple(layer.values for layer in self.layers if isinstance(layer, Whole | Window))

    @property
    def capacity(self) -> int:
        """Slots of the largest layer."""
        return max(keys.shape[2] for keys in self.keys)

    @property
    def takes_trees(self) -> bool:
        """Tells whether every layer can keep the path of a tree."""
        return not any(isinstance(layer, Recurrent) for layer in self.layers)

    def _replace(self, **changes: Any) -> KVCache:
        """Returns a copy with other fields, as a NamedTuple's `_replace`."""
        return dataclasses.replace(self, **changes)

    def views(self, at: Pass) -> list[Any]:
        """Returns the `View` of each layer in a pass; None for a recurrent one."""
        views: list[Any] = []
        for layer in self.layers:
            if isinstance(layer, Shared):
                views.append(views[layer.source])
            else:
                views.append(None if isinstance(layer, Recurrent) else layer.view(at))
        return views

    def grown(self, layers: Sequence[Any], at: Pass) -> KVCache:
        """Returns the cache after a pass, with what it has made of the layers."""
        written = None if self.written is None else jnp.maximum(self.written, at.end)
        return KVCache(tuple(layers), at.end, written, self.rewind)


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


Maker = Callable[[int, Room], Any]
"""(batch, room) -> an empty `LayerCache`."""


def whole(kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> Maker:
    """Makes empty caches of a layer that attends to all before it."""

    def make(batch: int, room: Room) -> Whole:
        return Whole(*(jnp.zeros((batch, kv_heads, room.tokens, head_dim), dtype) for _ in range(2)))

    return make


def window(kv_heads: int, head_dim: int, width: int, dtype: Any = jnp.float32, *, ring: bool = True) -> Maker:
    """Makes empty caches of a layer that attends to `width` positions; rings, unless `ring` is False or rows fit."""

    def make(batch: int, room: Room) -> Window:
        slots = room.tokens if room.rewind is None or not ring else width + room.rewind
        size = min(slots, room.tokens)
        arrays = (jnp.zeros((batch, kv_heads, size, head_dim), dtype) for _ in range(2))
        return Window(*arrays, window=width, wraps=slots < room.tokens)

    return make


def shared(source: int) -> Maker:
    """Makes caches of a layer that attends to what layer `source` attends to."""
    return lambda batch, room: Shared(source)


def recurrent(state: Any, entry: Any) -> Maker:
    """Makes empty caches of a recurrent layer.

    Args:
        state: a pytree of shapes and dtypes (`jax.ShapeDtypeStruct`), of one row's state.
        entry: a pytree of shapes and dtypes, of what one token does to it.
    """

    def make(batch: int, room: Room) -> Recurrent:
        size = room.tokens if room.rewind is None else min(room.rewind, room.tokens)
        zeros = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), state)
        log = jax.tree.map(lambda x: jnp.zeros((batch, max(size, 1), *x.shape), x.dtype), entry)
        return Recurrent(zeros, log, jnp.zeros((batch,), jnp.int32))

    return make


def empty(batch: int, room: Room, layers: Sequence[Maker]) -> KVCache:
    """Makes an empty cache, of layers of any kind.

    >>> cache = empty(2, Room(64, rewind=3), [whole(1, 8), window(1, 8, width=4), shared(1), whole(2, 16)])
    >>> [keys.shape for keys in cache.keys]
    [(2, 1, 64, 8), (2, 1, 7, 8), (2, 2, 64, 16)]
    """
    caches, zeros = tuple(make(batch, room) for make in layers), jnp.zeros((batch,), jnp.int32)
    has_rings = any(isinstance(layer, Window) and layer.wraps for layer in caches)
    return KVCache(caches, zeros, zeros if has_rings else None, room.rewind)


def write(buffer: Layer, new: New, length: Int[Array, " batch"]) -> Layer:
    """Writes `step` entries into each row at its own length.

    With lengths (1, 2) and step 1: before [[a . .], [b c .]], after [[a X .], [b c Y]].

    `dynamic_update_slice` clamps a start that does not fit, and so would overwrite committed entries without an error:
    the maker of the buffer makes it large enough (`token_rows.room`). In a ring nothing is clamped.
    """
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


def write_ring(
    buffer: Layer, new: New, length: Int[Array, " batch"], real: Int[Array, " batch"] | None = None
) -> Layer:
    """Writes entries to slots length % slots, ..., and on from slot 0; of each row the first `real`, None: all.

    Length 5, three slots, step 2: before [d e c], after [Y e X]; X is entry 5.
    """
    slots, step = buffer.shape[2], new.shape[2]
    if real is not None or step > slots:
        # Each slot takes the last entry that belongs there, if that is a new one.
        end = length + (jnp.asarray(step, length.dtype) if real is None else real)
        source = _last(end, slots) - length[:, None]  # [B, slots]: the number of each slot's new entry
        fresh = _take(new, jnp.clip(source, 0, step - 1)).astype(buffer.dtype)
        return jnp.where((source >= 0)[:, None, :, None], fresh, buffer)
    first = length % slots
    if step == 1:
        return write(buffer, new, first)
    # A slice of `step` slots from `first` on, or as near the end as it fits, then one of the first slots. In the slices
    # slots get the new entry that belongs there, or keep the one that they have.
    slot = jnp.arange(step, dtype=first.dtype)[None, :]
    for start in (first, first - slots):  # the slot of the first new entry, counted from this end of the ring
        begin = jnp.clip(start, 0, slots - step)
        source = begin[:, None] + slot - start[:, None]  # [B, step]: the number of each slot's new entry
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


def _last(end: Int[Array, " B"], slots: int) -> Int[Array, "B slots"]:
    """Returns the last entry before `end` that belongs to each slot of a ring; below 0 where there is none.

    >>> _last(jnp.array([6, 1]), 4).tolist()
    [[4, 5, 2, 3], [0, -3, -2, -1]]
    """
    slot, size = jnp.arange(slots, dtype=end.dtype)[None, :], jnp.asarray(slots, end.dtype)
    return slot + size * ((end[:, None] - 1 - slot) // size)


def entries(length: Int[Array, " B"], step: int, slots: int, window: int) -> Int[Array, "B S"]:
    """Says which entry is in each place of a ring that `step` tokens read, fed at `length`.

    These are the slots, and behind them the new entries where they are more than slots beyond the window. Where no
    token has been written, it is one that is still to come, which no token attends to.

    >>> entries(jnp.array([1, 6]), 2, slots=5, window=3).tolist()
    [[0, 1, 2, 3, 4], [5, 6, 7, 3, 4]]
    >>> entries(jnp.array([6]), 3, slots=5, window=3).tolist()  # these three stand beside the ring
    [[5, 1, 2, 3, 4, 6, 7, 8]]
    """
    end = length + jnp.asarray(step, length.dtype)
    if step <= slots - window:
        return jnp.maximum(_last(end, slots), jnp.arange(slots, dtype=length.dtype)[None, :])
    old, new = _last(length, slots), jnp.arange(step, dtype=length.dtype)[None, :] + length[:, None]
    return jnp.concatenate([jnp.where(old >= 0, old, end[:, None]), new], axis=1)


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
    entries: Int[Array, "B S"] | None = None,
) -> Int[Array, "B S"]:
    """The position in its row of each cache entry: its index, but for the nodes of a tree.

    `entries`: the entry that each slot of a ring holds; None: slot i has entry i.

    >>> key_positions(jnp.array([2]), 3, 6, jnp.array([[-1, 0, 0]])).tolist()  # slots 3 and 4 are siblings
    [[0, 1, 2, 3, 3, 3]]
    """
    slot = entries
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
    entries: Int[Array, "B S"] | None = None,
) -> Bool[Array, "B T S"]:
    """Says which cache entries each of `step` tokens, just written at its row's `length`, may read.

    `entries`: as in `key_positions`.

    >>> mask(jnp.array([1]), 2, 4).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0]]]
    >>> mask(jnp.array([1]), 3, 4, jnp.array([[-1, 0, 0]])).astype(int).tolist()
    [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]]
    """
    slot = jnp.arange(capacity, dtype=length.dtype)[None, None, :] if entries is None else entries[:, None, :]
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
    """Forgets all but the first `length` tokens of each row; see `can_rewind`.

    length 2 after tokens a b X Y: before [a b X Y] holding 4, after [a b X Y] holding 2: X and Y are now garbage.
    """
    written = None if cache.written is None else jnp.where(length > 0, cache.written, 0)
    return dataclasses.replace(cache, length=length, written=written)


def select(cache: KVCache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> KVCache:
    """Moves entry `start + path[:, i]` to `start + i`; see `core.Select`.

    start 2, path (1, 3): before [a b W X Y Z], after [a b X Z Y Z]. `start` is a row's own length, so never negative
    (`dynamic_update_slice` would count a negative start from the end).
    """
    return dataclasses.replace(cache, layers=tuple(layer.select(start, path) for layer in cache.layers))


def keys_values(cache: KVCache, layer: int) -> tuple[Layer, Layer, Int[Array, "B S"]]:
    """Returns the keys and values that a layer has cached, and the positions that the next token of a row may read.

    For networks that attend to another one's cache. A layer without keys gives those that it attends to.

    Args:
        cache: the caches of all layers, after whole rounds: the nodes of a tree have no positions here.
        layer: its number, from 0.

    Returns:
        Keys and values [B, K, S, D], and the position of each slot. It is -1 for what the layer's own queries at
        position `cache.length` would not see: garbage, and what lies before a window.

    Raises:
        ValueError: the layer has a recurrent state in place of keys.

    >>> ring = empty(1, Room(64, rewind=2), [window(1, 8, width=3), shared(0)])._replace(length=jnp.array([9]))
    >>> keys_values(ring, 1)[2].tolist()  # positions 5 and 6 lie before the window of token 9
    [[-1, -1, 7, 8, -1]]
    """
    slots = cache.layers[layer]
    if isinstance(slots, Shared):
        return keys_values(cache, slots.source)
    if isinstance(slots, Recurrent):
        raise ValueError(f"layer {layer} has a recurrent state, and no keys: expected a layer with attention")
    view = slots.view(Pass(cache.length, step=0))
    entry = view.entries()  # [#B, S]
    is_read = jnp.logical_and(view.mask(count=1)[:, 0], entry < cache.length[:, None])
    return slots.keys, slots.values, jnp.where(is_read, entry, -1)


def fitted(cache: KVCache, like: KVCache) -> KVCache:
    """Moves what a cache holds to where a cache of other sizes has it.

    Args:
        cache: the cache to move.
        like: a cache of the sizes that are wanted, of which only these are read.

    >>> few, more = (empty(1, Room(9, rewind=n), [window(1, 1, width=2)]) for n in (1, 2))
    >>> at = Pass(few.length, step=5)
    >>> record = few.layers[0].read(at, (), *[jnp.arange(5.0)[None, None, :, None]] * 2)
    >>> held = few.grown([few.layers[0].after(record, at)], at)
    >>> held.keys[0][0, 0, :, 0].tolist(), fitted(held, more).keys[0][0, 0, :, 0].tolist()
    ([3.0, 4.0, 2.0], [4.0, 4.0, 2.0, 3.0])
    """
    layers = tuple(old.fitted(new, cache.length) for old, new in zip(cache.layers, like.layers, strict=True))
    written = None if like.written is None else cache.length
    if cache.written is not None and cache.rewind is not None and like.written is not None and like.rewind is not None:
        # As much has been lost as before: with more to take back, as if the row had once been that much longer.
        written = jnp.maximum(cache.written + (like.rewind - cache.rewind), cache.length)
    return KVCache(layers, cache.length, written, like.rewind)


def replays(caches: Any) -> bool:
    """Tells whether some layers do again, in each pass, what the tokens do that may be taken back: recurrent ones."""
    layers = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, Recurrent))
    return any(isinstance(layer, Recurrent) for layer in layers)


def can_rewind(caches: Any, length: int) -> bool:
    """Says whether all rows can be rewound to `length`, and read on.

    Rounds and chunks of a prompt never rewind by more than the room that they asked for; an earlier turn of a chat may.
    Length 0 always can: what is then read again is written again.

    Args:
        caches: a pytree with any number of caches in it, whose arrays have values.
        length: the rows' new length; for a cache in another vocabulary, in the target's tokens.

    >>> rings = empty(1, Room(64, rewind=3), [window(1, 8, width=4)])._replace(written=jnp.array([20]))
    >>> [can_rewind(rings, length) for length in (0, 16, 17)]
    [True, False, True]
    """

    def has_room(caches: Any, length: Int[Array, "#B"]) -> bool:
        nodes = jax.tree.leaves(caches, is_leaf=lambda node: isinstance(node, KVCache | MappedCache))
        return all(fits(node, length) for node in nodes)

    def fits(cache: Any, length: Int[Array, "#B"]) -> bool:
        if isinstance(cache, MappedCache):
            return has_room(cache.inner, cache.ends[:, length[0]])
        if not isinstance(cache, KVCache):
            return True
        return all(bool(jnp.all(layer.can_rewind(length, cache.written))) for layer in cache.layers)

    return length == 0 or has_room(caches, jnp.asarray([length]))
