"""The cache of a layer, of any kind: keys and values of all entries or of the last, those of
another layer, or a state.

    Attended    keys and values of all entries, or of the last for a layer that attends to a window
    Shared      nothing: the layer attends to what an earlier layer has
    Recurrent   a state, and what the last few tokens did to it

Another kind is a class with the methods of `LayerCache`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import token_rows
from jaxspec.core.language_model import Room
from jaxspec.core.passes import Pass, View, last_entries

LayerArray = Float[Array, "batch kv_heads capacity head_dim"]
New = Float[Array, "batch kv_heads step head_dim"]
KeysValues = tuple[LayerArray, LayerArray]
Recurrence = Callable[[Any, Any], tuple[Any, Any]]
"""A recurrence by one token: (state [B, ...], the token's entry [B, ...]) -> (state, output [B,
...]).
"""
Many = Callable[[Any, Any, Int[Array, " B"]], tuple[Any, Any]]
"""By N tokens: (state, entries [B, N, ...], count [B]) -> (outputs [B, N, ...], state after `count`
of them).
"""
FEW = 16  # tokens of a pass that are always read one by one
MOST_SINGLY = 64  # and the most that are, where any number may be taken back


class LayerCache:
    """The cache of one layer. Every leaf has the batch first; static values are in the type.

    This base class is a cache without keys, which never loses an entry.

    Attributes:
        source: the number of the layer whose keys it reads; None: the layer itself.
        wraps: whether it loses entries, as a ring does.
        keeps_state: whether it has one state for each row: it follows chains only, and rewinds by
            doing tokens again.
    """

    source: int | None = None
    wraps: bool = False
    keeps_state: ClassVar[bool] = False

    @property
    def own(self) -> KeysValues | None:
        """The keys and values that it stores; None if it stores none."""
        return None

    def view(self, pass_: Pass) -> View | None:
        """Returns which entries a pass may read; None without entries."""
        return None

    def read(self, pass_: Pass, records: Sequence[Any], *new: Any) -> Any:
        """Returns the keys and values that the tokens of a pass may attend to. A layer calls it
        with the tokens' entries.

        `records`: what the layers before this one have read in this pass. `new`: the tokens' keys
        and values, [B, K, T, D] each; another kind of layer has its own.
        """
        raise NotImplementedError

    def read_whole(self, records: Sequence[Any], *new: Any) -> Any:
        """Returns the keys and values that the tokens of whole rows may attend to: as `read`,
        without a cache.
        """
        return new

    def after(self, record: Any, pass_: Pass) -> LayerCache:
        """Returns the cache after the pass; `record` is what `read` returned."""
        return self

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> LayerCache:
        """Moves entries `start + path[:, i]` to `start + i`: see `core.Select`."""
        return self

    def fitted(self, like: Any, length: Int[Array, " B"]) -> LayerCache:
        """Returns what it holds of `length` tokens in a cache with the sizes of `like`, of the same
        kind.
        """
        return self

    def can_rewind(
        self, length: Int[Array, " B"], written: Int[Array, " B"] | None
    ) -> Bool[Array, " B"]:
        """Says which rows can be rewound to `length`, of `written` tokens that they had at most."""
        return length >= 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Attended(LayerCache):
    """Keys and values for a layer that attends to all positions up to a token's own, or to the last
    `window` of these.

    Entry i lies in slot i. Where rows are longer than a window needs, it is a ring of the last
    entries: entry i lies in slot i % slots. No slot says which entry it holds: that follows from
    the row's length (`entries`). It is right for all that a query may read, as long as no row is
    rewound by more tokens than the ring has slots beyond the window. Why: entry w was written last,
    and its row is rewound to length n. Slot w % slots still has entry w, but it is read as entry w
    - slots. No query reads that entry while it lies before the window of position n, which is while
    w - slots <= n - window, or w - n <= slots - window.

    Attributes:
        keys, values: the entries in the slots.
        window: the window, in tokens; None: all positions.
        wraps: whether it is a ring; otherwise entry i lies in slot i.
    """

    keys: LayerArray
    values: LayerArray
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    wraps: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def slots(self) -> int:
        """Counts the entries that it holds: the window, and the most tokens that a rewind takes
        back.
        """
        return self.keys.shape[2]

    @property
    def own(self) -> KeysValues:
        return self.keys, self.values

    def view(self, pass_: Pass) -> View:
        return pass_.view(self.slots, self.window, self.wraps)

    def read(self, pass_: Pass, records: Sequence[Any], k: New, v: New) -> KeysValues:
        """Writes the new entries, and returns all.

        In a ring, the last of many new entries overwrite entries that the first ones still read. So
        of many the new entries are put after the slots instead.
        """
        if self.wraps and pass_.step > self.slots - (self.window or 0):
            pairs = (self.keys, k), (self.values, v)
            return tuple(
                jnp.concatenate([old, new.astype(old.dtype)], axis=2) for old, new in pairs
            )  # type: ignore[return-value]
        return self._written(k, v, pass_)

    def after(self, record: KeysValues, pass_: Pass) -> Attended:
        """Holds the entries of all tokens read, or in a ring those of the last ones."""
        k, v = record
        if k.shape[2] != self.slots:  # the new entries stand beside the ring
            k, v = self._written(k[:, :, -pass_.step :], v[:, :, -pass_.step :], pass_)
        return dataclasses.replace(self, keys=k, values=v)

    def _written(self, k: New, v: New, pass_: Pass) -> KeysValues:
        if self.wraps:
            return write_ring(self.keys, k, pass_.length, pass_.real), write_ring(
                self.values, v, pass_.length, pass_.real
            )
        return write(self.keys, k, pass_.length), write(self.values, v, pass_.length)

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Attended:
        source = start[:, None] + path
        if not self.wraps:
            k, v = (write(x, _take(x, source), start) for x in (self.keys, self.values))
        else:
            k, v = (
                write_ring(x, _take(x, source % self.slots), start)
                for x in (self.keys, self.values)
            )
        return dataclasses.replace(self, keys=k, values=v)

    def fitted(self, like: Attended, length: Int[Array, " B"]) -> Attended:
        """Moves every entry to its slot in a ring of another size; a layer of all entries is never
        made smaller.
        """
        if like.wraps:
            # Entries that a ring no longer has lie before every window to come: their slots hold
            # garbage.
            source = jnp.maximum(last_entries(length, like.slots), 0) % self.slots
        elif self.wraps:
            slot = jnp.arange(like.slots, dtype=length.dtype)[None, :] % self.slots
            source = jnp.broadcast_to(slot, (length.shape[0], like.slots))
        else:
            grown = (
                token_rows.grow(x, y.shape)
                for x, y in ((self.keys, like.keys), (self.values, like.values))
            )
            return Attended(*grown, window=self.window)
        if self.wraps and like.wraps and self.slots == like.slots:
            return self
        return Attended(
            _take(self.keys, source), _take(self.values, source), self.window, like.wraps
        )

    def can_rewind(
        self, length: Int[Array, " B"], written: Int[Array, " B"] | None
    ) -> Bool[Array, " B"]:
        """The ring still has the window before `length`."""
        if not self.wraps or written is None:
            return length >= 0
        return written - self.slots <= jnp.maximum(0, length - (self.window or 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared(LayerCache):
    """The cache of a layer that stores no keys: it attends to an earlier layer's.

    Attributes:
        source: the number of that layer.
    """

    source: int = dataclasses.field(metadata={"static": True})

    def read(self, pass_: Pass, records: Sequence[Any]) -> Any:
        return records[self.source]

    def read_whole(self, records: Sequence[Any]) -> Any:
        return records[self.source]


class RecurrentRecord(NamedTuple):
    """The outputs of a recurrent layer's tokens, and its cache after them."""

    outputs: Any
    after: Recurrent


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrent(LayerCache):
    """The state of a recurrent layer some tokens ago, and what each token since then does to it.

    A state cannot be masked or rewound. So the stored state is as old as the longest rewind, and
    each pass begins by repeating the updates of the tokens that still count. A rewind is then an
    assignment of a length, as for every kind. It repeats the updates of the state, no projections.
    Padding and rewound tokens leave the state unchanged, bit for bit.

    Attributes:
        state: after the first `base` tokens of each row; a pytree of [B, ...], zeros where a row
            begins.
        log: the inputs of the layer's step for the tokens from `base` on; a pytree of [B, R, ...].
        base: how many tokens of each row the state has seen.
    """

    state: Any
    log: Any
    base: Int[Array, " B"]
    keeps_state: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """The most tokens that are taken back."""
        return jax.tree.leaves(self.log)[0].shape[1]

    def read(
        self,
        pass_: Pass,
        records: Sequence[Any],
        step: Recurrence,
        new: Any,
        many: Many | None = None,
    ) -> RecurrentRecord:
        """Runs the layer's recurrence over the tokens that count and the new ones.

        A row that was rewound to before its state (`can_rewind`) gets NaN.

        Args:
            pass_: the pass, over a chain.
            records: not read.
            step: the recurrence by one token.
            new: the entries of the tokens, a pytree of [B, T, ...].
            many: the same by many tokens at once, for passes wider than any that is taken back;
                None: by `step`. One form serves a round's pass and passes of one token, so that
                both give the same numbers.

        Returns:
            A `RecurrentRecord`, with outputs [B, T, ...].
        """
        if pass_.parent is not None:
            raise ValueError(
                "a recurrent layer has one state for each row: it reads chains, no token trees"
            )
        size = self.size
        length = pass_.length
        is_empty = length == 0  # such rows begin again
        base = jnp.where(is_empty, 0, self.base)
        state = token_rows.where(is_empty, jax.tree.map(jnp.zeros_like, self.state), self.state)
        lost = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.inexact) else x,
            state,
        )
        state = token_rows.where(length < base, lost, state)
        # [B, R+T]: the tokens from `base` on, those of the log below the length and the new ones;
        # then garbage.
        together = jax.tree.map(
            lambda x, y: jnp.concatenate([x, y.astype(x.dtype)], axis=1), self.log, new
        )
        index = jnp.arange(size + pass_.step, dtype=length.dtype)[None, :]
        logged = (length - base)[:, None]
        sequence = _take_tokens(together, jnp.where(index < logged, index, index - logged + size))
        # The state moves on to `size` tokens before the end: what comes after it can be taken back.
        new_base = jnp.maximum(base, pass_.end - size)
        is_wide = pass_.step > min(max(size, FEW), MOST_SINGLY)
        if is_wide and many is not None:
            run = many
        else:
            run = _one_by_one(step)
        outputs, state = run(state, sequence, new_base - base)
        outputs = _take_tokens(outputs, logged + index[:, : pass_.step])
        log = _take_tokens(sequence, (new_base - base)[:, None] + index[:, :size])
        return RecurrentRecord(outputs, Recurrent(state, log, new_base))

    def read_whole(
        self, records: Sequence[Any], step: Recurrence, new: Any, many: Many | None = None
    ) -> RecurrentRecord:
        """Runs the recurrence from the first token on."""
        batch, count = jax.tree.leaves(new)[0].shape[:2]
        state = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), self.state)
        if count > FEW and many is not None:
            run = many
        else:
            run = _one_by_one(step)
        return RecurrentRecord(run(state, new, jnp.full((batch,), count, jnp.int32))[0], self)

    def after(self, record: RecurrentRecord, pass_: Pass) -> Recurrent:
        return record.after

    def select(self, start: Int[Array, " B"], path: Int[Array, "B D"]) -> Recurrent:
        """Raises ValueError: one state cannot follow a tree."""
        raise ValueError(
            "a recurrent layer has one state for each row: it reads chains, no token trees"
        )

    def fitted(self, like: Recurrent, length: Int[Array, " B"]) -> Recurrent:
        """Makes room for more tokens that may be taken back; never for fewer."""
        log = jax.tree.map(
            lambda x, y: token_rows.grow(x, (*x.shape[:1], *y.shape[1:])), self.log, like.log
        )
        return dataclasses.replace(self, log=log)

    def can_rewind(
        self, length: Int[Array, " B"], written: Int[Array, " B"] | None
    ) -> Bool[Array, " B"]:
        """The state is older."""
        return self.base <= length


