"""Slots of a running batch: rows decode together, leave when done, and are replaced.

Three programs do the work, each compiled once: `prefill` (once for each width of prompts) makes the
state of some new rows, `insert` puts them into free slots, and `run_rounds` decodes until enough
rows are done. The host only learns of rounds in blocks, and never waits between two of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Int, Key

from jaxspec import sharding
from jaxspec.core import (
    Before,
    Decoder,
    LogProbs,
    Prompt,
    Request,
    State,
    Weights,
    programs,
    token_rows,
)
from jaxspec.decode import device_memory, log_probs
from jaxspec.decode import state as states
from jaxspec.decode.request import Prepared
from jaxspec.sampling.params import DRAFT, OPTIONS, draft_values, pattern_rows, pool_of
from jaxspec.structured.patterns import Pattern
from jaxspec.structured.tables import TooLarge, values
from jaxspec.vocab import languages

UNSET = np.float64("nan")  # of an option of the drafter: the row's drafter uses the target's value
# Values of rows without an option, in a program that reads it.
NEUTRAL = {
    entry.field: UNSET if entry.neutral is None else np.float64(entry.neutral)
    for entry in OPTIONS.values()
}
Layout = tuple[Sharding, ...] | None  # the sharding of each leaf of a state; None without a mesh


class Row(NamedTuple):
    """A row to decode, with its options; other options belong to the generation."""

    # the prompt's number in the job; the row's key is folded from it, as `generate` does with
    # places
    number: int
    tokens: Sequence[int]  # the prompt's ids
    max_new_tokens: int  # its limit
    sample: int = 0  # the number of this text among the prompt's, from 0; each has a different key
    seed: int | None = None  # makes the row's key in place of the job's key and `number`
    # the row's values, by field of `SamplingParams`, [1] or [1, vocab]; the drafter's begin with
    # "draft_"
    sampling: Mapping[str, np.ndarray] | None = None
    pattern: Pattern | None = None  # the text has to match it
    # the first ids of an encoder-decoder's row; empty: the model's default
    begin: tuple[int, ...] = ()


class KeySources(NamedTuple):
    """The sources of rows' random keys."""

    key: Int[Array, "group bits"]  # the bits of the key that each row's key is folded from
    number: Int[Array, " group"]  # the prompt's
    sample: Int[Array, " group"]  # the number of the text among the prompt's


class NewRows(NamedTuple):
    """Rows to prefill together, as arrays."""

    prompt: Prompt
    sources: KeySources
    limit: Int[Array, " group"]  # most new tokens
    # the rows' values of sampling, and the drafter's; None if they are the same
    sampling: tuple[Any, Any]


class StateSize(NamedTuple):
    """The size that the state of new rows has, so that it can be put into slots; static."""

    headroom: int  # room after a prompt of this width, up to the slots' capacity
    growth: int  # tokens of it that a row uses
    # the shapes of the slots' leaves; smaller leaves are padded with zeros
    shapes: tuple[tuple[int, ...], ...] | None = None


class Until(NamedTuple):
    """The end of a call of `run_rounds`."""

    ended: Bool[Array, " slots"]  # rows that the host ends before the first round
    finished: Int[Array, ""]  # number of slots that must be done, free ones included
    limit: Int[Array, ""]  # most rounds, at most those that a report has room for


class Rounds(NamedTuple):
    """Counts of the rounds that one call of `run_rounds` has run; those after its last are 0."""

    drafted: Int[Array, "rounds slots"]  # draft tokens; all as in `core.RoundInfo`
    accepted: Int[Array, "rounds slots"]  # accepted draft tokens
    committed: Int[Array, "rounds slots"]  # tokens


class Report(NamedTuple):
    """The slots after some rounds."""

    tokens: Int[Array, "slots new"]  # the new tokens of each row
    length: Int[Array, " slots"]  # number of new tokens
    finish: Int[Array, " slots"]  # why each row has ended, a `core.Finish`; 0 for one that has not
    failed: Int[Array, " slots"]  # the `core.Failure` of each row; 0 for one that has none
    rounds: Rounds  # the rounds that the call has run
    log_probs: LogProbs | None  # the new tokens' log probabilities, if asked for


