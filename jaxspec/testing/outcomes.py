"""The outcomes of one call of a decoder, by splitting its draws until no open one matters.

A *path* fixes some of a row's draws: a token has one value, a uniform lies in an interval. The
others are open. A path is finished when the call does the same in all completions of it that are
tried:

* every combination of the open draws' values, a uniform at both its ends, up to `EVERY`
  combinations;
* otherwise some combinations, more for likelier paths (`LEAST` to `MOST`), such that each open draw
  takes each of its values, a uniform its ends and points in between. What shows only where several
  open draws take particular values at once may then be missed in one path.

A path that is not finished is split by one draw: a token into its values, a uniform at the point
where the call begins to do something else. Bisection over the 2^23 values of `jax.random.uniform`
finds that point (`splitting`). Any order of the draws would do; the order decides the number of
paths.

The weight of a path is the product of the probabilities of its tokens, which must not depend on an
open draw either, and of the widths of its uniforms' intervals. The paths from one row must add up
to its weight.

N is a number of paths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxspec.core import State
from jaxspec.testing.paths import (
    KEYS_OF_ITS_OWN,
    NONE,
    Drawn,
    Paths,
    Runs,
    Watch,
    differ,
    is_uniform,
    matches,
    normalised,
    take,
)
from jaxspec.testing.script import ScriptedCall
from jaxspec.testing.splitting import Contexts, split
from jaxspec.testing.tape import UNIFORMS

CHUNK = 128  # rows of one run, if they fit into ...
MEMORY = 1 << 30  # ... so many bytes, about
LOOKS = 6  # completions that tell whether a path is worth more of them
# completions of one path, and about how many of all: see above
LEAST = 24
MOST = 243
ALL_TRIED = 20_000
EVERY = 1000
AT_ONCE = 256  # paths
TURNS = 5040  # from the first completion of some paths to that of the next ones
PATIENCE = 50  # times that a path is looked at before it is given up

Weight = Float[np.ndarray, " N"]
TRY = (
    "Try gamma=1 and steps=2, a drafter that draws nothing (a look-up), or a rule that decides "
    "each draft token by a draw of its own"
)


class NotEnumerable(RuntimeError):
    """The outcomes of a decoder's round cannot be enumerated. This says nothing of whether the
    decoder is exact.
    """

    def __init__(self, reason: str):
        super().__init__(
            f"certify cannot enumerate this decoder, which may be right or wrong: {reason}. {TRY}"
        )


class Ends(NamedTuple):
    """The outcomes of a call."""

    state: State  # after the call, its keys taken out
    weight: Weight  # the probability of each path
    source: Int[np.ndarray, " N"]  # the row that it began with
    # the length of that row; for a call that makes rows, where their new tokens begin
    before: Int[np.ndarray, " N"]
    drawn: Drawn  # the draws of each path
    # True for draws that the path fixes; the outcome depends on these
    fixed: Bool[np.ndarray, "N E"]


class Outcomes:
    """One call of a program from each of some rows.

    Args:
        program: the program to call (`script.ScriptedCall`).
        shared: arguments that all rows have in common.
        rows: a tree of numpy arrays, rows first.
        watch: the part of the state after the call that tells paths apart; by default everything.
    """

    def __init__(
        self, program: ScriptedCall, shared: Any, rows: Any, watch: Watch = jax.tree.leaves
    ):
        row_bytes = 64 + sum(leaf[:1].nbytes for leaf in jax.tree.leaves(rows))
        fitting = MEMORY // (16 * row_bytes)  # inputs, outputs and what is in between
        chunk = min(CHUNK, 1 << max(fitting.bit_length() - 1, 0))
        self.runs = Runs(program, shared, rows, watch, chunk)

    def enumerate(self, weight: Weight) -> Ends:
        """Enumerates the outcomes of the call from rows of the given weights."""
        while True:
            try:
                return self._ends(*self._finished(len(weight)), weight)
            except OverflowError:  # with room for more draws then; what was found so far is lost
                continue

    def _finished(self, count: int) -> tuple[Paths, Int[np.ndarray, " N"]]:
        """Splits paths until all are finished, and returns them with a completion of each."""
        paths = Paths.fresh(count)
        turn = 0
        ready = []
        stuck = 0
        while len(paths.source):
            turn += TURNS
            last = take(paths, slice(-AT_ONCE, None))
            paths = take(paths, slice(None, -AT_ONCE))
            last, finished, contexts = self._look(last, turn)
            ready.append((take(last, finished), np.full(finished.sum(), turn)))
            children = split(self.runs, take(last, ~finished), contexts)
            if len(children.source) == len(last.source) and not finished.any():
                stuck = stuck + 1
            else:
                stuck = 0
            if stuck > PATIENCE:
                raise NotEnumerable(self._together(last))
            paths = Paths.joined([paths, children])
        return Paths.joined([done for done, _ in ready]), np.concatenate(
            [turns for _, turns in ready]
        )

    def _together(self, paths: Paths) -> str:
        """Says which draws of a path matter only together."""
        drawn = self.runs.look(
            paths, np.zeros(len(paths.source), int), np.zeros(len(paths.source), bool)
        ).drawn
        is_open = (drawn.number[0] != NONE) & ~matches(paths, drawn.key, drawn.number)[0].any(
            axis=1
        )
        sites = {self.runs.program.sites[site] for site in drawn.site[0][is_open]}
        if not sites:
            raise ValueError(KEYS_OF_ITS_OWN)
        return (
            "the outcome of a round changes with several of its draws, and with none of them "
            f"alone, among {'; '.join(sorted(sites))}"
        )

    def _look(self, paths: Paths, turn: int) -> tuple[Paths, Bool[np.ndarray, " N"], Contexts]:
        """Tries completions of each path.

        Returns:
            The paths that are possible; which of them are finished; and three completions of each
            unfinished one; the first two differ.
        """
        count = len(paths.source)
        # A few completions of each path first: LOOKS rows for each of N paths.
        path = np.arange(count).repeat(LOOKS)
        row = np.arange(count * LOOKS)
        turns = np.tile(turn + np.arange(LOOKS), count)
        no = np.zeros(count * LOOKS, bool)
        seen = self.runs.look(take(paths, path), turns, no)
        share = shares(take(paths, path), seen.drawn).reshape(count, LOOKS).max(axis=1)
        differing = differ(seen, row, seen, path * LOOKS, share[path] == 0).reshape(count, LOOKS)
        finished = ~np.any(differing, axis=1)
        differs = np.arange(count) * LOOKS + np.where(finished, 1, differing.argmax(axis=1))
        total = seen.drawn.total.reshape(count, LOOKS).max(axis=1)
        # Paths whose completions all did the same get more: every one, or the more, the likelier
        # the path is.
        sample = np.clip(ALL_TRIED * share, LEAST, MOST).astype(np.int64)
        tries = np.where(finished, np.where(total <= EVERY, total, sample), 0)
        path = np.arange(count).repeat(tries)
        # A completion's number among its path's.
        number = np.arange(len(path)) - (np.cumsum(tries) - tries)[path]
        tries_all = (total <= EVERY)[path]
        looks = Contexts(turns, no, seen)
        if len(path):
            turns = np.where(tries_all, number, turn + LOOKS + number)
            more = self.runs.look(take(paths, path), turns, tries_all)
            late = np.flatnonzero(
                differ(more, np.arange(len(path)), seen, path * LOOKS, share[path] == 0)
            )
            finished[path[late]] = False
            differs[path[late]] = len(row) + late
            looks = jax.tree.map(
                lambda *both: np.concatenate(both), looks, Contexts(turns, tries_all, more)
            )
        contexts = np.stack(
            [np.arange(count) * LOOKS, differs, np.arange(count) * LOOKS + 2], axis=1
        )
        possible = ~(finished & (share == 0))
        unfinished = take(looks, contexts[~finished].reshape(-1))
        return take(paths, possible), finished[possible], unfinished

    def _ends(self, paths: Paths, turn: np.ndarray, weight: Weight) -> Ends:
        """Runs each path to its outcome, with other keys too: the outcome must be the same with
        any.
        """
        count = len(paths.source)
        chunk = self.runs.chunk
        order = np.argsort(paths.source, kind="stable")
        order = order[np.arange(max(count, chunk)) % count]  # few paths are tried with many keys
        paths, turn = take((paths, turn), order)
        no = np.zeros(len(turn), bool)
        state, drawn = self.runs.states(paths, turn, no)
        played = np.where(drawn.number >= 0, drawn.value, -1).astype(np.int32)
        keys = 1 + np.arange(len(turn), dtype=np.int32) % chunk
        state_anew, drawn_anew = self.runs.states(paths, turn, no, keys, played)
        if not _same(state, state_anew):
            raise ValueError(
                "the decoder's output depends on its keys otherwise than by the functions of "
                "jaxspec.core.noise (by jax.random, or by an argmax of its own over "
                "noise.gumbel): its distribution cannot be enumerated. Draw tokens by "
                "noise.categorical (with `drawn`, if the noise is there already), and numbers by "
                "noise.uniform"
            )
        is_fixed = matches(paths, drawn.key, drawn.number).any(axis=2)
        for row, draw in np.argwhere(is_fixed & (drawn.key == drawn_anew.key))[:1]:
            where = self.runs.program.sites[drawn.site[row, draw]]
            raise ValueError(
                f"{where} has the same key in every row: make it of the row's keys, by noise.at"
            )
        state, drawn, is_fixed, paths = take((state, drawn, is_fixed, paths), slice(0, count))
        share = shares(paths, drawn)
        if np.abs(np.bincount(paths.source, share, len(weight)) - 1).max() > 1e-5:
            raise NotEnumerable(
                "what some token is drawn from depends on another draw, and it was not found on "
                "which"
            )
        rows = self.runs.rows
        if isinstance(rows, State):
            before = rows.length[paths.source]
        else:
            before = state.start
        return Ends(
            state, weight[paths.source] * share, paths.source, np.asarray(before), drawn, is_fixed
        )


def shares(paths: Paths, drawn: Drawn) -> Weight:
    """Computes the probability of each path, given the row that it began with."""
    entries = matches(drawn, paths.key, paths.number)
    log_probs = np.take_along_axis(drawn.log_probs, entries.argmax(axis=2)[:, :, None], axis=1)
    uniform = is_uniform(paths.number)
    value = np.where(uniform, 0, paths.low)
    token = np.take_along_axis(normalised(log_probs), value[:, :, None], axis=2)[
        :, :, 0
    ] * entries.any(axis=2)
    shares_of_draws = np.where(uniform, (paths.high - paths.low) / UNIFORMS, token)
    return np.where(paths.number == -1, 1.0, shares_of_draws).prod(axis=1)


def _same(first: Any, second: Any) -> bool:
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(x, y, equal_nan=True) for x, y in leaves)


def new_tokens(rows: State) -> Int[np.ndarray, "N S"]:
    """Returns the new tokens of each row from column 0, and -1 after them."""
    slot = np.arange(rows.tokens.shape[1])[None, :]
    new = np.take_along_axis(
        np.asarray(rows.tokens), (slot + rows.start[:, None]) % slot.size, axis=1
    )
    return np.where(slot < (rows.length - rows.start)[:, None], new, -1)
