"""The exact law of what a decoder emits, by enumeration of everything it can draw.

The decoder is the shipped one: its `init` and `step` run as they are, compiled, except that `noise.categorical` and
`noise.uniform` return what a script says (and `lax.scan` is unrolled, so that every draw of a step is a call of its
own). Each row of the batch is one path. Draws are split in the order in which the step makes them:

* a draw of a token: the step is run to see the law it asks for, and the path becomes one path per token, each
  weighted with its probability;
* a coin: what the step does is piecewise constant in a coin. With the later coins at their top, the points where it
  changes (tokens, lengths, number accepted, or the law of a later draw) are found by bisection over the 2^23 values
  that `jax.random.uniform` takes, and the path becomes one path per cell, weighted with the cell's volume. For the
  rejection rule and one coin these are "accept" and "reject", or nothing at all behind a rejection.

So drafters that draw nothing, rules without coins, adaptive lengths and several laws per round need no special case:
nothing here knows what a draft is. It must draw by `noise.categorical` and `noise.uniform` alone, and outside of
`while_loop`; a decoder whose output depends on its keys in any other way is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import accept as accept_rules
from jaxspec import buffers, drafters, noise
from jaxspec import warp as warps
from jaxspec.base import AcceptRule, DecodeState, Decoder, Drafter, Keys, Model, Prompt, Request, Warp, Weights
from jaxspec.decode import autoregressive, speculative
from jaxspec.testing.tables import SequenceLaw, plain_law

COINS = 1 << 23  # a coin is a multiple of 1 / COINS below 1
CHUNK = 10  # log2 of the rows of one call of the decoder, if they fit into ...
MEMORY = 1 << 30  # ... this many bytes, about
SAME = 1e-6  # probabilities closer than this are equal (the same row may round differently elsewhere in a batch)


def certify(
    target: Model,
    *,
    drafter: Model | Drafter | None = None,
    accept: AcceptRule | None = None,
    gamma: int = 2,
    warp: Warp | None = None,
    controls: Any = None,
    prompt: Prompt | None = None,
    steps: int = 4,
    eos: Sequence[int] = (),
    draft_params: Any = None,
) -> float:
    """How far the tokens of a decoder are from plain sampling's: the total variation of the two exact laws.

    0 (1e-6 or so, in float32) is a proof for these parameters: exact for the first `steps` tokens. 0.01 means that some
    event, say "the second token is 5", has a probability that is off by 0.01.

    Args:
        target: a model with few tokens, such as `table_model(key, vocab=3)`.
        drafter: a Model, a Drafter, or None for plain decoding.
        accept: the rule; `accept.rejection()` by default.
        gamma: guesses per round.
        warp, controls: of `jaxspec.warp`, controls with one row; by default the model's own law.
        prompt: one row; by default the token 0.
        steps: how many tokens the laws are over.
        eos: tokens that end a sequence.
        draft_params: the parameters of a Drafter that has some.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=3), table_model(jax.random.key(2), vocab=3)
        >>> certify(target, drafter=draft, gamma=1, steps=3) < 1e-6
        True
    """
    warp = warps.sampling() if warp is None else warp
    if controls is None:
        controls = warps.Controls(jnp.ones(1), jnp.full(1, target.lm.vocab_size), jnp.ones(1))
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)) if prompt is None else prompt
    weights = Weights(target.params, draft_params)
    decoder = autoregressive(target.lm, warp)
    if isinstance(drafter, Model):
        weights, drafter = Weights(target.params, drafter.params), drafters.model(drafter.lm)
    if drafter is not None:
        rule = accept_rules.rejection() if accept is None else accept
        decoder = speculative(target.lm, drafter, rule, warp, gamma)
    law = decoder_law(decoder, weights, prompt, controls, steps=steps, eos=eos)
    return total_variation(law, plain_law(target, prompt, warp, controls, steps, eos))


def total_variation(first: SequenceLaw, second: SequenceLaw) -> float:
    """Half the sum of the absolute differences: the most by which the probability of any event differs.

    >>> total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.75, (2,): 0.25})
    0.5
    """
    return sum(abs(first.get(x, 0.0) - second.get(x, 0.0)) for x in first.keys() | second.keys()) / 2


def decoder_law(
    decoder: Decoder,
    weights: Weights,
    prompt: Prompt,
    controls: Any,
    *,
    steps: int,
    eos: Sequence[int] = (),
    limit: int | None = None,
    merge: bool = True,
) -> SequenceLaw:
    """The exact law of the first `steps` tokens that a decoder emits; see the top of this file for the method.

    Args:
        decoder: of `jaxspec.speculative`, `jaxspec.autoregressive` or your own.
        weights: its parameters.
        prompt: one row.
        controls: of the decoder's warp, one row.
        steps: tokens.
        eos: tokens that end a sequence; such sequences are shorter tuples.
        limit: the limit on new tokens that the decoder is given; by default `steps`.
        merge: whether paths with the same committed tokens are merged after each round, which keeps their number
            below that of the sequences. It takes for granted that what else a state holds (garbage behind the
            lengths, a drafter's memory of past rounds) does not change the law. Without, nothing is taken for
            granted, and the number of paths grows with each round.

    Returns:
        The probability of each sequence of nonzero probability.

    Raises:
        ValueError: more than one row; a decoder that draws in another way; a state whose arrays are not all led by
            the batch.
        FloatingPointError: the target's logits are not finite on some path.
        RuntimeError: a round that commits nothing.
    """
    if prompt.tokens.shape[0] != 1 or prompt.length.shape != (1,):
        raise ValueError(f"got a prompt of {prompt.tokens.shape[0]} rows: expected one, whose law is asked for")
    limit = steps if limit is None else limit
    room = buffers.room(limit, decoder.gamma)
    shared = (weights, jnp.asarray(list(eos) or [-1], jnp.int32))
    asked = jax.tree.map(np.asarray, (prompt, controls, np.full(1, limit, np.int32)))
    rows, weight = _Call(_init(decoder, room), shared, asked, chunk=64).outcomes(np.ones(1))
    step, law = _step(decoder), {}
    for _ in range(steps):
        live, ended = _retire(rows, weight, steps)
        for tokens, probability in ended:
            law[tokens] = law.get(tokens, 0.0) + probability
        rows, weight = _take(rows, live), weight[live]
        if not len(weight):
            return law
        if merge:
            first, weight = _merged(rows, weight)
            rows = _take(rows, first)
        rows, weight = _Call(step, shared, rows).outcomes(weight)
    raise RuntimeError(f"a row is not finished after {steps} rounds: some round has committed nothing to it")


# --- paths: the rows of a state, which live in numpy


def _take(rows: Any, index: Int[np.ndarray, " N"]) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], rows)


def _new_tokens(rows: DecodeState) -> Int[np.ndarray, "N S"]:
    """The new tokens of each row from column 0, and -1 behind them."""
    slot = np.arange(rows.tokens.shape[1])[None, :]
    real = slot < (rows.length - rows.start)[:, None]
    return np.where(real, np.take_along_axis(rows.tokens, (slot + rows.start[:, None]) % slot.size, axis=1), -1)


def _merged(rows: DecodeState, weight: np.ndarray) -> tuple[Int[np.ndarray, " M"], np.ndarray]:
    """One of the rows for each value of the committed tokens, and the weight of all of them."""
    _, first, same = np.unique(_new_tokens(rows), axis=0, return_index=True, return_inverse=True)
    return first, np.bincount(same.reshape(-1), weights=weight)


def _retire(rows: DecodeState, weight: np.ndarray, steps: int):
    """Which rows go on, and the sequences of those that do not, with their probabilities."""
    if rows.failed.any():
        raise FloatingPointError("the target's logits are not finite on a path of nonzero probability")
    over = np.logical_or(rows.done, rows.length - rows.start >= steps)
    tokens, group = np.unique(_new_tokens(rows)[over][:, :steps], axis=0, return_inverse=True)
    mass = np.bincount(group.reshape(-1), weights=weight[over], minlength=len(tokens))
    ended = [(tuple(x[x >= 0].tolist()), float(p)) for x, p in zip(tokens, mass, strict=True)]
    return np.flatnonzero(~over), ended


# --- one call of the decoder, with its draws scripted


class _Tape:
    """Stands in for `jaxspec.noise`: plays a script, and records what was asked for, in order."""

    def __init__(self, draws: Int[Array, "B draws"] | None = None, coins: Float[Array, "B coins"] | None = None):
        self.draws, self.coins = draws, coins
        self.events: list[tuple[str, int]] = []  # ("draw" or "coin", its number among its kind)
        self.laws: list[Float[Array, "B V"]] = []

    def categorical(self, keys: Keys, log_probs: Float[Array, "B V"]) -> Int[Array, " B"]:
        index = len(self.laws)
        self.laws.append(log_probs)
        self.events.append(("draw", index))
        return jnp.zeros(keys.shape, jnp.int32) if self.draws is None else self.draws[:, index]

    def uniform(self, keys: Keys, count: int) -> Float[Array, "B count"]:
        first = len(self.events) - len(self.laws)
        self.events += [("coin", first + i) for i in range(count)]
        return jnp.zeros((*keys.shape, count)) if self.coins is None else self.coins[:, first : first + count]

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Nested jits are disabled too: their caches would keep the script."""
        saved = noise.categorical, noise.uniform, jax.lax.scan
        noise.categorical, noise.uniform, jax.lax.scan = self.categorical, self.uniform, self._scan
        try:
            with jax.disable_jit():
                yield
        finally:
            noise.categorical, noise.uniform, jax.lax.scan = saved

    def _scan(self, f: Callable, init: Any, xs: Any = None, length: int | None = None, reverse=False, **options: Any):
        del options
        count = jax.tree.leaves(xs)[0].shape[0] if length is None else length
        carry, ys = init, []
        for i in range(count)[:: -1 if reverse else 1]:
            carry, y = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
            ys.append(y)
        if ys:
            return carry, jax.tree.map(lambda *y: jnp.stack(y), *(ys[::-1] if reverse else ys))
        with _Tape().playing():  # a body that never runs, whose draws must not be recorded
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
            _, y = jax.eval_shape(f, init, one)
        return carry, jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), y)


