"""Synthetic acceptance: verdicts that are drawn, not judged, to time a pair as if its alpha were this."""

from __future__ import annotations

import functools

from jaxtyping import Array, Int

from jaxspec.accept.common import chain_verdict, count_accepted, sample_residual, take_position, uniforms
from jaxspec.base import Distribution, Draft, Keys, Rule, Verdict


@functools.cache
def random_verdicts_for_benchmarks(alpha: float) -> Rule:
    r"""NOT a rule to decode with: accepts each draft token with probability alpha, whatever the two distributions are.

    The time of speculative decoding depends on how many draft tokens are accepted and not on which, so models of random
    weights, which agree on nothing, decode in the time of trained ones whose acceptance rate is alpha: a round accepts
    k < gamma draft tokens with probability alpha^k (1 - alpha), the distribution behind Equation 1 of the paper. The
    text is nonsense: draft tokens are accepted that the target would never generate, and the token after them is the
    target's argmax, or drawn from its distribution. The rule is marked inexact, and no name in `jaxspec.accept` or on
    the command line leads to it.

    Args:
        alpha: probability of accepting a draft token.

    Raises:
        ValueError: alpha is not from 0 to 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxspec import noise
        >>> draft, keys = Draft(jnp.array([[4, 9]]), jnp.array([2])), noise.row_keys(jax.random.key(0), 1)
        >>> for alpha in (0, 1):
        ...     rule = random_verdicts_for_benchmarks(alpha)
        ...     verdict = rule.verify(keys, jnp.array([3]), draft, Distribution(tokens=jnp.array([[4, 9, 6]])))
        ...     verdict.num_accepted.tolist(), verdict.next_token.tolist(), rule.exact
        ([0], [4], False)
        ([2], [6], False)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: expected a probability, 0 to 1")

    def verify(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution) -> Verdict:
        count = count_accepted(uniforms(keys, position, draft) < alpha, draft.length)
        if target.tokens is not None:
            return chain_verdict(draft, count, take_position(target.tokens, count))
        assert target.log_probs is not None
        next_token = sample_residual(keys, position, take_position(target.log_probs, count))
        return chain_verdict(draft, count, next_token)

    return Rule(verify, f"random verdicts for benchmarks({alpha:g})", exact=False)