class Slots:
    """A batch of fixed shapes whose rows come and go.

    Attributes:
        needed: bytes of the state of all slots.
    """

    def __init__(
        self,
        prepared: Prepared,  # a generation of one prompt, with the options of all rows
        width: int,  # tokens of the widest prompt; a bucket
        slots: int,  # rows that are decoded together
        group: int,  # rows that are prefilled together
        rounds: int,  # most rounds of a call of `run`
        # default values of rows; None: `prepared` has them
        sampling: Mapping[str, np.ndarray] | None = None,
    ):
        self.width = width
        self.slots = slots
        self.group = group
        self._prepared = prepared
        self._rounds = rounds
        self._mesh = sharding.mesh_of(prepared.weights)
        # In a model with languages each row has its beginning; in other models all rows have the
        # same.
        first = prepared.target.lm.limits.first_tokens
        self._begin = 0  # tokens of such a beginning
        if first and languages.languages(prepared.target.tokenizer):
            self._begin = max(len(first), 2)
        self._growth = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        self._capacity = self._row_length(width) + self._growth
        self._shapes_for = functools.cache(self._shapes_of)
        self._pool = None  # the tables of rows' patterns
        if prepared.request.sampling_params.structured is not None:
            ends = [end for end in np.asarray(prepared.request.eos)[0].tolist() if end >= 0]
            self._pool = pool_of(prepared.target, ends)
        self._key = np.asarray(jax.random.key_data(_key(prepared)))
        self._sampling = sampling
        self.needed = device_memory.size_of(self._shapes_at(width)) // group * slots
        devices = 1 if self._mesh is None else self._mesh.size
        parts = {"weights": device_memory.size_of(prepared.weights), "caches and rows": self.needed}
        device_memory.check_memory(
            parts, f"slots={slots} of {self._capacity} tokens", "slots", devices
        )
        self._ended = np.zeros(slots, bool)
        self._state: State | None = None
        self._layout: Layout = None

    def takes(self, row: Row) -> bool:
        """Makes the tables of a row's pattern; returns whether they fit."""
        if self._pool is None:
            return True
        try:
            for entry in self._entries_of([row]):
                self._pool.add(*entry)
        except TooLarge:
            return False
        return True

    def prefill(self, rows: Sequence[Row]) -> State:
        """Starts prefilling at most `group` rows.

        Copies of the last row fill up the group; `insert` leaves them out.
        """
        rows = [*rows, *[rows[-1]] * (self.group - len(rows))]
        longest = max(len(row.tokens) for row in rows)
        width = self._width_of(longest)
        prompt = self._with_begin(token_rows.pad([row.tokens for row in rows], width), rows)
        sources: Any = self._key_sources(rows)
        limit: Any = np.array([row.max_new_tokens for row in rows], np.int32)
        new: Any = NewRows(prompt, sources, limit, self._sampling_of(rows))
        if self._mesh is not None:
            new = sharding.place(new, self.group, self._mesh)
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(self._shapes_at(self.width)))
        return prefill(
            **self._common,
            new=new,
            before=self._before(self._prepared.widths(longest)[1]),
            size=self._size_at(width)._replace(shapes=shapes),
        )

    def _key_sources(self, rows: Sequence[Row]) -> KeySources:
        """Returns the sources of rows' keys: the job's key and a number, or a seed and 0."""
        impl = jax.random.key_impl(_key(self._prepared))  # a seed's key is of the job's kind
        bits = [
            self._key
            if row.seed is None
            else jax.random.key_data(jax.random.key(row.seed, impl=impl))
            for row in rows
        ]
        numbers = [row.number if row.seed is None else 0 for row in rows]
        return KeySources(
            key=jnp.asarray(np.stack(bits)),
            number=jnp.asarray(numbers, jnp.int32),
            sample=jnp.asarray([row.sample for row in rows], jnp.int32),
        )

    def insert(self, new: State, slots: Sequence[int]) -> None:
        """Puts the first rows of a prefilled group into slots."""
        if self._state is None:
            self._state = empty(new, self.slots)
            # keep the leaves where the compiler put them
            if self._mesh is not None:
                self._layout = tuple(leaf.sharding for leaf in jax.tree.leaves(self._state))
        places = np.full(self.group, self.slots, np.int32)  # beyond the last slot: left out
        places[: len(slots)] = slots
        self._ended[list(slots)] = False
        self._state = insert(self._state, new, places, self._layout)

    def fill(self, rows: Sequence[Row]) -> State:
        """Fills all slots, repeating rows if need be; the caller may donate the state."""
        for start in range(0, self.slots, self.group):
            places = range(start, min(start + self.group, self.slots))
            self.insert(self.prefill([rows[slot % len(rows)] for slot in places]), places)
        assert self._state is not None
        return self._state

    def run(self, finished: int, rounds: int | None = None) -> Report:
        """Starts decoding until `finished` slots are done or `rounds` have run."""
        p = self._prepared
        ended: Any = self._ended
        enough: Any = np.int32(finished)
        limit: Any = np.int32(self._rounds if rounds is None else rounds)
        until = Until(ended, finished=enough, limit=limit)
        self._state, report = run_rounds(
            p.decoder,
            p.weights,
            self._state,
            until,
            self._rounds,
            p.max_new_tokens,
            self._layout,
        )
        self._ended = np.zeros(self.slots, bool)
        return report

    def end(self, slots: Sequence[int]) -> None:
        """Ends rows on the host's decision, before the next `run`."""
        self._ended[list(slots)] = True

    def _before(self, unread: int) -> Before | None:
        """Returns the shared prefix, for prompts with at most `unread` further tokens."""
        before = self._prepared.before
        if before is None:
            return None
        return dataclasses.replace(before, width=unread)

    def _row_length(self, width: int) -> int:
        """Returns the length of a row after prefilling a prompt of this width."""
        return self._begin or len(self._prepared.target.lm.limits.first_tokens) or width

    def _with_begin(self, prompt: Prompt, rows: Sequence[Row]) -> Prompt:
        """Returns prompts for an encoder, with the beginnings of their rows if these differ."""
        if not self._begin:
            return prompt
        first = self._prepared.target.lm.limits.first_tokens
        beginnings = token_rows.pad([row.begin or first for row in rows], self._begin)
        return beginnings._replace(encoder=prompt)

    def _shapes_at(self, width: int) -> State:
        """Returns the shapes of a group's state, with the pattern tables' present size."""
        tables = () if self._pool is None else self._pool.tables
        return self._shapes_for(width, tuple(table.shape for table in tables))

    def _shapes_of(self, width: int, tables: tuple[tuple[int, ...], ...]) -> State:
        """Returns the shapes of a group's state for prompts of this width."""
        count = _int_shape(self.group)
        prompt = Prompt(_int_shape(self.group, width), count)
        if self._begin:
            prompt = Prompt(_int_shape(self.group, self._begin), count, prompt)
        before = self._before(self._prepared.widths(1)[1])
        start = functools.partial(_start, **self._common, before=before, size=self._size_at(width))
        key: Any = jax.ShapeDtypeStruct((self.group, *self._key.shape), self._key.dtype)
        sources = KeySources(key, count, count)
        sampling = self._sampling_of([Row(0, (0,), 1)] * self.group)
        return jax.eval_shape(start, new=NewRows(prompt, sources, count, sampling))

    def _sampling_of(self, rows: Sequence[Row]) -> tuple[Any, Any]:
        """Returns the sampling values of rows: the target's, and the drafter's or None."""
        request = self._prepared.request
        target = request.sampling_params
        draft = request.draft_sampling_params

        # One array a field, [rows] or [rows, vocab], in the dtype that the program was compiled for
        fields = dict[str, Any]()
        for name, like in target._asdict().items():
            if name in ("processors", "structured"):
                continue
            fields[name] = None if like is None else self._column(rows, name, like)
        fields["processors"] = token_rows.repeat_rows(target.processors, len(rows))
        fields["structured"] = None
        if self._pool is not None:  # on the host, since the copy in the state is donated
            fields["structured"] = values(self._pool, self._entries_of(rows))
        if draft is None:
            return type(target)(**fields), None
        draft_columns = dict[str, np.ndarray]()
        for field in NEUTRAL:
            name = field.removeprefix(DRAFT)
            if name == field or getattr(draft, name) is None:
                continue
            # Floats, whatever the dtype of the field: UNSET is not an integer.
            like = np.asarray(getattr(draft, name), np.float64)
            draft_columns[name] = self._column(rows, field, like)
        draft_fields = fields | draft_values(fields, draft_columns)
        return type(target)(**fields), type(target)(**draft_fields)

    def _column(self, rows: Sequence[Row], field: str, like: Array | np.ndarray) -> np.ndarray:
        """Returns the values of one field of sampling, [rows] or [rows, vocab].

        Rows without a value get the generation's, `like`. If the slots have default values, which
        `_values_of` knows, a field without one is off: rows get its neutral value.
        """
        default = like
        if self._sampling is not None:
            default = np.broadcast_to(NEUTRAL[field], (1, *like.shape[1:]))
        values_by_row = [
            np.asarray(row_values.get(field, default)) for row_values in self._values_of(rows)
        ]
        return np.concatenate(values_by_row).astype(like.dtype)

    def _values_of(self, rows: Sequence[Row]) -> list[Mapping[str, np.ndarray]]:
        return [(self._sampling if row.sampling is None else row.sampling) or {} for row in rows]

    def _entries_of(self, rows: Sequence[Row]) -> list[Any]:
        entries = list[Any]()
        for row, row_values in zip(rows, self._values_of(rows), strict=True):
            limit = np.array([row.max_new_tokens])
            entries += pattern_rows([row.pattern], row_values.get("bias"), limit)
        return entries

    @property
    def _common(self) -> dict[str, Any]:
        p = self._prepared
        request = p.request._replace(keys=_key(p), sampling_params=None, draft_sampling_params=None)
        return dict(decoder=p.decoder, weights=p.weights, request=request)

    def _size_at(self, width: int) -> StateSize:
        """Returns the size of the state for prompts of this width."""
        return StateSize(self._capacity - self._row_length(width), self._growth)

    def _width_of(self, tokens: int) -> int:
        """Returns the narrowest width whose state can be padded to the slots' shapes."""
        width = self._prepared.widths(tokens)[0]
        if _can_grow(self._shapes_at(width), self._shapes_at(self.width)):
            return width
        return self.width


