"""Slots of a running batch: rows are decoded together, leave when they are done, and are replaced.

Three programs do the work, each compiled once: `prefill` (once for each width of prompts) makes the state of some new
rows, `insert` puts them into free slots, and `run_rounds` decodes until enough rows are done. The host only learns of
rounds in blocks, and never waits between two of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Int, Key

from jaxspec import sharding
from jaxspec.core import Before, Decoder, LogProbs, Prompt, Request, State, Stats, Weights, programs, token_rows
from jaxspec.decode import inputs, log_probs
from jaxspec.decode import state as states
from jaxspec.decode.request import Prepared

Layout = tuple[Sharding, ...] | None  # where each leaf of a state lies on a mesh; None without one


class Row(NamedTuple):
    """A row to decode: what is particular to it; all else is the generation's.

    Attributes:
        number: of its prompt in the whole job. Its random key is folded from it, as `generate` does with a row's place.
        tokens: of the prompt.
        max_new_tokens: its limit.
    """

    number: int
    tokens: Sequence[int]
    max_new_tokens: int


class Rounds(NamedTuple):
    """Counts of the rounds that one call of `run_rounds` has run; those after its last are 0.

    Attributes:
        drafted, accepted, committed: of each row, as in `core.RoundInfo`.
    """

    drafted: Int[Array, "rounds slots"]
    accepted: Int[Array, "rounds slots"]
    committed: Int[Array, "rounds slots"]


class Report(NamedTuple):
    """The slots after some rounds.

    Attributes:
        tokens, length: the new tokens of each row, and how many there are.
        finish: why each row has ended, a `core.Finish`; 0 for one that has not.
        failed, stats: as in `core.State`.
        rounds: what the call has run.
        log_probs: of the new tokens, if they were asked for.
    """

    tokens: Int[Array, "slots new"]
    length: Int[Array, " slots"]
    finish: Int[Array, " slots"]
    failed: Int[Array, " slots"]
    stats: Stats
    rounds: Rounds
    log_probs: LogProbs | None


class Slots:
    """A batch of fixed shapes whose rows come and go.

    Args:
        prepared: a generation of one prompt: the models, the decoder, the limit's bucket, and the options of all rows.
        width: tokens of the widest prompt; a bucket.
        slots: rows that are decoded together.
        group: rows that are prefilled together.
        rounds: most rounds of a call of `run`.

    Raises:
        ValueError: the state of so many rows is larger than memory.
    """

    def __init__(self, prepared: Prepared, width: int, slots: int, group: int, rounds: int):
        self.width, self.slots, self.group = width, slots, group
        self._prepared, self._rounds = prepared, rounds
        self._mesh = sharding.mesh_of(prepared.weights)
        self._growth = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        self._capacity = self._row_length(width) + self._growth
        self._shapes_at = functools.cache(self._shapes_of)
        needed = inputs.size_of(self._shapes_at(width)) // group * slots
        devices = 1 if self._mesh is None else self._mesh.size
        parts = {"weights": inputs.size_of(prepared.weights), "caches and rows": needed}
        inputs.check_memory(parts, f"slots={slots} of {self._capacity} tokens", "slots", devices)
        self._ended = np.zeros(slots, bool)
        self._state: State | None = None
        self._layout: Layout = None

    def prefill(self, rows: Sequence[Row]) -> State:
        """Starts the computation of the states of some rows, at most `group`, and does not wait for it.

        The group is filled with copies of its last row, which `insert` leaves out.
        """
        rows = [*rows, *[rows[-1]] * (self.group - len(rows))]
        longest = max(len(row.tokens) for row in rows)
        width = self._width_of(longest)
        prompt = token_rows.pad([row.tokens for row in rows], width)
        number = np.array([row.number for row in rows], np.int32)
        limit = np.array([row.max_new_tokens for row in rows], np.int32)
        if self._mesh is not None:
            prompt, number, limit = sharding.place((prompt, number, limit), self.group, self._mesh)
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(self._shapes_at(self.width)))
        before = self._before(self._prepared.widths(longest)[1])
        return prefill(**self._common(width), prompt=prompt, number=number, limit=limit, before=before, shapes=shapes)

    def insert(self, new: State, slots: Sequence[int]) -> None:
        """Puts the first rows of what `prefill` made into some slots."""
        if self._state is None:
            self._state = empty(new, self.slots)
            if self._mesh is not None:  # where the compiler put the leaves, and where they shall stay
                self._layout = tuple(leaf.sharding for leaf in jax.tree.leaves(self._state))
        places = np.full(self.group, self.slots, np.int32)  # beyond the last slot: left out
        places[: len(slots)] = slots
        self._ended[list(slots)] = False
        self._state = insert(self._state, new, places, self._layout)

    def fill(self, rows: Sequence[Row]) -> State:
        """Puts rows into all slots, again and again if they are fewer, and returns the state, which is then used up."""
        for start in range(0, self.slots, self.group):
            places = range(start, min(start + self.group, self.slots))
            self.insert(self.prefill([rows[place % len(rows)] for place in places]), places)
        assert self._state is not None
        return self._state

    def run(self, wanted: int) -> Report:
        """Decodes until `wanted` slots are done, or for a number of rounds, and does not wait for it."""
        p = self._prepared
        self._state, report = run_rounds(
            p.decoder,
            p.weights,
            self._state,
            self._ended,
            np.int32(wanted),
            self._rounds,
            p.max_new_tokens,
            self._layout,
        )
        self._ended = np.zeros(self.slots, bool)
        return report

    def end(self, slots: Sequence[int]) -> None:
        """Ends rows by a decision of the host's, before the next `run`."""
        self._ended[list(slots)] = True

    def _before(self, unread: int) -> Before | None:
        """Returns what was read before, for prompts with at most so many further tokens."""
        before = self._prepared.before
        return None if before is None else dataclasses.replace(before, width=unread)

    def _row_length(self, width: int) -> int:
        """Counts what prefill puts into a row of a prompt of this width."""
        return width if self._prepared.target.lm.start_token is None else 1

    def _shapes_of(self, width: int) -> State:
        """The shapes of the state of a group of rows whose prompts have this width."""
        count = jax.ShapeDtypeStruct((self.group,), jnp.int32)
        prompt: Any = Prompt(jax.ShapeDtypeStruct((self.group, width), jnp.int32), count)  # type: ignore[arg-type]
        start = functools.partial(_start, **self._common(width), before=self._before(self._prepared.widths(1)[1]))
        return jax.eval_shape(start, prompt=prompt, number=count, limit=count)

    def _common(self, width: int) -> dict[str, Any]:
        """The arguments of `_start` that are the same for all prompts of a width."""
        p = self._prepared
        return dict(
            decoder=p.decoder,
            weights=p.weights,
            request=p.request._replace(keys=None),
            key=_key(p),
            headroom=self._capacity - self._row_length(width),
            growth=self._growth,
        )

    def _width_of(self, tokens: int) -> int:
        """The narrowest width for a prompt whose state has, or can be given, the shapes of the widest one's."""
        width = self._prepared.widths(tokens)[0]
        return width if _can_grow(self._shapes_at(width), self._shapes_at(self.width)) else self.width


