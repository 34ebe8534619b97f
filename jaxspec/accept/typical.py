"""Typical acceptance (Cai et al., Medusa, arXiv 2401.10774): accept what the target finds plausible. Inexact."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.accept.common import (
    chain_verdict,
    count_accepted,
    likelihood_ratio,
    match,
    sample_residual,
    take_position,
)
from jaxspec.base import Distribution, Draft, Keys, Rule, Verdict


@functools.cache
def typical(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    r"""Inexact: accept draft token x if p(x) > min(epsilon, delta exp(-H(p))), where H is the entropy; then draw from
    p.

    An unsure target (large entropy) lets less likely tokens pass. Nothing is random: what is accepted depends on the
    draft tokens, so the output leans towards the drafter.
    Guarantee: given what precedes it, a token at or below the threshold has a probability of at most p(x); so it is
    no likelier than in plain sampling. For tokens above the threshold there is no bound.

    At temperature 0, where p is certain, the rule is exact match.

    Args:
        epsilon: hard threshold; by default Medusa's.
        delta: factor of the threshold that depends on the entropy; by default Medusa's.

    Returns:
        A `base.Rule`. With B rows, G draft tokens and V tokens:
        draft.tokens [B, G], draft.log_probs is not read, target.log_probs [B, G + 1, V] or target.tokens [B, G + 1].

    Raises:
        ValueError: a threshold that is not in (0, 1].

    Example:
        >>> import jax
        >>> from jaxspec import noise
        >>> p = jnp.log(jnp.array([[[0.9, 0.1], [0.5, 0.5]]]))  # the threshold is min(0.5, 0.4 exp(-0.325)) = 0.289
        >>> keys = noise.row_keys(jax.random.key(0), 1)
        >>> for token in (0, 1):
        ...     draft = Draft(jnp.array([[token]]), jnp.array([1]))
        ...     typical(0.5, 0.4).verify(keys, jnp.array([3]), draft, Distribution(log_probs=p)).num_accepted.tolist()
        [1]
        [0]
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} is {value}: expected a number in (0, 1]")

    def verify(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution) -> Verdict:
        if target.tokens is not None:
            return match(draft, target.tokens)
        assert target.log_probs is not None
        count = count_accepted(plausible(target.log_probs[:, :-1], draft.tokens), draft.length)
        next_token = sample_residual(keys, position, take_position(target.log_probs, count))
        return chain_verdict(draft, count, next_token)

    def plausible(log_p: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Bool[Array, "B T"]:
        return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0] > threshold(log_p, epsilon, delta)

    def acceptance_ratio(log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]):
        """q / p, or nothing."""
        return jnp.where(plausible(log_p, tokens), likelihood_ratio(log_p, log_q, tokens), 0.0)

    return Rule(verify, f"typical({epsilon:g}, {delta:g})", exact=False, acceptance_ratio=acceptance_ratio)


def threshold(log_probs: Float[Array, "*shape V"], epsilon: float, delta: float) -> Float[Array, "*shape"]:
    """log min(epsilon, delta exp(-H(p))): what a draft token's log probability must exceed.

    >>> round(float(jnp.exp(threshold(jnp.log(jnp.array([[[0.5, 0.5]]])), 0.9, 0.3))[0, 0]), 4)  # 0.3 / 2
    0.15
    """
    return jnp.minimum(math.log(epsilon), math.log(delta) - entropy(log_probs))


def entropy(log_probs: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """H(p) = -sum_x p(x) log p(x) in nats, where tokens of probability 0 count for nothing.

    >>> round(float(entropy(jnp.log(jnp.array([[[0.5, 0.5, 0.0]]])))[0, 0]), 4)
    0.6931
    """
    finite = jnp.maximum(log_probs, jnp.finfo(log_probs.dtype).min)
    return -jnp.einsum("...v,...v->...", jnp.exp(log_probs), finite)  # a sum with exp in it is not vectorised on CPU