class _Seen(NamedTuple):
    """What tells two paths apart: the committed tokens and counts, and the laws of the draws."""

    counts: Int[Array, "B W"]
    laws: tuple[Float[Array, "B V"], ...]


@functools.cache
def _init(decoder: Decoder, room: int):
    """`decoder.init` as a program over rows of (prompt, controls, limit)."""

    def call(keys, shared, rows):
        weights, eos = shared
        prompt, controls, limit = rows
        state = decoder.init(keys, weights, prompt, Request(controls, limit, eos), room)
        return state, jnp.zeros_like(state.length)

    return _program(call)


@functools.cache
def _step(decoder: Decoder):
    """`decoder.step` as a program over rows of DecodeState, less the end tokens, which all rows share."""

    def call(keys, shared, rows):
        weights, eos = shared
        state, info = decoder.step(keys, weights, rows._replace(request=rows.request._replace(eos=eos)))
        return state, info.num_accepted

    return _program(call)


def _program(call: Callable):
    """`run(keys, shared, rows, draws, coins) -> (rows, _Seen)`, compiled, and `plan(...)`: the draws it makes."""

    def play(tape: _Tape, keys, shared, rows):
        with tape.playing():
            state, accepted = call(keys, shared, rows)
            real = jnp.arange(state.tokens.shape[1])[None, :] < state.length[:, None]
            parts = [jnp.where(real, state.tokens, -1), state.length[:, None], accepted[:, None], state.done[:, None]]
            seen = _Seen(jnp.concatenate([part.astype(jnp.int32) for part in parts], axis=1), tuple(tape.laws))
        state = state._replace(request=state.request._replace(eos=None))
        shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
        if any(shape[:1] != keys.shape for shape in shapes):
            raise ValueError(f"not every array of the state has the batch ({keys.shape[0]}) first: got {sorted(shapes)}")
        return state, seen

    @jax.jit
    def run(keys, shared, rows, draws, coins):
        return play(_Tape(draws, coins), keys, shared, rows)

    plans: dict[Any, list[tuple[str, int]]] = {}  # by shapes, as tracing takes most of a small enumeration's time

    def plan(*args) -> list[tuple[str, int]]:
        leaves, treedef = jax.tree.flatten(args)
        shapes = treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in plans:
            tape = _Tape()
            jax.eval_shape(functools.partial(play, tape), *args)
            plans[shapes] = tape.events
        return plans[shapes]

    return run, plan