def _key(prepared: Prepared) -> Key[Array, ""]:
    """The key that rows' own are folded from."""
    key = prepared.options["key"]
    return jax.random.key(0) if key is None else inputs.key_of(key)


def _laid_out(state: State, layout: Layout) -> State:
    """The state with each leaf where it has to lie, so that no program is compiled again for another place."""
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, list(map(jax.lax.with_sharding_constraint, leaves, layout)))


def _can_grow(small: State, large: State) -> bool:
    """Says whether zeros make a state of one shape one of another.

    Caches and their masks may be so extended, since entries that are not real are never read; ids and counts may not.
    """
    pairs = zip(jax.tree.leaves(small), jax.tree.leaves(large), strict=True)
    return all(
        a.shape == b.shape
        or (
            (jnp.issubdtype(a.dtype, jnp.floating) or a.dtype == jnp.bool_)
            and all(m <= n for m, n in zip(a.shape, b.shape, strict=True))
        )
        for a, b in pairs
    )


def _start(
    decoder: Decoder,
    weights: Weights,
    request: Request,
    key: Key[Array, ""],
    prompt: Prompt,
    number: Int[Array, " group"],
    limit: Int[Array, " group"],
    headroom: int,
    growth: int,
    before: Before | None,
    shapes: tuple[tuple[int, ...], ...] | None = None,
) -> State:
    """The state of new rows after prefill.

    Args:
        decoder, weights: what starts them.
        request: of one row: the options of each.
        key: that the rows' own are folded from, by their numbers.
        prompt, number, limit: of each row; `limit` is the most new tokens.
        headroom: fills the slots' capacity after a prompt of this width.
        growth: tokens of it that a row uses.
        before: what was read before; None: nothing.
        shapes: of the leaves of the state; smaller ones get zeros at their end. None: as they are.
    """
    request = token_rows.repeat_rows(request, number.shape[0])
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(number)
    state = decoder.init(weights, prompt, request._replace(keys=keys, max_new_tokens=limit), headroom, before)
    state = state._replace(log_probs=log_probs.window(state.log_probs, 0, growth))
    if shapes is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, list(map(token_rows.grow, leaves, shapes)))


