"""Whether the draws on a path are independent of each other, as their enumeration takes for granted.

They are if no two of them have the same key, be it in one call or in two. Where a verdict depends on guesses behind the
kept ones, as under `accept.block`, a later round that guesses with their noise again is biased indeed.

A decoder that shares noise on purpose (`accept.coupled` with a drafter that is coupled, too) needs another proof: if
every token that is committed is the outcome of a draw with the TOKEN noise of its position, from a law that the tokens
before it determine, then the text is plain sampling's from those laws, however often that noise was drawn.

N is a number of paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxspec import noise
from jaxspec.testing.outcomes import SAME, Ends, normalised
from jaxspec.testing.script import Event, row_keys
from jaxspec.testing.tables import SequenceLaw

Used = np.ndarray  # [N], of each path the keys that it has used: {key: the draw that used it}
NOTHING_USED = np.array([{}], object)
Laws = dict[tuple[int, ...], list[np.ndarray]]  # of each prefix, the laws that its next token may be a draw from


class Draws:
    """What the draws of an enumeration have in common, call after call."""

    def __init__(self) -> None:
        self._shared: str | None = None  # two draws on one path with one key, in words
        self._unread: list[tuple[Sequence[Event], Ends]] = []  # calls not yet tried as plain sampling
        self._laws: Laws = {}

    def record(self, events: Sequence[Event], ends: Ends, used: Used) -> Used:
        """Adds a call.

        Args:
            events: its draws.
            ends: what it led to.
            used: of each row that it began with, the keys that were used.

        Returns:
            Of each path the keys that are used now.

        Raises:
            ValueError: draws share a key, and not every token is plain sampling's.
        """
        used = self._spend(events, ends, used)
        self._unread.append((events, ends))
        while self._shared is not None and self._unread:
            if not _plain_tokens(self._laws, *self._unread.pop(0)):
                raise ValueError(
                    f"two draws share their noise, {self._shared}: their outcomes cannot be enumerated as independent. "
                    "Key each draw by noise.at(keys, position, purpose), with the row's length at the beginning of the "
                    "round as its position, a purpose for each kind of draw, and jax.random.fold_in for several of a "
                    "kind. (Noise may be shared where all tokens are plain sampling's own draws: see accept.coupled.)"
                )
        return used

    def law(self, enumerated: SequenceLaw) -> SequenceLaw:
        """The law of the sequences that were found: as enumerated, if draws were independent, or plain sampling's."""
        if self._shared is None:
            return enumerated
        laws = self._laws
        return {x: math.prod(float(laws[x[:at]][0][token]) for at, token in enumerate(x)) for x in enumerated}

    def _spend(self, events: Sequence[Event], ends: Ends, used: Used) -> Used:
        """Adds the keys of a call to those that were used, and notes the first that was used before."""
        keys = np.where(ends.seen.used, _numbers(np.asarray(ends.seen.keys)), 0)
        each = np.column_stack([ends.source.astype(np.uint64), keys])
        calls, which = np.unique(each, axis=0, return_inverse=True)  # few: outcomes hardly ever change later keys
        spent = np.empty(len(calls), object)
        for index, (source, *call) in enumerate(calls.tolist()):
            spent[index] = dict(used[source])
            for event, key in zip(events, call, strict=True):
                if key and key in spent[index] and self._shared is None:
                    when = "of an earlier round" if key in used[source] else "of the same round"
                    self._shared = f"{event.what} and, {when}, {spent[index][key]}"
                if key:
                    spent[index][key] = event.what
        return spent[which.reshape(-1)]


def merged(used: Used, which: Int[np.ndarray, " N"]) -> Used:
    """What any of the paths has used that are merged into one; `which` one, for each path."""
    together = np.array([{} for _ in range(which.max() + 1)], object)
    for group, keys in zip(which, used, strict=True):
        together[group] = together[group] | keys
    return together


def _numbers(keys: Int[np.ndarray, "*shape 2"]) -> Int[np.ndarray, "*shape"]:
    """Data of keys, each as one number."""
    return (keys[..., 0].astype(np.uint64) << np.uint64(32)) | keys[..., 1].astype(np.uint64)


def _plain_tokens(laws: Laws, events: Sequence[Event], ends: Ends) -> bool:
    """Whether every token that a call committed is a draw from one of its prefix's laws; leaves only those that fit."""
    count, room = ends.state.tokens.shape
    at = noise.at(row_keys(jnp.zeros(room, jnp.int32)), jnp.arange(room, dtype=jnp.int32), noise.Purpose.TOKEN)
    own = _numbers(np.asarray(jax.random.key_data(at)))
    draws = [index for index, event in enumerate(events) if event.kind == "token"]
    keys, used = _numbers(np.asarray(ends.seen.keys))[:, draws], np.asarray(ends.seen.used)[:, draws]
    every = [normalised(np.asarray(law)) for law in ends.seen.laws]
    for path in range(count):
        row = ends.state.tokens[path]
        for position in range(ends.before[path], ends.state.length[path]):
            right = used[path] & (keys[path] == own[position]) & (ends.draws[path] == row[position])
            prefix = tuple(row[ends.state.start[path] : position].tolist())
            drawn = [every[index][path] for index in np.flatnonzero(right)]
            laws[prefix] = [x for x in laws.get(prefix, drawn) if any(np.abs(x - y).max() < SAME for y in drawn)]
            if not laws[prefix]:
                return False
    return True
