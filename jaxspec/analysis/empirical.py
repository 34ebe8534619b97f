"""Sampled frequencies: what a rule emits for two known distributions, and how near that comes to the target's own.

Axis letters as in `jaxspec.base`: N rounds, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from jaxspec import noise
from jaxspec.base import Distribution, Draft, Rule


def first_tokens(rule: Rule, p: ArrayLike, q: ArrayLike, rounds: int, seed: int) -> Int[np.ndarray, " N"]:
    """The first token of many independent rounds of one draft token: that token, if accepted, or what replaces it.

    Args:
        rule: what judges the draft token.
        p, q: distributions of target and drafter [V].
        rounds: how many.
        seed: of all that is drawn.

    Example, whose draft token is always wrong:
        >>> from jaxspec import accept
        >>> first_tokens(accept.rejection(), [0.0, 1.0], [1.0, 0.0], rounds=3, seed=0).tolist()
        [1, 1, 1]
    """
    log_p, log_q = (jnp.log(jnp.asarray(distribution, jnp.float32)) for distribution in (p, q))
    keys, position = noise.row_keys(jax.random.key(seed), rounds), jnp.zeros(rounds, jnp.int32)
    many = jnp.broadcast_to(log_q, (rounds, len(log_q)))
    draft_token = noise.categorical(noise.at(keys, position, noise.Purpose.DRAFT), many)
    draft = Draft(draft_token[:, None], jnp.ones(rounds, jnp.int32), log_probs=many[:, None])
    verdict = rule.verify(keys, position, draft, Distribution(jnp.broadcast_to(log_p, (rounds, 2, len(log_p)))))
    return np.asarray(jnp.where(verdict.num_accepted > 0, draft_token, verdict.next_token))


def l1_distance(tokens: Int[np.ndarray, " N"], p: ArrayLike, counts: ArrayLike) -> Float[np.ndarray, " counts"]:
    """sum_x |share of x among the first n tokens - p(x)|, for each n of `counts`.

    Raises:
        ValueError: an n below 1 or beyond the tokens.

    >>> l1_distance(np.array([0, 1, 1, 1]), [0.5, 0.5], [1, 2, 4]).tolist()
    [1.0, 0.0, 0.5]
    """
    p, counts = np.asarray(p, np.float64), np.asarray(counts)
    if counts.min() < 1 or counts.max() > len(tokens):
        raise ValueError(f"counts go from {counts.min()} to {counts.max()}: expected 1 to {len(tokens)}, the tokens")
    shares = (np.bincount(tokens[:n], minlength=len(p)) / n for n in counts)
    return np.array([np.abs(share - p).sum() for share in shares])


def noise_distance(p: ArrayLike, counts: ArrayLike) -> Float[np.ndarray, " counts"]:
    """What `l1_distance` is on average for n independent samples of p itself: sum_x sqrt(2 p (1 - p) / (pi n)), nearly.

    >>> noise_distance([0.5, 0.5], [100, 10_000]).round(4).tolist()
    [0.0798, 0.008]
    """
    p = np.asarray(p, np.float64)
    return np.sqrt(2 * p * (1 - p) / np.pi).sum() / np.sqrt(np.asarray(counts, np.float64))