prefill = programs.jit(static_argnames=("decoder", "headroom", "growth", "shapes"))(_start)


@programs.jit(static_argnames=("slots",))
def empty(new: State, slots: int) -> State:
    """A state of slots that are all free: copies of a row, ended."""
    state = token_rows.take_rows(new, jnp.zeros(slots, jnp.int32))
    return state._replace(done=jnp.ones(slots, bool))


@programs.jit(static_argnames=("layout",), donate_argnames=("state",))
def insert(state: State, new: State, slots: Int[Array, " group"], layout: Layout) -> State:
    """Puts new rows into slots; those for slots that do not exist are left out. The state given is consumed."""
    state = jax.tree.map(lambda old, rows: old.at[slots].set(rows, mode="drop"), state, new)
    return _laid_out(state, layout)


@programs.jit(static_argnames=("decoder", "rounds", "max_new_tokens", "layout"), donate_argnames=("state",))
def run_rounds(
    decoder: Decoder,
    weights: Weights,
    state: State,
    ended: Bool[Array, " slots"],
    wanted: Int[Array, ""],
    rounds: int,
    max_new_tokens: int,
    layout: Layout,
) -> tuple[State, Report]:
    """Runs rounds until `wanted` slots are done, or so many rounds. The state given is consumed.

    Args:
        decoder, weights, state: what is run.
        ended: rows to end before the first round.
        wanted: slots; those that were free before count.
        rounds, max_new_tokens: sizes of the report.
        layout: of the state.
    """
    state = state._replace(done=jnp.logical_or(state.done, ended))
    none = jnp.zeros((rounds, state.done.shape[0]), jnp.int32)

    def goes_on(carry: tuple[Int[Array, ""], State, Rounds]) -> Bool[Array, ""]:
        index, state, _ = carry
        return jnp.logical_and(index < rounds, jnp.sum(state.done, dtype=jnp.int32) < wanted)

    def one_round(carry: tuple[Int[Array, ""], State, Rounds]) -> Any:
        index, state, history = carry
        state, info = decoder.step(weights, state)
        new = Rounds(info.draft_length, info.num_accepted, info.num_committed)
        history = jax.tree.map(lambda h, i: jax.lax.dynamic_update_index_in_dim(h, i, index, 0), history, new)
        return index + 1, state, history

    start = (jnp.zeros((), jnp.int32), state, Rounds(none, none, none))
    _, state, history = jax.lax.while_loop(goes_on, one_round, start)
    tokens = token_rows.window(state.tokens, state.start, max_new_tokens)
    report = Report(
        tokens,
        state.length - state.start,
        states.finish(state),
        state.failed,
        state.stats,
        history,
        log_probs.window(state.log_probs, 0, max_new_tokens),
    )
    return _laid_out(state, layout), report
