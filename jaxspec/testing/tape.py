"""Scripted draws: while a decoder is traced, the functions of `noise` play a script, and record the
draws.

A draw is known by its row, its key, and the number of earlier draws with that key. So its loop or
branch does not matter, nor other rows that make a loop run longer. The values are kept in mutable
arrays (`jax.new_ref`), which jax threads through scan, while_loop, fori_loop, cond and switch by
itself.

Axis letters as in `jaxspec.core`. E is the most draws that a row can record, and the size of a
script. n are further axes of keys, for several draws of each row.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxspec.core import Keys, noise

# a uniform is one of the multiples of 1 / UNIFORMS below 1, as `jax.random.uniform`'s are
UNIFORMS = 1 << 23
CALL = 512  # between the numbers of draws of two calls with one key
MANY = 1 << 20  # completions that nobody counts
ROUNDING = 1e-3  # of noise that is computed twice in one program
_PLAYING = jax.make_user_context(None)  # part of the key of every cache of traced functions


class Script(NamedTuple):
    """The draws that each row is to make."""

    # these two: the draw that an entry fixes (`Record`). Number -1: the entry is empty.
    key: UInt32[Array, "B E 2"]
    number: Int[Array, "B E"]
    # these two: a token; or, for a uniform, the values from `low` to `high - 1`, in units of 1 /
    # UNIFORMS
    low: Int[Array, "B E"]
    high: Int[Array, "B E"]
    # the completion to play, where draws are left open: those without an entry, and uniforms with
    # more than one value
    turn: Int[Array, " B"]
    # turns 0, 1, ... go through all combinations of what the open draws can be (a uniform: its
    # ends). Otherwise they are well spread: in as many turns as a draw has values it takes each of
    # them (a uniform: both ends and one in between), and draws are not in step.
    every: Bool[Array, " B"]
    # the values to draw, in order, whatever the keys are; -1: by the script
    played: Int[Array, "B E"]


class Record(NamedTuple):
    """The draws that each row has made, in order."""

    count: Int[Array, " B"]  # the number of draws; more than E: the last ones were not recorded
    key: UInt32[Array, "B E 2"]  # the data of their keys
    # CALL times how often the key was used before in this call, plus 2 times the number of a draw
    # among those of one `noise.without_replacement`, plus 1 for a uniform
    number: Int[Array, "B E"]
    value: Int[Array, "B E"]  # the token; a uniform, in units of 1 / UNIFORMS
    log_probs: Float[Array, "B E V"]  # the distribution of a token, not normalised
    site: Int[Array, "B E"]  # the place in the code, an index of `ScriptedCall.sites`
    # the number of combinations of open draws; at least MANY: too many to count
    total: Int[Array, " B"]


class Wider(Exception):
    """A distribution over more tokens than were reckoned with."""


class Tape:
    """Stands in for `jaxspec.core.noise` while a call is traced."""

    def __init__(self, script: Script, vocab: int, sites: list[str]):
        batch, size = script.number.shape
        self.script = script
        self.vocab = vocab
        self.sites = sites
        self.count = jax.new_ref(jnp.zeros(batch, jnp.int32))
        self.total = jax.new_ref(jnp.ones(batch, jnp.int32))
        self.key = jax.new_ref(jnp.zeros((batch, size, 2), jnp.uint32))
        self.drawn = jax.new_ref(jnp.zeros((batch, size, 3), jnp.int32))  # number, value, site
        self.log_probs = jax.new_ref(jnp.zeros((batch, size, vocab), jnp.float32))

    def record(self) -> Record:
        number, value, site = jnp.moveaxis(self.drawn[...], -1, 0)
        return Record(
            self.count[...],
            self.key[...],
            number,
            value,
            self.log_probs[...],
            site,
            self.total[...],
        )

    # --- what production code calls

    def categorical(
        self,
        keys: Key[Array, " B *n"],
        log_probs: Float[Array, " B *n V"],
        used: Bool[Array, " B *n"] | None = None,
        drawn: Float[Array, " B *n V"] | None = None,
    ) -> Int[Array, " B *n"]:
        """Plays `noise.categorical`; a draw that is not wanted is token 0."""
        if used is None:
            used = jnp.ones(keys.shape, bool)
        site = self._site("token")
        unplayed = jnp.zeros(keys.shape, jnp.int32)
        if drawn is not None:
            is_gumbel = jnp.all(
                jnp.abs(drawn - _gumbel_again(keys, drawn.shape[-1])) < ROUNDING, axis=-1
            )
            used = used & is_gumbel
            unplayed = jnp.where(is_gumbel, unplayed, noise.first_largest(log_probs + drawn))

        def draw(key: Array, log_probs: Array, used: Array) -> Int[Array, " B"]:
            return self._token(key, self._first(key), log_probs, used, site)

        return jnp.where(used, _each(draw, jax.random.key_data(keys), log_probs, used), unplayed)

    def without_replacement(
        self, keys: Key[Array, " B *n"], log_probs: Float[Array, " B *n V"], count: int
    ) -> Int[Array, " B *n count"]:
        """Plays `noise.without_replacement`: each draw is from the tokens that are left; the rest
        is in order.
        """
        site = self._site("token")
        tokens = jnp.arange(log_probs.shape[-1], dtype=jnp.int32)[None, :]

        def draw(key: Array, log_probs: Array) -> Int[Array, "B count"]:
            first = self._first(key)

            def next_token(
                drawn: Bool[Array, "B V"], index: Int[Array, ""]
            ) -> tuple[Array, Int[Array, " B"]]:
                remaining = jnp.where(drawn, -jnp.inf, log_probs)
                is_left = jnp.any(remaining != -jnp.inf, axis=1)
                token = self._token(key, first + 2 * index, remaining, is_left, site)
                token = jnp.where(is_left, token, jnp.argmin(drawn, axis=1).astype(jnp.int32))
                return drawn | (tokens == token[:, None]), token

            none = jnp.zeros(log_probs.shape, bool)
            return jax.lax.scan(next_token, none, jnp.arange(count, dtype=jnp.int32))[1].T

        return _each(draw, jax.random.key_data(keys), log_probs)

    def uniform(self, keys: Keys, count: int) -> Float[Array, "B count"]:
        site = self._site("uniform")

        def draw(_: None, index: Int[Array, ""]) -> tuple[None, Int[Array, " B"]]:
            key = jax.random.key_data(jax.vmap(lambda key: jax.random.fold_in(key, index))(keys))
            return None, self._uniform(key, self._first(key) + 1, site)

        values = jax.lax.scan(draw, None, jnp.arange(count, dtype=jnp.int32))[1].T
        return values.astype(jnp.float32) / UNIFORMS

    # --- what they draw

    def _token(
        self, key: Array, number: Array, log_probs: Array, used: Array, site: int
    ) -> Int[Array, " B"]:
        vocab = log_probs.shape[1]
        if vocab > self.vocab:
            raise Wider(vocab)
        possible = log_probs != -jnp.inf  # NaN, too: where that matters it is an error
        count = jnp.sum(possible, axis=1, dtype=jnp.int32)
        is_scripted, low, _ = self._entry(key, number)
        is_open = used & ~is_scripted
        level = self._level(key, number, jnp.maximum(count, 1), count, is_open)
        nth = jnp.sum(
            jnp.cumsum(possible, axis=1, dtype=jnp.int32) <= level[:, None], axis=1, dtype=jnp.int32
        )
        value = jnp.where(is_scripted, low, jnp.where(count > 0, nth, 0))
        wide = jnp.pad(
            log_probs.astype(jnp.float32),
            ((0, 0), (0, self.vocab - vocab)),
            constant_values=-jnp.inf,
        )
        return self._note(key, number, value, wide, used, site)

    def _uniform(self, key: Array, number: Array, site: int) -> Int[Array, " B"]:
        is_scripted, low, high = self._entry(key, number)
        low = jnp.where(is_scripted, low, 0)
        high = jnp.where(is_scripted, high, UNIFORMS)
        used = jnp.ones(number.shape, bool)
        width = high - low
        level = self._level(key, number, jnp.minimum(width, 3), jnp.minimum(width, 2), used)
        between = (
            _mixed(key[:, 0], key[:, 1], number, self.script.turn) & jnp.uint32(UNIFORMS - 1)
        ).astype(jnp.int32)
        value = jnp.where(level == 0, low, jnp.where(level == 1, high - 1, low + between % width))
        return self._note(
            key,
            number,
            value,
            jnp.full((*number.shape, self.vocab), -jnp.inf, jnp.float32),
            used,
            site,
        )

    def _first(self, key: UInt32[Array, "B 2"]) -> Int[Array, " B"]:
        """Returns the number of a draw with a key: 0 if none of the row's draws had it, CALL if one
        had, ...
        """
        order = jnp.arange(self.script.number.shape[1], dtype=jnp.int32)[None, :]
        same = jnp.all(self.key[...] == key[:, None], axis=-1) & (order < self.count[...][:, None])
        return CALL * jnp.max(jnp.where(same, self.drawn[...][..., 0] // CALL + 1, 0), axis=1)

    def _entry(
        self, key: Array, number: Array
    ) -> tuple[Bool[Array, " B"], Int[Array, " B"], Int[Array, " B"]]:
        """Returns whether the script has a draw, and its `low` and `high`."""
        script = self.script
        same = jnp.all(script.key == key[:, None], axis=-1) & (script.number == number[:, None])
        low, high = (
            jnp.sum(jnp.where(same, x, 0), axis=1, dtype=jnp.int32)
            for x in (script.low, script.high)
        )
        return jnp.any(same, axis=1), low, high

    def _level(
        self, key: Array, number: Array, spread: Array, count: Array, used: Array
    ) -> Int[Array, " B"]:
        """Chooses the value of an open draw from `spread`, or from `count` while combinations are
        counted.
        """
        turn = self.script.turn
        total = self.total[...]
        of_block = (
            _mixed(key[:, 0], key[:, 1], number, turn // spread) & jnp.uint32(0xFFFF)
        ).astype(jnp.int32)
        count = jnp.maximum(count, 1)
        self.total[...] = jnp.where(used, jnp.minimum(total * count, MANY), total)
        return jnp.where(self.script.every, turn // total % count, (of_block + turn) % spread)

    def _note(
        self, key: Array, number: Array, value: Array, log_probs: Array, used: Array, site: int
    ) -> Array:
        count = self.count[...]
        size = self.script.number.shape[1]
        row = jnp.arange(count.shape[0], dtype=jnp.int32)
        played = self.script.played[row, jnp.minimum(count, size - 1)]
        value = jnp.where(played >= 0, played, value)
        column = jnp.where(used, count, size)
        drawn = jnp.stack([number, value, jnp.full_like(value, site)], axis=1)
        for ref, new in ((self.key, key), (self.drawn, drawn), (self.log_probs, log_probs)):
            ref[...] = ref[...].at[row, column].set(new, mode="drop")
        self.count[...] = count + used.astype(jnp.int32)
        return value

    def _site(self, value_name: str) -> int:
        """Adds the place in the code that asks for a draw to `sites`, and returns its index."""
        hidden = str(Path(jax.__file__).parent), __file__
        frames = [
            frame for frame in traceback.extract_stack() if not frame.filename.startswith(hidden)
        ]
        where = (
            f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})" for frame in frames[:-3:-1]
        )
        self.sites.append(f"a {value_name} drawn in {' for '.join(where)}")
        return len(self.sites) - 1

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Replaces the noise. Programs traced meanwhile stay out of jax's caches, and cached ones
        are not used.
        """
        names = "categorical", "uniform", "without_replacement"
        real = {name: getattr(noise, name) for name in names}
        try:
            for name in names:
                setattr(noise, name, getattr(self, name))
            with _PLAYING(object()):
                yield
        finally:
            for name, function in real.items():
                setattr(noise, name, function)


