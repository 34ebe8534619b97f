"""Speculative sampling: the acceptance rule of Algorithm 1 (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import noise
from jaxspec.base import AcceptRule, Draft, Keys, Law, Verdict

# float32 sums of a residual that is exactly zero come out near 1e-7; a true residual this small is never reached,
# because its mass is the probability of getting there.
NOTHING = 1e-6


@functools.cache
def rejection() -> AcceptRule:
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
        >>> p = jnp.log(jnp.array([[[0.0, 1.0], [0.5, 0.5]]]))
        >>> draft = Draft(jnp.array([[0]]), None, jnp.array([1]))
        >>> keys = noise.row_keys(jax.random.key(0), 1)
        >>> verdict = rejection()(keys, jnp.array([3]), draft, Law(log_probs=p))
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([0], [1])
    """

    def rule(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Law) -> Verdict:
        if target.tokens is not None:
            accepted = draft.tokens == target.tokens[:, :-1]
            count = count_accepted(accepted, draft.length)
            return Verdict(count, _pick(target.tokens, count))
        assert target.log_probs is not None
        coins = noise.uniform(noise.at(keys, position, noise.Purpose.COIN), draft.tokens.shape[1])
        accepted = coins * _probs_of(draft) < _probs_at(target.log_probs[:, :-1], draft.tokens)
        count = count_accepted(accepted, draft.length)
        p = jnp.exp(_pick(target.log_probs, count))
        left = residual(p, _proposal(draft, count, p.shape[-1]))
        next_keys = noise.at(keys, position, noise.Purpose.RESIDUAL)
        return Verdict(count, noise.categorical(next_keys, jnp.log(left)))

    return rule


def count_accepted(accepted: Bool[Array, "B G"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many guesses precede the first that is not accepted, or not real.

    >>> count_accepted(jnp.array([[True, False, True], [True, True, True]]), jnp.array([3, 2])).tolist()
    [1, 2]
    """
    real = jnp.arange(accepted.shape[1], dtype=length.dtype)[None, :] < length[:, None]
    run = jnp.cumprod(jnp.logical_and(accepted, real).astype(length.dtype), axis=1)
    return jnp.sum(run, axis=1).astype(length.dtype)


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """max(p - q, 0), unnormalised; p itself where that is (nearly) nothing, and so where q is 0 (the bonus token).

    >>> residual(jnp.array([[0.5, 0.5]]), jnp.array([[0.25, 0.75]])).tolist()
    [[0.25, 0.0]]
    """
    left = jnp.maximum(p - q, 0.0)
    return jnp.where(jnp.sum(left, axis=-1, keepdims=True) > NOTHING, left, p)


def _probs_of(draft: Draft) -> Float[Array, "B G"]:
    """q(x) of each guess."""
    if draft.log_probs is None:
        return jnp.ones(draft.tokens.shape, jnp.float32)
    return _probs_at(draft.log_probs, draft.tokens)


def _proposal(draft: Draft, count: Int[Array, " B"], vocab: int) -> Float[Array, "B V"]:
    """q at the first rejected guess; 0 where all real guesses were accepted, so that the residual is p."""
    gamma = draft.tokens.shape[1]
    if gamma == 0:
        return jnp.zeros((draft.tokens.shape[0], vocab), jnp.float32)
    index = jnp.minimum(count, gamma - 1)
    if draft.log_probs is None:
        q = (jnp.arange(vocab)[None, :] == _pick(draft.tokens, index)[:, None]).astype(jnp.float32)
    else:
        q = jnp.exp(_pick(draft.log_probs, index))
    return jnp.where((count < draft.length)[:, None], q, 0.0)


def _pick(rows: Array, index: Int[Array, " B"]) -> Array:
    """rows[b, index[b]] for each b."""
    index = index.reshape(-1, *([1] * (rows.ndim - 1)))
    return jnp.take_along_axis(rows, index, axis=1)[:, 0]


def _probs_at(log_probs: Float[Array, "B G V"], tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
    return jnp.exp(jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0])
