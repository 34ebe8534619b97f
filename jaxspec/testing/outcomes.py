"""All that one call of a decoder can lead to: paths, split at each draw that the call makes.

N is a number of paths. They live in numpy, and go through the compiled call in chunks of one size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxspec.base import DecodeState
from jaxspec.testing.script import Program, Seen

COINS = 1 << 23  # a coin is one of the multiples of 1 / COINS below 1, as `jax.random.uniform`'s are
CHUNK = 1024  # rows of one run, if they fit into ...
MEMORY = 1 << 30  # ... so many bytes, about
SAME = 1e-6  # probabilities closer than this are equal: a row may round differently elsewhere in a batch

Weight = Float[np.ndarray, " N"]


class Ends(NamedTuple):
    """What a call leads to.

    Attributes:
        state: after the call.
        weight: the probability of each path.
        source: the row that it began with.
        before: how long that row was; for a call that makes rows, where their new tokens begin.
        draws: the tokens that were drawn, in order.
        seen: see `script.Seen`.
    """

    state: DecodeState
    weight: Weight
    source: Int[np.ndarray, " N"]
    before: Int[np.ndarray, " N"]
    draws: Int[np.ndarray, "N draws"]
    seen: Seen


class _Paths(NamedTuple):
    """Scripts in the making: undecided draws are token 0, undecided coins are at their top."""

    source: Int[np.ndarray, " N"]  # the row that a path continues
    weight: Weight
    draws: Int[np.ndarray, "N draws"]
    coins: Int[np.ndarray, "N coins"]  # in units of 1 / COINS


def take(tree: Any, index: Any) -> Any:
    """Some rows of every array."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


