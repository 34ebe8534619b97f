"""The independence of the draws on a path, which their enumeration assumes.

They are independent if no two draws that matter have the same key, in one call or in two. Under
`rules.block` a verdict depends on draft tokens after the accepted ones. There a later round that
uses their noise again is biased.

A decoder that shares noise on purpose (`rules.coupled` with a coupled drafter) needs another proof.
Suppose that every committed token is a draw with the TOKEN noise of its position, from a
distribution that the tokens before it determine. Then the text is plain sampling's from those
distributions, however often that noise was drawn.

N is a number of paths.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, UInt64

from jaxspec.core import noise
from jaxspec.testing.outcomes import Ends
from jaxspec.testing.paths import SAME, is_uniform, normalised, take
from jaxspec.testing.script import row_keys
from jaxspec.testing.tables import SequenceDistribution
from jaxspec.testing.tape import CALL

# [N], the keys that each path has used: {key: the place in the code that drew with it}
Used = np.ndarray
# Prefix -> distributions that the token after it may be drawn from.
Distributions = dict[tuple[int, ...], list[np.ndarray]]


def nothing_used(count: int) -> Used:
    """Returns the used keys of paths that have used none."""
    return np.array([{} for _ in range(count)], object)


class Draws:
    """The noise that draws of an enumeration share, call after call.

    Args:
        steps: the number of tokens of a text that are looked at.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._shared: str | None = None  # two draws on one path with one key, in words
        self._unread: list[Ends] = []  # calls not yet tried as plain sampling
        self._distributions: Distributions = {}

    def record(self, sites: list[str], ends: Ends, used: Used) -> Used:
        """Adds a call.

        Returns:
            The used keys of each path after it.
        """
        used = self._spend(sites, ends, used)
        self._unread.append(ends)
        while self._shared is not None and self._unread:
            if not self._are_plain(self._unread.pop(0)):
                raise ValueError(
                    f"two draws share their noise, {self._shared}: their outcomes cannot be "
                    "enumerated as independent. Key each draw by noise.at(keys, position, "
                    "purpose), with the row's length at the beginning of the round as its "
                    "position, a purpose for each kind of draw, and jax.random.fold_in for "
                    "several of a kind. (Noise may be shared where all tokens are plain "
                    "sampling's own draws: see rules.coupled.)"
                )
        return used

    def distribution(self, enumerated: SequenceDistribution) -> SequenceDistribution:
        """Returns the distribution of the sequences: the enumerated one if draws were independent,
        or plain sampling's.
        """
        if self._shared is None:
            return enumerated
        after = self._distributions
        return {
            x: math.prod(float(after[x[:position]][0][token]) for position, token in enumerate(x))
            for x in enumerated
        }

    def _spend(self, sites: list[str], ends: Ends, used: Used) -> Used:
        """Adds the keys of a call to those that were used, and notes the first that was used
        before.
        """
        now = np.empty(len(ends.source), object)
        for path, source in enumerate(ends.source.tolist()):
            now[path], calls = dict(used[source]), dict[int, int]()
            for draw in np.flatnonzero(ends.fixed[path]):
                key = int(ends.drawn.key[path, draw])
                call = int(ends.drawn.number[path, draw]) // CALL
                site = sites[ends.drawn.site[path, draw]]
                earlier = key in used[source]
                if (earlier or calls.get(key, call) != call) and self._shared is None:
                    if earlier:
                        when = "of an earlier round"
                    else:
                        when = "of the same round"
                    self._shared = f"{site} and, {when}, {now[path][key]}"
                calls[key] = call
                now[path][key] = site
        return now

    def _are_plain(self, ends: Ends) -> bool:
        """Tells whether every token that a call committed is a draw from a distribution of its
        prefix.

        Of the distributions of a prefix only those stay that fit all of its draws.
        """
        count, capacity = ends.state.tokens.shape
        position = jnp.arange(capacity, dtype=jnp.int32)
        start = ends.state.start
        keys = noise.at(row_keys(jnp.zeros(capacity, jnp.int32)), position, noise.Purpose.TOKEN)
        token_keys = _numbers(np.asarray(jax.random.key_data(keys)))
        probs = normalised(ends.drawn.log_probs)
        token = ~is_uniform(ends.drawn.number)
        for path in range(count):
            row = ends.state.tokens[path]
            fixed = ends.fixed[path]
            drawn = take(ends.drawn, path)
            for at_end in range(
                ends.before[path], min(ends.state.length[path], start[path] + self._steps)
            ):
                right = (
                    fixed
                    & token[path]
                    & (drawn.key == token_keys[at_end])
                    & (drawn.value == row[at_end])
                )
                prefix = tuple(row[start[path] : at_end].tolist())
                matching = [probs[path, index] for index in np.flatnonzero(right)]
                fitting = self._distributions.get(prefix, matching)
                self._distributions[prefix] = [
                    x for x in fitting if any(np.abs(x - y).max() < SAME for y in matching)
                ]
                if not self._distributions[prefix]:
                    return False
        return True


def merged(used: Used, which: Int[np.ndarray, " N"]) -> Used:
    """Joins the used keys of paths that are merged; `which` has each path's merged path."""
    together = nothing_used(which.max(initial=-1) + 1)
    for group, keys in zip(which, used, strict=True):
        together[group] = together[group] | keys
    return together


def _numbers(keys: Int[np.ndarray, "N 2"]) -> UInt64[np.ndarray, " N"]:
    return (keys[:, 0].astype(np.uint64) << np.uint64(32)) | keys[:, 1].astype(np.uint64)
