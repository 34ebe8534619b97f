"""The target's pass over a draft, and its laws there, as wide as the longest draft of the batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.base import Cache, Forward, Law

T = TypeVar("T", Forward, Law)


class Read(NamedTuple):
    """What a pass of the target has read: its Forward, the cache behind it, and the law at each position."""

    forward: Forward
    cache: Cache
    law: Law


def widths(gamma: int, chosen: bool, abstains: bool) -> tuple[int, ...]:
    """Tokens that a pass may be over: each is a program of its own, so there are few.

    Args:
        gamma: most guesses.
        chosen: whether a policy chooses the length of drafts; passes over 1, 2, 4, 8, ... and gamma + 1 tokens are then
            programs of their own (matrix units work on powers of two, so 3 tokens cost what 4 do).
        abstains: whether there may be no guess at all.

    >>> widths(7, chosen=True, abstains=False), widths(7, False, True), widths(7, False, False)
    ((1, 2, 4, 8), (1, 8), (8,))
    """
    if chosen:
        return (*(1 << i for i in range(gamma.bit_length()) if 1 << i <= gamma), gamma + 1)
    return (1, gamma + 1) if abstains else (gamma + 1,)


def verify(read: Callable[[int, Cache], Read], cache: Cache, longest: Int[Array, ""], choices: tuple[int, ...]) -> Read:
    """The narrowest pass that reads each row's last token and all guesses.

    Args:
        read: makes a pass over so many tokens.
        cache: of the target.
        longest: the most guesses that any row has; what follows them need not be read. There is a position for each
            token of the widest pass nonetheless, zeros where nothing was read.
        choices: of `widths`.
    """
    if len(choices) == 1:
        return read(choices[0], cache)

    def over(width: int, cache: Cache) -> Read:
        forward, cache, law = read(width, cache)
        return Read(_padded(forward, choices[-1]), cache, _padded(law, choices[-1]))

    index = jnp.sum(jnp.asarray(choices[:-1]) < longest + 1)
    return jax.lax.switch(index, [functools.partial(over, width) for width in choices], cache)


def _padded(positions: T, width: int) -> T:
    """The same with `width` positions [B, T, ..]; what has none stays.

    >>> _padded(Law(jnp.ones((1, 2, 3)), greedy=jnp.array([True])), 5).log_probs.shape
    (1, 5, 3)
    """

    def pad(x: Array) -> Array:
        return x if x.ndim < 2 else jnp.pad(x, [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, positions)
