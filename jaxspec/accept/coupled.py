"""Coupled verification: speculative decoding says, token for token, what plain sampling says with the same key."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import noise
from jaxspec.accept.common import Rule, count_accepted, likelihood_ratio, match, pick
from jaxspec.base import Draft, Keys, Law, Verdict


@functools.cache
def coupled() -> Rule:
    """Keep guesses while they are the tokens that plain sampling draws at their positions with the same key.

    The token at position t is argmax_x (log p_t(x) + g_t(x)), with the Gumbel noise g_t of the row's key and of t
    itself, the one that `autoregressive` uses. Which tokens are emitted then does not depend on the drafter, on gamma
    or on where rounds begin, only what they cost; in particular their law is the target's. (Up to the rounding of the
    target's logits: a pass over several tokens is not bit-equal to several passes over one.)

    A guess that is independent of that noise is kept with probability p(x). A drafter that draws its own guesses with
    the same noise (`drafters.model(lm, coupled=True)`, which `jaxspec.generate` takes for this rule) agrees with
    probability at least (1 - d) / (1 + d), where d = 1 - sum_x min(p(x), q(x)). The rejection rule keeps 1 - d: the
    difference is the price of the invariance.

    Returns:
        A rule (keys, position, draft, target) -> Verdict; see `base.AcceptRule`. With B rows, G guesses and V tokens:
        draft.tokens [B, G], draft.log_probs is not read, target.log_probs [B, G + 1, V] or target.tokens [B, G + 1].

    Example:
        >>> keys, position = noise.row_keys(jax.random.key(0), 1), jnp.array([7])
        >>> law = Law(log_probs=jnp.log(jnp.full((1, 3, 9), 1 / 9)))
        >>> plain = [int(noise.categorical(noise.at(keys, position + i, noise.Purpose.TOKEN), law.log_probs[:, i])[0])
        ...          for i in range(3)]
        >>> verdict = coupled()(keys, position, Draft(jnp.array([plain[:2]]), None, jnp.array([2])), law)
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist() == plain[2:]
        ([2], True)

    Reference: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding",
    arXiv 2408.07978.
    """

    def judge(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        if target.tokens is not None:
            return match(draft, target.tokens)
        if draft.gumbel is not None:
            return match_drawn(keys, position, draft, target)
        return match(draft, plain_tokens(keys, position, draft, target))

    return Rule(judge, "coupled", exact=True, plain_noise=True, kept_ratio=kept_ratio)


def kept_ratio(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """P(x wins both races) / p(x) for a guess drawn with the same noise: 1 / sum_y max(p(y), q(y) p(x) / q(x)).

    With exponential arrivals E_y, x wins under p and q if E_y >= E_x max(p(y) / p(x), q(y) / q(x)) for all y.

    >>> p, q = (jnp.log(jnp.array([[[x, 1 - x]] * 2])) for x in (0.5, 0.75))
    >>> [round(x, 3) for x in kept_ratio(p, q, jnp.array([[0, 1]]))[0].tolist()]
    [1.0, 0.5]
    """
    ratio = likelihood_ratio(log_p, log_q, tokens)[..., None]
    known = jnp.where(ratio > 0, ratio, 1.0)
    rivals = jnp.sum(jnp.maximum(jnp.exp(log_p), jnp.exp(log_q) / known), axis=-1)
    return jnp.where(ratio[..., 0] > 0, 1 / rivals, 0.0)


def match_drawn(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
    """The verdict where the drafter has drawn the noise at its guesses: only what follows them all is drawn here."""
    assert target.log_probs is not None and draft.gumbel is not None
    tokens = []
    for i in range(draft.tokens.shape[1]):
        at = noise.at(keys, position + i, noise.Purpose.TOKEN)
        tokens.append(noise.categorical(at, target.log_probs[:, i], drawn=draft.gumbel[:, i]))
    plain = jnp.stack(tokens, axis=1)
    count = count_accepted(draft.tokens == plain, draft.length)
    whole = count == draft.length
    last = noise.at(keys, position + draft.length, noise.Purpose.TOKEN)
    bonus = noise.categorical(last, pick(target.log_probs, draft.length), whole)
    return Verdict(count, jnp.where(whole, bonus, pick(plain, jnp.minimum(count, plain.shape[1] - 1))))


def plain_tokens(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Int[Array, "B G+1"]:
    """What plain sampling draws from `position` on, up to each row's first wrong guess; anything behind it.

    A draw over a vocabulary costs more than the rest of the rule, so none is made that no row needs.
    """
    assert target.log_probs is not None
    log_probs, guesses = target.log_probs, jnp.pad(draft.tokens, ((0, 0), (0, 1)))

    def one(right: Bool[Array, " B"], i: Int[Array, ""]):
        law, guess = (jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False) for x in (log_probs, guesses))
        at = noise.at(keys, position + i.astype(position.dtype), noise.Purpose.TOKEN)
        token = noise.categorical(at, law, right)
        return jnp.logical_and(right, jnp.logical_and(i < draft.length, guess == token)), token

    count = jnp.arange(log_probs.shape[1], dtype=draft.length.dtype)
    return jax.lax.scan(one, jnp.ones(position.shape, bool), count)[1].T
