"""Paths, which fix draws of a row, and their runs, which record the draws and the result of a call,
in NumPy.

N is the number of paths, M of rows that are run, S of draws that a path fixes, E of draws that a
row makes. W and F are widths of the compared arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from jaxspec.testing.script import ScriptedCall
from jaxspec.testing.tape import Script

SAME = 3e-6  # numbers closer than this are equal: a row may round differently elsewhere in a batch
NONE = -1  # the number of a draw that there is not

# A state -> the arrays that tell paths apart, with the rows first.
Watch = Callable[[Any], list[np.ndarray]]


class Paths(NamedTuple):
    """The draws that paths fix, and their values; `tape.Script` has the meaning of the entries."""

    source: Int[np.ndarray, " N"]  # the row that each path continues
    # these four: entries
    key: UInt64[np.ndarray, "N S"]
    number: Int[np.ndarray, "N S"]
    low: Int[np.ndarray, "N S"]
    high: Int[np.ndarray, "N S"]

    @classmethod
    def fresh(cls, count: int) -> Paths:
        """Makes one path from each row, with all its draws open."""
        none = np.zeros((count, 0), np.int32)
        return cls(np.arange(count), none.astype(np.uint64), none, none, none)

    @classmethod
    def joined(cls, parts: list[Paths]) -> Paths:
        """Concatenates paths."""
        width = max(paths.number.shape[1] for paths in parts)

        def together(name: str) -> np.ndarray:
            fill = NONE if name == "number" else 0
            # padded to as many draws as any path fixes
            entries = [getattr(paths, name) for paths in parts]
            return np.concatenate(
                [
                    np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
                    for x in entries
                ]
            )

        return cls(
            np.concatenate([paths.source for paths in parts]), *map(together, cls._fields[1:])
        )

    def fixing(
        self, key: np.ndarray, number: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> Paths:
        """Fixes one more draw of each path, or makes the interval of a uniform smaller."""
        is_fixed = matches(self, key[:, None], number[:, None])[:, 0]
        old = self.key, np.where(is_fixed, NONE, self.number), self.low, self.high
        pairs = zip(old, (key, number, low, high), strict=True)
        key, number, low, high = (np.column_stack(pair) for pair in pairs)
        # no path grows by what others fix
        order = np.argsort(number == NONE, axis=1, kind="stable")
        width = int((number != NONE).sum(axis=1).max(initial=0))
        return Paths(
            self.source,
            *(np.take_along_axis(x, order, axis=1)[:, :width] for x in (key, number, low, high)),
        )


class Drawn(NamedTuple):
    """The draws that rows have made, in order; `tape.Record` has the meaning of the entries."""

    key: UInt64[np.ndarray, "M E"]
    number: Int[np.ndarray, "M E"]
    value: Int[np.ndarray, "M E"]
    log_probs: Float[np.ndarray, "M E V"]
    site: Int[np.ndarray, "M E"]
    total: Int[np.ndarray, " M"]


class Look(NamedTuple):
    """The watched state of rows after a call, to be compared."""

    exact: Int[np.ndarray, "M W"]  # its integers
    # its floats, which are rounded, and the distribution of each draw that is fixed
    real: Float[np.ndarray, "M F"]
    drawn: Drawn  # their draws


def take(tree: Any, index: Any) -> Any:
    """Takes rows of every array of a tree."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def is_uniform(number: Int[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
    """Tells which numbers belong to uniforms; see `tape.Record`."""
    return np.asarray(number % 2 == 1)


def matches(
    having: Paths | Drawn, key: UInt64[np.ndarray, "M K"], number: Int[np.ndarray, "M K"]
) -> Bool[np.ndarray, "M K S"]:
    """Finds the entries of a path, or the draws of a row, that have a key and a number."""
    same = having.key[:, None, :] == key[:, :, None]
    return (same & (having.number[:, None, :] == number[:, :, None])) & (number[:, :, None] != NONE)


def distributions(
    drawn: Drawn, key: UInt64[np.ndarray, "M K"], number: Int[np.ndarray, "M K"]
) -> Float[np.ndarray, "M K V"]:
    """Returns the distributions of draws: probabilities, -2 for NaN; 0 for a uniform, -1 for a
    missing draw.
    """
    entries = matches(drawn, key, number)
    log_probs = np.take_along_axis(drawn.log_probs, entries.argmax(axis=2)[:, :, None], axis=1)
    probs = np.where(
        is_uniform(number)[:, :, None], 0.0, np.nan_to_num(normalised(log_probs), nan=-2.0)
    )
    return np.where(np.any(entries, axis=2, keepdims=True), probs, -1.0)


