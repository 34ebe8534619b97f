"""The target's pass over a draft, as wide as the longest draft of the batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.base import Cache, Forward, LanguageModel, Params


def widths(gamma: int, chosen: bool, abstains: bool) -> tuple[int, ...]:
    """Tokens that a pass may be over: each is a program of its own, so there are few.

    Args:
        gamma: most guesses.
        chosen: whether a policy chooses the length of drafts; drafts of 0, 1, 2, 4, 8, ... and gamma guesses then get
            a pass of their own.
        abstains: whether there may be no guess at all.

    >>> widths(7, chosen=True, abstains=False), widths(7, False, True), widths(7, False, False)
    ((1, 2, 3, 5, 8), (1, 8), (8,))
    """
    if chosen:
        powers = [1 << i for i in range(gamma.bit_length()) if 1 << i < gamma]
        return tuple(1 + guesses for guesses in (0, *powers, gamma))
    return (1, gamma + 1) if abstains else (gamma + 1,)


def verify(
    target: LanguageModel,
    params: Params,
    cache: Cache,
    fed: Int[Array, "B T"],
    longest: Int[Array, ""],
    choices: tuple[int, ...],
) -> tuple[Forward, Cache]:
    """One pass of the target over each row's last token and its guesses.

    Args:
        fed: the last token, then gamma guesses.
        longest: the most guesses that any row has; what follows them need not be read. The Forward has a position for
            each token of `fed` nonetheless, zeros where nothing was read.
        choices: of `widths`.
    """
    if len(choices) == 1:
        return target.extend(params, cache, fed)

    def over(width: int, cache: Cache) -> tuple[Forward, Cache]:
        forward, cache = target.extend(params, cache, fed[:, :width])
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, fed.shape[1] - width), (0, 0))), forward), cache

    index = jnp.sum(jnp.asarray(choices[:-1]) < longest + 1)
    return jax.lax.switch(index, [lambda cache, w=width: over(w, cache) for width in choices], cache)