class _Paths(NamedTuple):
    """Scripts in the making: undecided draws are token 0, undecided coins are at their top."""

    source: Int[np.ndarray, " N"]  # the row of the pool that a path continues
    weight: Float[np.ndarray, " N"]
    draws: Int[np.ndarray, "N draws"]
    coins: Int[np.ndarray, "N coins"]  # in units of 1 / COINS


class _Call:
    """One call of a program from each row of a pool, and all that can come of it."""

    def __init__(self, program: Any, shared: Any, rows: Any, chunk: int | None = None):
        (self.run, plan), self.shared, self.rows = program, shared, rows
        size = 64 + sum(leaf[:1].nbytes for leaf in jax.tree.leaves(rows))
        self.chunk = chunk or int(2 ** np.clip(np.floor(np.log2(MEMORY / (16 * size))), 0, CHUNK))
        self.keys = [noise.row_keys(jax.random.key(seed), self.chunk) for seed in range(2)]
        self.events = plan(self.keys[0], shared, _take(rows, np.zeros(self.chunk, np.int32)))

    def outcomes(self, weight: Float[np.ndarray, " N"]) -> tuple[DecodeState, Float[np.ndarray, " M"]]:
        """Every state that the call can lead to, and its weight."""
        count, kinds = len(weight), [kind for kind, _ in self.events]
        paths = _Paths(
            np.arange(count),
            weight,
            np.zeros((count, kinds.count("draw")), np.int32),
            np.full((count, kinds.count("coin")), COINS - 1, np.int32),
        )
        for kind, index in self.events:
            paths = self._split_draw(paths, index) if kind == "draw" else self._split_coin(paths, index)
        self._check_keys(paths)
        return self._evaluate(paths, lambda state, seen: state), paths.weight

    def _evaluate(self, paths: _Paths, pick: Callable, keys: int = 0) -> Any:
        """Runs every path, in chunks of one size (one compilation); keeps what `pick(state, seen)` returns."""
        kept = []
        for first in range(0, len(paths.weight), self.chunk):
            part = _take(paths, slice(first, first + self.chunk))
            short = self.chunk - len(part.weight)
            source, draws, coins = (np.concatenate([x, x[:1].repeat(short, 0)]) for x in (part[0], part[2], part[3]))
            script = draws, coins.astype(np.float32) / np.float32(COINS)
            out = pick(*self.run(self.keys[keys], self.shared, _take(self.rows, source), *script))
            kept.append(jax.tree.map(lambda leaf, n=len(part.weight): np.asarray(leaf)[:n], out))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *kept)

    def _split_draw(self, paths: _Paths, index: int) -> _Paths:
        law = self._evaluate(paths, lambda state, seen: seen.laws[index])
        if np.isnan(law).any():
            raise FloatingPointError("a draw from a law with NaN in it, on a path of nonzero probability")
        probs = _normalised(law)
        path, token = np.nonzero(probs)
        paths = _take(paths, path)
        paths.draws[:, index] = token
        return paths._replace(weight=paths.weight * probs[path, token])

    def _split_coin(self, paths: _Paths, index: int) -> _Paths:
        cells, low = [], np.zeros(len(paths.weight), np.int64)
        while len(low):
            both = self._look(paths, index, np.stack([low, np.full_like(low, COINS - 1)], axis=1))
            changes = np.flatnonzero(_differ(*(_take(both, slice(at, None, 2)) for at in range(2))))
            moving, end = _take(paths, changes), np.full_like(low, COINS)
            end[changes] = self._first_change(moving, index, low[changes], _take(both, 2 * changes))
            cells.append(_with_coin(paths, index, low)._replace(weight=paths.weight * ((end - low) / COINS)))
            paths, low = moving, end[changes]
        return _Paths(*(np.concatenate(parts) for parts in zip(*cells, strict=True)))

    def _first_change(self, paths: _Paths, index: int, low: np.ndarray, at_low: _Seen) -> np.ndarray:
        """The smallest coin above `low` at which a path differs; it is known to differ at the top.

        Bisection into as many parts as fill a chunk: a short chunk takes as long as a full one.
        """
        high, count = np.full_like(low, COINS - 1), len(low)
        inner = np.arange(1, max(1, self.chunk // max(count, 1)) + 1)[None, :]
        while count and (high - low).max() > 1:
            points = low[:, None] + (high - low)[:, None] * inner // (inner.size + 1)
            there = self._look(paths, index, points)
            same = ~_differ(_take(at_low, np.arange(count).repeat(inner.size)), there).reshape(points.shape)
            before = np.cumprod(same, axis=1).sum(axis=1)  # points before the first change
            edges = np.concatenate([low[:, None], points, high[:, None]], axis=1)
            low, high = (edges[np.arange(count), before + at] for at in range(2))
        return high

    def _look(self, paths: _Paths, index: int, coins: Int[np.ndarray, "N k"]) -> _Seen:
        """What each path does with each of k values of one of its coins: N x k rows."""
        many = _with_coin(_take(paths, np.arange(len(coins)).repeat(coins.shape[1])), index, coins.reshape(-1))
        seen = self._evaluate(many, lambda state, seen: seen)
        return seen._replace(laws=tuple(_normalised(law) for law in seen.laws))

    def _check_keys(self, paths: _Paths) -> None:
        few = _take(paths, slice(0, self.chunk))
        first, second = (self._evaluate(few, lambda state, seen: seen, keys=seed) for seed in range(2))
        if not all(np.array_equal(x, y, equal_nan=True) for x, y in zip(*map(jax.tree.leaves, (first, second)))):
            raise ValueError(
                "the decoder's output depends on its keys otherwise than by noise.categorical and noise.uniform: its "
                "law cannot be enumerated"
            )


def _with_coin(paths: _Paths, index: int, value: Int[np.ndarray, " N"]) -> _Paths:
    coins = paths.coins.copy()
    coins[:, index] = value
    return paths._replace(coins=coins)


def _normalised(log_probs: Float[np.ndarray, "N V"]) -> Float[np.ndarray, "N V"]:
    """The law that `noise.categorical` draws from: any scale; token 0 if no token has a probability."""
    log_probs = np.where(np.isnan(log_probs), -np.inf, log_probs.astype(np.float64))
    top = log_probs.max(axis=-1, keepdims=True)
    probs = np.exp(log_probs - np.where(np.isfinite(top), top, 0.0))
    probs[:, 0] += ~np.isfinite(top[:, 0])
    return probs / probs.sum(axis=-1, keepdims=True)


def _differ(first: _Seen, second: _Seen) -> np.ndarray:
    """Which paths did something else."""
    counts = np.any(first.counts != second.counts, axis=1)
    pairs = zip(first.laws, second.laws, strict=True)
    return np.any([counts, *(np.abs(a - b).max(axis=1) > SAME for a, b in pairs)], axis=0)
