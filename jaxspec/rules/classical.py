"""Classical rejection sampling, not iterated (Leviathan et al., arXiv 2211.17192, appendix A.2):
for comparison.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Trials, Verdict
from jaxspec.rules import common


@functools.lru_cache
def classical_rejection() -> Rule:
    r"""Accept draft token x with probability p(x) / (M q(x)), M = max_x p(x) / q(x); otherwise draw
    from p, unmodified.

    The output has exactly the target's distribution: p / M + (1 - 1 / M) p = p. A draft token is
    accepted with probability 1 / M = min_x q(x) / p(x) over the tokens that p allows. That is at
    most the rejection rule's sum_x min(p(x), q(x)), and 0 if q lacks a token that p has. A
    deterministic proposal is accepted only if p is certain of it. The rule is a baseline:
    speculative sampling improves on it.

    Example:
        >>> p, q = jnp.array([[[0.5, 0.5]]]), jnp.array([[[0.25, 0.75]]])
        >>> smallest_ratio(
        ...     p, q
        ... ).tolist()  # the rejection rule would accept it with probability 0.75
        [[0.5]]
    """

    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        assert target.log_probs is not None
        p = jnp.exp(target.log_probs[:, :-1])
        scale = smallest_ratio(p, common.draft_distributions(draft, p.shape[-1]))
        threshold = scale * common.gather_probs(target.log_probs[:, :-1], draft.tokens)
        count = common.count_accepted(
            common.uniforms(keys, position, draft) * common.draft_probs(draft) < threshold,
            draft.length,
        )
        next_token = common.sample_residual(
            keys, position, common.take_position(target.log_probs, count)
        )
        return common.chain_verdict(draft, count, next_token)

    def acceptance_ratio(
        log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
    ):
        """(p / M) / p, the same for every token."""
        return smallest_ratio(jnp.exp(log_p), jnp.exp(log_q))

    def trials(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Trials:
        assert target.log_probs is not None
        p = jnp.exp(target.log_probs[:, :-1])
        scale = smallest_ratio(p, common.draft_distributions(draft, p.shape[-1]))
        p_of_token = scale * common.gather_probs(target.log_probs[:, :-1], draft.tokens)
        acceptance = common.probability_of_passing(p_of_token, common.draft_probs(draft))
        # After a rejection the token is drawn from p itself: there is no residual.
        return Trials(
            common.uniforms(keys, position, draft), acceptance, jnp.full_like(acceptance, jnp.nan)
        )

    return common.rule_of(
        "classical_rejection", verify, acceptance_ratio=acceptance_ratio, trials=trials
    )


def smallest_ratio(p: Float[Array, "B G V"], q: Float[Array, "B G V"]) -> Float[Array, "B G"]:
    """min_x q(x) / p(x) over the tokens of nonzero p: how often a draft token is accepted."""
    return jnp.min(jnp.where(p > 0, q / jnp.where(p > 0, p, 1.0), jnp.inf), axis=-1)
