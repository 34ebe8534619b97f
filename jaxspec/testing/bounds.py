"""The bound of an inexact rule's text, by the exact distributions of its tokens and of plain
sampling's.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxspec.testing.tables import SequenceDistribution


def excess(
    distribution: SequenceDistribution,
    plain: SequenceDistribution,
    bound: Callable[[Array], Array],
    vocab: int,
) -> float:
    """Computes the largest excess of a text beginning's probability over a bound; 0 or less: none
    does.

    A bound says, of the target's distribution, how probable each token may be given what precedes
    it. The probability of the preceding tokens is taken from `distribution`: a rare beginning
    cannot exceed by much.

    Args:
        distribution: the distribution of a decoder's tokens, without end tokens
            (`decoder_distribution`).
        plain: the target's (`plain_distribution`), of as many tokens.
        bound: log probabilities [V] -> [V]; see `rules.catalogue`.
        vocab: V.

    Example:
        >>> plain = {(0,): 0.5, (1,): 0.5}
        >>> excess({(0,): 0.9, (1,): 0.1}, plain, lambda log_p: 1.5 * jnp.exp(log_p), vocab=2)
        0.15
    """
    followers = _followers(distribution, vocab)
    plain_followers = _followers(plain, vocab)
    largest = -np.inf
    for before, mass in followers.items():
        p = plain_followers[before]
        allowed = np.asarray(bound(jnp.log(jnp.asarray(p / p.sum(), jnp.float32))), np.float64)
        largest = max(largest, float((mass - mass.sum() * allowed).max()))
    return round(largest, 12)


def _followers(
    distribution: SequenceDistribution, vocab: int
) -> dict[tuple[int, ...], Float[np.ndarray, " V"]]:
    """Returns the probability of each beginning of a text with each token after it."""
    followers: dict[tuple[int, ...], Float[np.ndarray, " V"]] = {}
    for tokens, probability in distribution.items():
        for position, token in enumerate(tokens):
            followers.setdefault(tokens[:position], np.zeros(vocab))[token] += probability
    return followers