def normalised(log_probs: Float[np.ndarray, "*shape V"]) -> Float[np.ndarray, "*shape V"]:
    """Returns the distribution that `noise.categorical` draws from, in float64; token 0 if no token
    has a probability.

    >>> normalised(np.array([[-np.inf, 1.0], [-np.inf, -np.inf]])).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    log_probs = log_probs.astype(np.float64)
    top = np.fmax.reduce(log_probs, axis=-1, keepdims=True)
    probs = np.exp(log_probs - np.where(np.isfinite(top), top, 0.0))
    probs[..., :1] += top == -np.inf
    return probs / probs.sum(axis=-1, keepdims=True)


def differ(
    first: Look,
    first_rows: np.ndarray,
    second: Look,
    second_rows: np.ndarray,
    impossible: Bool[np.ndarray, " K"] | bool = False,
) -> Bool[np.ndarray, " K"]:
    """Tells which rows of a look have another state than as many rows of a second one.

    Of the `impossible` ones, whose fixed draws have probability 0, only these probabilities are of
    interest.
    """
    a = first.real[first_rows]
    b = second.real[second_rows]
    apart = np.any(np.abs(a - b) > SAME * (1 + np.abs(a)), axis=1)
    unequal = np.any(first.exact[first_rows] != second.exact[second_rows], axis=1)
    return apart | (unequal & ~np.asarray(impossible))


KEYS_OF_ITS_OWN = (
    "the draws of a round have other keys from run to run, though its rows have the same: a rule "
    "or a drafter makes keys of its own, such as by jax.random.key, or of a row's place in the "
    "batch. Make each key of the row's, by noise.at(keys, position, purpose)"
)


class Runs:
    """Runs of a program from some rows, as many paths as one likes."""

    def __init__(self, program: ScriptedCall, shared: Any, rows: Any, watch: Watch, chunk: int):
        self.program = program
        self.shared = shared
        self.rows = rows
        self.watch = watch
        self.chunk = chunk

    def look(
        self, paths: Paths, turn: np.ndarray, tries_all: np.ndarray, fixed: Paths | None = None
    ) -> Look:
        """Runs completions of paths for their watched state; `fixed`: paths whose draws are
        compared in its place.
        """
        watched, drawn = self._run(paths, turn, tries_all, self.watch)
        flat = [np.asarray(leaf).reshape(len(turn), -1) for leaf in watched]
        exact = [leaf.astype(np.int64) for leaf in flat if leaf.dtype.kind != "f"]
        real = [
            np.nan_to_num(leaf.astype(np.float64), nan=-1e30)
            for leaf in flat
            if leaf.dtype.kind == "f"
        ]
        if fixed is None:
            fixed = paths
        made_from = distributions(drawn, fixed.key, fixed.number)
        no_draws = np.zeros((len(turn), 0))
        real = np.concatenate([no_draws, *real, made_from.reshape(len(turn), -1)], axis=1)
        return Look(np.concatenate([no_draws.astype(np.int64), *exact], axis=1), real, drawn)

    def states(
        self,
        paths: Paths,
        turn: np.ndarray,
        tries_all: np.ndarray,
        which: Int[np.ndarray, " M"] | None = None,
        played: Int[np.ndarray, "M E"] | None = None,
    ) -> tuple[Any, Drawn]:
        """Runs completions of paths to their states, with other keys (`which`) and fixed draws
        (`played`), if any.
        """
        return self._run(paths, turn, tries_all, lambda state: state, which, played)

    def _run(self, paths, turn, tries_all, pick, which=None, played=None) -> tuple[Any, Drawn]:
        size = self.program.capacity
        results = []
        if which is None:
            which = np.zeros(len(turn), np.int32)
        if played is None:
            played = np.full((len(turn), size), NONE, np.int32)
        for first in range(0, max(len(turn), 1), self.chunk):
            real = min(self.chunk, len(turn) - first)
            index = np.minimum(first + np.arange(self.chunk), len(turn) - 1)
            script = _script(take(paths, index), turn[index], tries_all[index], played[index])
            state, record = self.program.run(
                which[index], self.shared, take(self.rows, paths.source[index]), script
            )
            out = pick(jax.tree.map(np.asarray, state)), _drawn(jax.tree.map(np.asarray, record))
            results.append(take(out, slice(0, real)))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)


def _script(paths: Paths, turn: np.ndarray, tries_all: np.ndarray, played: np.ndarray) -> Script:
    size = played.shape[1]
    known_size = paths.number.shape[1]
    # more draws are fixed than any run makes, so that those of one run are not another's
    if known_size > size:
        raise ValueError(KEYS_OF_ITS_OWN)
    key = np.stack([paths.key >> np.uint64(32), paths.key & np.uint64(0xFFFFFFFF)], axis=-1).astype(
        np.uint32
    )
    wide = ((0, 0), (0, size - known_size))
    number = np.pad(paths.number.astype(np.int32), wide, constant_values=NONE)
    low, high = (np.pad(x.astype(np.int32), wide) for x in (paths.low, paths.high))
    entries: Any = np.pad(key, (*wide, (0, 0))), number, low, high
    return Script(*entries, *cast(Any, (turn.astype(np.int32), tries_all, played)))


def _drawn(record: Any) -> Drawn:
    key = (record.key[..., 0].astype(np.uint64) << np.uint64(32)) | record.key[..., 1].astype(
        np.uint64
    )
    exists = np.arange(key.shape[1])[None, :] < record.count[:, None]
    number = np.where(exists, record.number, NONE)
    return Drawn(key, number, record.value, record.log_probs, record.site, record.total)
