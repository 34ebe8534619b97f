"""Iterated speculative sampling: several proposals for one position, tried in turn. The step under token trees."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import noise
from jaxspec.accept.common import draw, pick, residual
from jaxspec.base import Keys, Law


class Proposals(NamedTuple):
    """Several guesses of one and the same token of each row: the children of a node of a token tree.

    The fields of a `base.Draft`, read across instead of along; K is the number of proposals.

    Attributes:
        tokens: the proposals, in the order in which they are tried.
        log_probs: what each was drawn from, *given those before it*: K different laws for K drafters, K times one law
            for K independent draws from it, and for draws without replacement the law with the earlier tokens taken
            out, normalised. None for deterministic proposals (the top K of something), which are point masses.
        length: how many proposals of each row are real; the rest is padding.
    """

    tokens: Int[Array, "batch proposals"]
    log_probs: Float[Array, "batch proposals vocab"] | None
    length: Int[Array, " batch"]


class Choice(NamedTuple):
    """What was decided about one position.

    Attributes:
        index: the proposal that was accepted; `length` if none was.
        token: its token, or the residual sample.
    """

    index: Int[Array, " batch"]
    token: Int[Array, " batch"]


def iterated(keys: Keys, position: Int[Array, " B"], proposals: Proposals, target: Law) -> Choice:
    r"""Accept proposal x with probability min(1, p(x) / q(x)); after each rejection, p becomes norm(max(0, p - q)).

    The first accepted proposal is the token; if there is none, the token is drawn from what has become of p. The token
    has exactly the target's law: if it has for K - 1 proposals and any target, then by the argument for one rejection
    (arXiv 2211.17192, appendix A.1) it has for K. With one proposal this is the rejection rule. Where p is certain,
    the first proposal that equals it is accepted.

    A chain `Draft` has one guess per position, so this is no `AcceptRule`; a verifier of token trees calls it at each
    node on its way down. `testing.certify_iterated` proves it exact by enumeration.

    Args:
        keys: one key per row [B].
        position: of the token in question, in its row [B].
        proposals: K proposals for it.
        target: its law [B, 1, V] or [B, 1], one position.

    Example:
        >>> import jax
        >>> p = Law(log_probs=jnp.log(jnp.array([[[0.0, 0.0, 1.0]]])))
        >>> proposals = Proposals(jnp.array([[0, 2, 1]]), None, jnp.array([3]))
        >>> choice = iterated(noise.row_keys(jax.random.key(0), 1), jnp.array([4]), proposals, p)
        >>> choice.index.tolist(), choice.token.tolist()
        ([1], [2])

    Reference: Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781 (multi-step speculative sampling).
    """
    tokens, log_probs, length = proposals
    count = tokens.shape[1]
    if target.tokens is not None:
        right = jnp.logical_and(tokens == target.tokens, jnp.arange(count)[None, :] < length[:, None])
        found = jnp.argmax(jnp.pad(right, ((0, 0), (0, 1)), constant_values=True), axis=1).astype(length.dtype)
        return Choice(jnp.minimum(found, length), target.tokens[:, 0])
    assert target.log_probs is not None
    coins = noise.uniform(noise.at(keys, position, noise.Purpose.COIN), count)
    p, index = jnp.exp(target.log_probs[:, 0]), length
    for k in range(count):
        trial = jnp.logical_and(index == length, k < length)  # none accepted yet, and there is a proposal
        point = (jnp.arange(p.shape[1])[None, :] == tokens[:, k, None]).astype(p.dtype)
        q = point if log_probs is None else jnp.exp(log_probs[:, k])
        accepted = jnp.logical_and(trial, coins[:, k] * pick(q, tokens[:, k]) < pick(p, tokens[:, k]))
        left = residual(p, q)
        p = jnp.where(
            trial[:, None], jnp.where(accepted[:, None], point, left / jnp.sum(left, axis=-1, keepdims=True)), p
        )
        index = jnp.where(accepted, jnp.asarray(k, length.dtype), index)
    return Choice(index, draw(keys, position, jnp.log(p)))