def _one_by_one(step: Recurrence) -> Many:
    """Makes the recurrence by many tokens of that by one."""

    def run(state: Any, entries: Any, count: Int[Array, " B"]) -> tuple[Any, Any]:
        def next_token(
            carry: tuple[Any, Any], fed: tuple[Array, Any]
        ) -> tuple[tuple[Any, Any], Any]:
            (state, kept), (index, entry) = carry, fed
            state, output = step(state, entry)
            return (state, token_rows.where(index < count, state, kept)), output

        over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), entries)  # [N, B, ...]
        index = jnp.arange(jax.tree.leaves(over_time)[0].shape[0], dtype=count.dtype)
        (_, kept), outputs = jax.lax.scan(next_token, (state, state), (index, over_time))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs), kept

    return run


def _take_tokens(x: Any, index: Int[Array, "B N"]) -> Any:
    """Takes tokens of each row out of a tree of [B, T, ...]; of numbers past the end the last
    one.
    """
    return jax.tree.map(lambda a: token_rows.take(a, jnp.clip(index, 0, a.shape[1] - 1)), x)


CacheMaker = Callable[[int, Room], LayerCache]
"""(batch, room) -> an empty cache."""


def whole(kv_heads: int, head_dim: int, dtype: Any = jnp.float32) -> CacheMaker:
    """Makes empty caches of a layer that attends to all before it."""
    return window(kv_heads, head_dim, None, dtype)


