"""Speculative sampling: the acceptance rule of Algorithm 1 (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.accept.common import (
    Rule,
    coins,
    count_accepted,
    draw,
    likelihood_ratio,
    match,
    pick,
    probs_at,
    probs_of,
    proposal_at,
    residual,
)
from jaxspec.base import Draft, Keys, Law, Verdict


@functools.cache
def rejection() -> Rule:
    r"""Keep guess x with probability min(1, p(x) / q(x)); at the first rejection draw from norm(max(0, p - q)).

    The output has exactly the target's law, whatever the drafter. A deterministic proposal is a point mass: it is
    accepted with probability p(x), and its residual is p without x. At temperature 0 both laws are point masses, and
    the rule is exact match.

    Returns:
        A rule (keys, position, draft, target) -> Verdict; see `base.AcceptRule`. With B rows, G guesses and V tokens:
        draft.tokens [B, G], draft.log_probs [B, G, V] or None, target.log_probs [B, G + 1, V] or target.tokens
        [B, G + 1].

    Example:
        >>> import jax
        >>> from jaxspec import noise
        >>> p = jnp.log(jnp.array([[[0.0, 1.0], [0.5, 0.5]]]))
        >>> draft = Draft(jnp.array([[0]]), None, jnp.array([1]))
        >>> keys = noise.row_keys(jax.random.key(0), 1)
        >>> verdict = rejection()(keys, jnp.array([3]), draft, Law(log_probs=p))
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([0], [1])
    """

    def judge(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        if target.tokens is not None:
            return match(draft, target.tokens)
        assert target.log_probs is not None
        accepted = coins(keys, position, draft) * probs_of(draft) < probs_at(target.log_probs[:, :-1], draft.tokens)
        count = count_accepted(accepted, draft.length)
        return Verdict(count, after(keys, position, draft, target, count))

    return Rule(judge, "rejection", exact=True, kept_ratio=kept_ratio)


def kept_ratio(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """min(p, q) / p."""
    return jnp.minimum(likelihood_ratio(log_p, log_q, tokens), 1.0)


def after(
    keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law, count: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The token after `count` kept guesses: from the residual, or from p itself behind the last real guess."""
    assert target.log_probs is not None
    p = jnp.exp(pick(target.log_probs, count))
    return draw(keys, position, jnp.log(residual(p, proposal_at(draft, count, p.shape[-1]))))