def _key(prepared: Prepared) -> Key[Array, ""]:
    """Returns the key of a job; without one, any key, which greedy decoding never reads."""
    key = prepared.options.key
    return jax.random.key(0) if key is None else key


def _int_shape(*shape: int) -> Any:
    """Returns the shape of an array of int32, which stands for the array in `jax.eval_shape`."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _row_keys(sources: KeySources, impl: Any) -> Key[Array, " group"]:
    """Returns the rows' keys, folded with the prompt's number and a later text's number.

    A prompt's first text is the same whether a job asks for one or more. Positions, which are
    folded in next, are below 2**31.
    """
    fold = jax.vmap(jax.random.fold_in)
    keys = fold(jax.random.wrap_key_data(sources.key, impl=impl), sources.number)
    later = fold(jax.random.clone(keys), sources.sample.astype(jnp.uint32) + jnp.uint32(2**31))
    bits = jnp.where(
        (sources.sample > 0)[:, None], jax.random.key_data(later), jax.random.key_data(keys)
    )
    return jax.random.wrap_key_data(bits, impl=impl)


def _laid_out(state: State, layout: Layout) -> State:
    """Keeps each leaf on its devices, so that no program is compiled again for another layout."""
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(
        structure, list(map(jax.lax.with_sharding_constraint, leaves, layout))
    )


def _can_grow(small: State, large: State) -> bool:
    """Returns whether zeros can pad a state from one shape to another.

    Caches and their masks may be padded, since padding is never read; ids and counts may not.
    """

    def can_pad(leaf: Any, target: Any) -> bool:
        if leaf.shape == target.shape:
            return True
        is_masked = jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype == jnp.bool_
        return is_masked and all(
            size <= room for size, room in zip(leaf.shape, target.shape, strict=True)
        )

    pairs = zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True)
    return all(can_pad(leaf, target) for leaf, target in pairs)


def _start(
    decoder: Decoder,
    weights: Weights,
    request: Request,  # the options of one row, shared by all; its key only gives the kind of key
    new: NewRows,
    before: Before | None,  # the shared prefix; None without one
    size: StateSize,
) -> State:
    """Prefills new rows, and pads their state to `size.shapes`."""
    keys = _row_keys(new.sources, jax.random.key_impl(request.keys))
    request = token_rows.repeat_rows(request._replace(keys=None), new.limit.shape[0])
    sampling, draft_sampling = new.sampling
    request = request._replace(
        keys=keys,
        max_new_tokens=new.limit,
        sampling_params=sampling,
        draft_sampling_params=draft_sampling,
    )
    state = decoder.init(weights, new.prompt, request, size.headroom, before)
    state = log_probs.cut(state, size.growth)
    if size.shapes is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, list(map(token_rows.grow, leaves, size.shapes)))


prefill = programs.jit(static_argnames=("decoder", "size"))(_start)


@programs.jit(static_argnames=("slots",))
def empty(new: State, slots: int) -> State:
    """Makes a state of free slots: ended copies of a row."""
    state = token_rows.take_rows(new, jnp.zeros(slots, jnp.int32))
    return state._replace(done=jnp.ones(slots, bool))


@programs.jit(static_argnames=("layout",), donate_argnames=("state",))
def insert(state: State, new: State, slots: Int[Array, " group"], layout: Layout) -> State:
    """Puts new rows into slots, dropping indices past the last slot. Consumes the given state."""
    state = token_rows.map_rows(lambda old, rows: old.at[slots].set(rows, mode="drop"), state, new)
    return _laid_out(state, layout)


@programs.jit(
    static_argnames=("decoder", "rounds", "max_new_tokens", "layout"), donate_argnames=("state",)
)
def run_rounds(
    decoder: Decoder,
    weights: Weights,
    state: State,
    until: Until,
    rounds: int,  # with `max_new_tokens`, the size of the report
    max_new_tokens: int,
    layout: Layout,
) -> tuple[State, Report]:
    """Runs rounds until enough slots are done, or up to a limit. Consumes the given state."""
    state = state._replace(done=state.done | until.ended)
    no_counts = jnp.zeros((rounds, state.done.shape[0]), jnp.int32)

    def goes_on(carry: tuple[Int[Array, ""], State, Rounds]) -> Bool[Array, ""]:
        index, state, _ = carry
        return (index < until.limit) & (jnp.sum(state.done, dtype=jnp.int32) < until.finished)

    def one_round(carry: tuple[Int[Array, ""], State, Rounds]) -> Any:
        index, state, history = carry
        state, info = decoder.step(weights, state)
        new = Rounds(info.draft_length, info.num_accepted, info.num_committed)  # [slots] each
        history = jax.tree.map(
            lambda counts, row: jax.lax.dynamic_update_index_in_dim(counts, row, index, 0),
            history,
            new,
        )
        return index + 1, state, history

    start = (jnp.zeros((), jnp.int32), state, Rounds(no_counts, no_counts, no_counts))
    _, state, history = jax.lax.while_loop(goes_on, one_round, start)
    reported = state.memory.log_probs
    report = Report(
        tokens=token_rows.window(state.tokens, state.start, max_new_tokens),
        length=state.length - state.start,
        finish=states.finish(state),
        failed=state.failed,
        rounds=history,
        log_probs=None if reported is None else reported.window(0, max_new_tokens),
    )
    return _laid_out(state, layout), report
