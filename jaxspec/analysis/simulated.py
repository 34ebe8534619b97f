"""Verdicts that are drawn, not judged: what a pair would gain if its alpha were this. For benchmarks alone."""

from __future__ import annotations

import functools

from jaxtyping import Array, Int

from jaxspec.accept import Rule
from jaxspec.accept.common import coins, count_accepted, draw, pick
from jaxspec.base import Draft, Keys, Law, Verdict


@functools.cache
def random_verdicts_for_benchmarks(alpha: float) -> Rule:
    r"""NOT a rule to decode with: keeps each guess with probability alpha, whatever target and drafter say of it.

    The time of speculative decoding depends on how many guesses are kept and not on which, so models of random weights,
    which agree on nothing, decode in the time of trained ones whose acceptance rate is alpha: a round keeps k < gamma
    guesses with probability alpha^k (1 - alpha), the law behind Equation 1 of the paper. The text is nonsense: guesses
    are kept that the target would never say, and the token behind them is the target's argmax, or drawn from its law.
    The rule says that it is not exact, and no name in `jaxspec.accept` or on the command line leads to it.

    Args:
        alpha: probability of keeping a guess.

    Raises:
        ValueError: alpha is not from 0 to 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxspec import noise
        >>> draft, keys = Draft(jnp.array([[4, 9]]), None, jnp.array([2])), noise.row_keys(jax.random.key(0), 1)
        >>> for alpha in (0, 1):
        ...     rule = random_verdicts_for_benchmarks(alpha)
        ...     verdict = rule(keys, jnp.array([3]), draft, Law(tokens=jnp.array([[4, 9, 6]])))
        ...     verdict.num_accepted.tolist(), verdict.next_token.tolist(), rule.exact
        ([0], [4], False)
        ([2], [6], False)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: expected a probability, 0 to 1")

    def judge(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        count = count_accepted(coins(keys, position, draft) < alpha, draft.length)
        if target.tokens is not None:
            return Verdict(count, pick(target.tokens, count))
        assert target.log_probs is not None
        return Verdict(count, draw(keys, position, pick(target.log_probs, count)))

    return Rule(judge, f"random verdicts for benchmarks({alpha:g})", exact=False)