def _each(draw: Callable[..., Array], *arrays: Array) -> Array:
    """Calls `draw` for all rows, or for each of a row's keys in turn; the first array is the keys'
    data.
    """
    shape = arrays[0].shape[:-1]
    if len(shape) == 1:
        return draw(*arrays)
    flat = (x.reshape(shape[0], -1, *x.shape[len(shape) :]) for x in arrays)
    values = jax.lax.scan(
        lambda _, x: (None, draw(*x)), None, tuple(jnp.moveaxis(x, 1, 0) for x in flat)
    )[1]
    return jnp.moveaxis(values, 0, 1).reshape(*shape, *values.shape[2:])


def _mixed(*words: Int[Array, " B"]) -> UInt32[Array, " B"]:
    """Mixes words into a number that looks random, the same for the same words."""
    mixed = jnp.uint32(0x9E3779B9)
    for word in words:
        mixed = (mixed ^ word.astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
        mixed = mixed ^ (mixed >> 16)
    return mixed


def _gumbel_again(keys: Key[Array, " B *n"], vocab: int) -> Float[Array, " B *n V"]:
    """Computes the Gumbel noise of keys from their data, because jax would take it for a second use
    of the keys.
    """
    data = jax.random.key_data(keys)
    impl = jax.random.key_impl(keys)
    return noise.gumbel(jax.random.wrap_key_data(data, impl=impl), vocab)