def window(
    kv_heads: int, head_dim: int, width: int | None, dtype: Any = jnp.float32, *, ring: bool = True
) -> CacheMaker:
    """Makes empty caches of a layer that attends to `width` positions, None: to all.

    They are rings, unless `ring` is False or rows fit.
    """

    def make(batch: int, room: Room) -> Attended:
        if room.rewind is None or width is None or not ring:
            slots = room.tokens
        else:
            slots = width + room.rewind
        size = min(slots, room.tokens)
        arrays = (jnp.zeros((batch, kv_heads, size, head_dim), dtype) for _ in range(2))
        return Attended(*arrays, window=width, wraps=slots < room.tokens)

    return make


def shared(source: int) -> CacheMaker:
    """Makes caches of a layer that attends to what layer `source` attends to."""
    return lambda batch, room: Shared(source)


def recurrent(state: Any, entry: Any) -> CacheMaker:
    """Makes empty caches of a recurrent layer.

    Args:
        state: a pytree of shapes and dtypes (`jax.ShapeDtypeStruct`), of one row's state.
        entry: a pytree of shapes and dtypes, of what one token does to it.
    """

    def make(batch: int, room: Room) -> Recurrent:
        if room.rewind is None:
            size = room.tokens
        else:
            size = min(room.rewind, room.tokens)
        zeros = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape), x.dtype), state)
        log = jax.tree.map(lambda x: jnp.zeros((batch, max(size, 1), *x.shape), x.dtype), entry)
        return Recurrent(zeros, log, jnp.zeros((batch,), jnp.int32))

    return make