class Outcomes:
    """One call of a program from each of some rows.

    Args:
        program: see `script.Program`.
        shared: what the rows have in common.
        rows: a tree of numpy arrays, rows first.
        chunk: rows of one run.
    """

    def __init__(self, program: Program, shared: Any, rows: Any, chunk: int = CHUNK):
        row_bytes = 64 + sum(leaf[:1].nbytes for leaf in jax.tree.leaves(rows))
        fitting = MEMORY // (16 * row_bytes)  # inputs, outputs and what is in between
        self.chunk = min(chunk, 1 << max(fitting.bit_length() - 1, 0))
        self.program, self.shared, self.rows = program, shared, rows
        self.same_key = np.zeros(self.chunk, np.int32)
        self.events = program.plan(self.same_key, shared, take(rows, np.zeros(self.chunk, np.int32)))

    def enumerate(self, weight: Weight) -> Ends:
        """Everything that the call leads to from rows of the given weights.

        Raises:
            ValueError: the result depends on the keys otherwise than by scripted draws, or a draw not on the row's key.
            FloatingPointError: a draw from NaN.
        """
        count, kinds = len(weight), [event.kind for event in self.events]
        draws = np.zeros((count, kinds.count("token")), np.int32)
        coins = np.full((count, kinds.count("coin")), COINS - 1, np.int64)
        paths = _Paths(np.arange(count), weight, draws, coins)
        for kind, index, _ in self.events:
            paths = self._split_draw(paths, index) if kind == "token" else self._split_coin(paths, index)
        state, seen = self._end(paths)
        before = self.rows.length[paths.source] if isinstance(self.rows, DecodeState) else state.start
        return Ends(state, paths.weight, paths.source, np.asarray(before), paths.draws, seen)

    def _split_draw(self, paths: _Paths, index: int) -> _Paths:
        """One path per token of nonzero probability."""
        law = self._run(paths, lambda state, seen: seen.laws[index])
        if np.isnan(law).any():
            raise FloatingPointError("a draw from a law with NaN in it, on a path of nonzero probability")
        probs = normalised(law)
        path, token = np.nonzero(probs)
        paths = take(paths, path)
        paths.draws[:, index] = token
        return paths._replace(weight=paths.weight * probs[path, token])

    def _split_coin(self, paths: _Paths, index: int) -> _Paths:
        """One path per interval of the coin in which the path does the same.

        From the bottom up: a path that does at the top what it does at `low` does so in between.
        """
        cells, low = [], np.zeros(len(paths.weight), np.int64)
        while len(low):
            both = self._look(paths, index, np.stack([low, np.full_like(low, COINS - 1)], axis=1))
            changes = np.flatnonzero(_differ(take(both, slice(0, None, 2)), take(both, slice(1, None, 2))))
            moving, end = take(paths, changes), np.full_like(low, COINS)
            end[changes] = self._first_change(moving, index, low[changes], take(both, 2 * changes))
            cells.append(_with_coin(paths, index, low)._replace(weight=paths.weight * ((end - low) / COINS)))
            paths, low = moving, end[changes]
        return _Paths(*(np.concatenate(parts) for parts in zip(*cells, strict=True)))

    def _first_change(self, paths: _Paths, index: int, low: np.ndarray, at_low: Seen) -> np.ndarray:
        """The smallest coin above `low` at which each path differs; it does at the top.

        Bisection, but into as many parts as fill a chunk, because a short one takes as long.
        """
        high, count = np.full_like(low, COINS - 1), len(low)
        inner = np.arange(1, max(1, self.chunk // max(count, 1)) + 1)[None, :]
        while count and (high - low).max() > 1:
            points = low[:, None] + (high - low)[:, None] * inner // (inner.size + 1)
            there = self._look(paths, index, points)
            same = ~_differ(take(at_low, np.arange(count).repeat(inner.size)), there).reshape(points.shape)
            before = np.cumprod(same, axis=1).sum(axis=1)  # points before the first change
            edges = np.concatenate([low[:, None], points, high[:, None]], axis=1)
            low, high = (edges[np.arange(count), before + at] for at in range(2))
        return high

    def _look(self, paths: _Paths, index: int, coins: Int[np.ndarray, "N k"]) -> Seen:
        """What each path does with each of k values of one of its coins: N * k rows.

        With all later coins at their top, and with all at their bottom, side by side: what this coin does may show
        in one of the cases only.
        """
        high = _with_coin(take(paths, np.arange(len(coins)).repeat(coins.shape[1])), index, coins.reshape(-1))
        cases = [high]
        if index + 1 < high.coins.shape[1]:
            low = high.coins.copy()
            low[:, index + 1 :] = 0
            cases.append(high._replace(coins=low))
        seen = [self._run(case, lambda state, seen: seen) for case in cases]
        counts = np.concatenate([case.counts for case in seen], axis=1)
        keys = np.concatenate([case.keys for case in seen], axis=1)
        laws = tuple(normalised(law) for case in seen for law in case.laws)
        return seen[0]._replace(counts=counts, keys=keys, laws=laws)

    def _run(self, paths: _Paths, pick: Callable[[Any, Seen], Any], key: np.ndarray | None = None) -> Any:
        """`pick(state, seen)` of every path, in numpy; `key`: of each row of a chunk, the number of its key."""
        kept, key = [], self.same_key if key is None else key
        for first in range(0, len(paths.weight), self.chunk):
            part = take(paths, slice(first, first + self.chunk))
            real = len(part.weight)
            part = take(part, np.minimum(np.arange(self.chunk), real - 1))
            coins = part.coins.astype(np.float32) / np.float32(COINS)
            rows = take(self.rows, part.source)
            out = pick(*self.program.run(key, self.shared, rows, part.draws, coins))
            kept.append(jax.tree.map(lambda leaf, real=real: np.asarray(leaf)[:real], out))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *kept)

    def _end(self, paths: _Paths) -> tuple[DecodeState, Seen]:
        """Where every path ends, which is to be the same with any keys: few paths are tried with many."""
        count = len(paths.weight)
        tried = take(paths, np.arange(max(count, self.chunk)) % count)
        other_keys = np.arange(1, self.chunk + 1, dtype=np.int32)
        (state, seen), (other, again) = (self._run(tried, lambda *out: out, key) for key in (self.same_key, other_keys))
        if not _same(state, other):
            raise ValueError(
                "the decoder's output depends on its keys otherwise than by noise.categorical and noise.uniform (by "
                "jax.random, or by an argmax of its own over noise.gumbel): its law cannot be enumerated. Draw tokens "
                "by noise.categorical (with `drawn`, if the noise is there already), coins by noise.uniform"
            )
        stuck = np.any(np.all(seen.keys == again.keys, axis=2) & seen.used, axis=0)
        for event in itertools.compress(self.events, stuck):
            raise ValueError(f"{event.what} has the same key in every row: make it of the row's keys, by noise.at")
        state, seen = take((state, seen), slice(0, count))
        return state, seen._replace(used=seen.used & self._read(paths, (state, seen)))

    def _read(self, paths: _Paths, ends: tuple[DecodeState, Seen]) -> Bool[np.ndarray, " E"]:
        """Which draws anything depends on; asked only of tokens that were drawn with the key of another draw.

        A rule that calls another one for its count of guesses, and draws the token itself, has one that does not.
        """
        keys, used, laws = ends[1].keys, ends[1].used, ends[1].laws
        read = np.ones(len(self.events), bool)
        for number, (kind, index, _) in enumerate(self.events):
            same = np.all(keys == keys[:, number, None], axis=2) & used & used[:, number, None]
            if kind == "token" and np.any(same.sum(axis=1) > 1):
                others = (self._run(_with_draw(paths, index, t), lambda *out: out) for t in range(laws[index].shape[1]))
                read[number] = not all(_same(ends, other) for other in others)
        return read


def _with_draw(paths: _Paths, index: int, token: int) -> _Paths:
    draws = paths.draws.copy()
    draws[:, index] = token
    return paths._replace(draws=draws)


def _with_coin(paths: _Paths, index: int, value: Int[np.ndarray, " N"]) -> _Paths:
    coins = paths.coins.copy()
    coins[:, index] = value
    return paths._replace(coins=coins)


def normalised(log_probs: Float[np.ndarray, "N V"]) -> Float[np.ndarray, "N V"]:
    """The law that `noise.categorical` draws from, in float64: token 0 if no token has a probability."""
    log_probs = np.where(np.isnan(log_probs), -np.inf, log_probs.astype(np.float64))
    top = log_probs.max(axis=-1, keepdims=True)
    probs = np.exp(log_probs - np.where(np.isfinite(top), top, 0.0))
    probs[:, 0] += ~np.isfinite(top[:, 0])
    return probs / probs.sum(axis=-1, keepdims=True)


def _same(first: Any, second: Any) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in leaves)


def _differ(first: Seen, second: Seen) -> np.ndarray:
    """Which paths did something else."""
    laws = zip(first.laws, second.laws, strict=True)
    other = [np.abs(a - b).max(axis=1) > SAME for a, b in laws]
    other += [np.any(first.keys != second.keys, axis=(1, 2)), np.any(first.counts != second.counts, axis=1)]
    return np.any(other, axis=0)