def write(buffer: LayerArray, new: New, length: Int[Array, " batch"]) -> LayerArray:
    """Writes `step` entries into each row at its own length.

    With lengths (1, 2) and step 1: before [[a . .], [b c .]], after [[a X .], [b c Y]].

    `dynamic_update_slice` clamps a start that does not fit, and so would overwrite committed
    entries without an error: the maker of the buffer makes it large enough (`token_rows.room`). In
    a ring nothing is clamped.
    """
    new = new.astype(buffer.dtype)
    zero = jnp.zeros((), length.dtype)
    if buffer.shape[0] == 1:
        start = (zero, zero, length[0], zero)
        if new.shape[2] > 1:
            return jax.lax.dynamic_update_slice(buffer, new, start)
        return jax.lax.platform_dependent(
            buffer, new, start, cpu=_write_twice, default=jax.lax.dynamic_update_slice
        )
    return jax.vmap(lambda b, n, begin: jax.lax.dynamic_update_slice(b, n, (zero, begin, zero)))(
        buffer, new, length
    )


def _write_twice(buffer: LayerArray, new: New, start: tuple[Int[Array, ""], ...]) -> LayerArray:
    """Writes one entry to the only row, by a scatter of the entry and itself.

    On a CPU, XLA repeats an update of one slice for each of its readers, and copies the whole
    buffer each time. It computes a scatter of two entries once, in place. Beyond the end it writes
    the last slot, as that update does.
    """
    twice = jnp.stack([start[2], start[2]])
    return buffer.at[:, :, twice].set(jnp.concatenate([new, new], axis=2), mode="clip")


def write_ring(
    buffer: LayerArray,
    new: New,
    length: Int[Array, " batch"],
    real: Int[Array, " batch"] | None = None,
) -> LayerArray:
    """Writes entries to slots length % slots, ..., and on from slot 0; of each row the first
    `real`, None: all.

    Length 5, three slots, step 2: before [d e c], after [Y e X]; X is entry 5.
    """
    slots = buffer.shape[2]
    step = new.shape[2]
    if real is not None or step > slots:
        # Each slot takes the last entry that belongs there, if that is a new one.
        end = length + (jnp.asarray(step, length.dtype) if real is None else real)
        # [B, slots]: the number of each slot's new entry
        source = last_entries(end, slots) - length[:, None]
        fresh = _take(new, jnp.clip(source, 0, step - 1)).astype(buffer.dtype)
        return jnp.where((source >= 0)[:, None, :, None], fresh, buffer)
    first = length % slots
    if step == 1:
        return write(buffer, new, first)
    # A slice of `step` slots from `first` on, or as near the end as it fits, then one of the first
    # slots. In the slices slots get the new entry that belongs there, or keep the one that they
    # have.
    slot = jnp.arange(step, dtype=first.dtype)[None, :]
    # the slot of the first new entry, counted from this end of the ring
    for start in (first, first - slots):
        begin = jnp.clip(start, 0, slots - step)
        # [B, step]: the number of each slot's new entry
        source = begin[:, None] + slot - start[:, None]
        is_new = (source >= 0) & (source < step)
        merged = jnp.where(
            is_new[:, None, :, None],
            _take(new, jnp.clip(source, 0, step - 1)).astype(buffer.dtype),
            _slice(buffer, begin, step),
        )
        buffer = write(buffer, merged, begin)
    return buffer


def _slice(buffer: LayerArray, start: Int[Array, " batch"], step: int) -> New:
    if buffer.shape[0] == 1:
        return jax.lax.dynamic_slice_in_dim(buffer, start[0], step, axis=2)
    return jax.vmap(lambda b, begin: jax.lax.dynamic_slice_in_dim(b, begin, step, axis=1))(
        buffer, start
    )


def _take(buffer: LayerArray, slots: Int[Array, "batch step"]) -> New:
    return jnp.take_along_axis(buffer, slots[:, None, :, None], axis=2)
