"""Coupled verification: speculative decoding emits, token for token, what plain sampling emits with
the same key.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Verdict, noise
from jaxspec.rules.common import (
    LogProbRows,
    chain_verdict,
    count_accepted,
    is_real,
    likelihood_ratio,
    rule_of,
    take_position,
)


@functools.lru_cache
def coupled() -> Rule:
    """Accept draft tokens while they are the tokens that plain sampling draws at their positions
    with the same key.

    The token at position t is argmax_x (log p_t(x) + g_t(x)), with the Gumbel noise g_t of the
    row's key and of t itself, the one that `autoregressive` uses. The emitted tokens then depend
    neither on the drafter nor on gamma, the shape of a tree or the borders of rounds; only their
    cost does. In particular their distribution is the target's. (Up to the rounding of the target's
    logits: a pass over several tokens is not bit-equal to several passes over one.)

    A draft token that is independent of that noise is accepted with probability p(x), siblings with
    the sum of theirs. A drafter that draws its tokens with the same noise (`drafters.model(draft,
    coupled=True)`, which `jaxspec.generate` takes for this rule) agrees with probability at least
    (1 - d) / (1 + d), where d = 1 - sum_x min(p(x), q(x)). The rejection rule accepts 1 - d: the
    difference is the price of the invariance.

    Returns:
        A rule that does not read `draft.log_probs`.

    Example:
        >>> keys, position = noise.row_keys(jax.random.key(0), 1), jnp.array([7])
        >>> p = Distribution(log_probs=jnp.log(jnp.full((1, 3, 9), 1 / 9)))
        >>> plain = [
        ...     int(
        ...         noise.categorical(
        ...             noise.at(keys, position + i, noise.Purpose.TOKEN), p.log_probs[:, i]
        ...         )[0]
        ...     )
        ...     for i in range(3)
        ... ]
        >>> verdict = coupled().verify(
        ...     keys, position, Draft(jnp.array([plain[:2]]), jnp.array([2])), p
        ... )
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist() == plain[2:]
        ([2], True)

    Reference: Daliri, Musco, Suresh, "Coupling without Communication and Drafter-Invariant
    Speculative Decoding", arXiv 2408.07978.
    """
    return rule_of(
        "coupled",
        verify_chain,
        walk,
        shares_noise=True,
        sources=True,
        acceptance_ratio=acceptance_ratio,
    )


def acceptance_ratio(
    log_p: LogProbRows, log_q: LogProbRows, tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """P(x wins both races) / p(x) for a token drawn with the same noise: 1 / sum_y max(p(y), q(y)
    p(x) / q(x)).

    With exponential arrivals E_y, x wins under p and q if E_y >= E_x max(p(y) / p(x), q(y) / q(x))
    for all y.

    >>> p, q = (jnp.log(jnp.array([[[x, 1 - x]] * 2])) for x in (0.5, 0.75))
    >>> [round(x, 3) for x in acceptance_ratio(p, q, jnp.array([[0, 1]]))[0].tolist()]
    [1.0, 0.5]
    """
    ratio = likelihood_ratio(log_p, log_q, tokens)[..., None]
    safe_ratio = jnp.where(ratio > 0, ratio, 1.0)
    rivals = jnp.sum(jnp.maximum(jnp.exp(log_p), jnp.exp(log_q) / safe_ratio), axis=-1)
    return jnp.where(ratio[..., 0] > 0, 1 / rivals, 0.0)


def verify_chain(
    keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
) -> Verdict:
    """The verdict on a chain; where its drafter has drawn the noise at its tokens, only what
    follows them is drawn.
    """
    if draft.aux is None or "gumbel" not in draft.aux:
        return walk(keys, position, draft, target)
    assert target.log_probs is not None
    # B G V
    tokens = []
    gumbel = draft.aux["gumbel"]
    for i in range(draft.tokens.shape[1]):
        # The purpose is that of plain sampling, not of a verdict: the same key draws the same token
        # there.
        token_keys = noise.at(keys, position + i, noise.Purpose.TOKEN)
        tokens.append(noise.categorical(token_keys, target.log_probs[:, i], drawn=gumbel[:, i]))
    plain = jnp.stack(tokens, axis=1)
    count = count_accepted(draft.tokens == plain, draft.length)
    all_accepted = count == draft.length
    last = noise.at(keys, position + draft.length, noise.Purpose.TOKEN)
    bonus = noise.categorical(last, take_position(target.log_probs, draft.length), all_accepted)
    sampled = take_position(plain, jnp.minimum(count, plain.shape[1] - 1))
    return chain_verdict(draft, count, jnp.where(all_accepted, bonus, sampled))


def walk(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution) -> Verdict:
    """The verdict on a chain or a tree: rows follow plain sampling's tokens down the tree, one draw
    a step.

    A draw over a vocabulary costs more than the rest of the rule, so none is made that no row
    needs. Of siblings with one token the first counts.
    """
    assert target.log_probs is not None
    log_probs = target.log_probs
    batch, nodes = draft.tokens.shape
    node = jnp.arange(nodes, dtype=jnp.int32)[None, :]
    parent = jnp.where(is_real(draft), node if draft.parent is None else draft.parent, -1)
    zero = jnp.zeros_like(draft.length)

    def step(carry):
        current, count, tested, path, token, going = carry
        token_keys = noise.at(keys, position + count.astype(position.dtype), noise.Purpose.TOKEN)
        drawn = noise.categorical(token_keys, take_position(log_probs, current), going)
        # The target's own draw decides: the row goes on to the child that holds this very token, if
        # there is one.
        children = (parent == current[:, None]) & going[:, None]
        right = children & (draft.tokens == drawn[:, None])
        accepted = jnp.any(right, axis=1)
        if nodes:
            child = jnp.argmax(right, axis=1).astype(jnp.int32)
        else:
            child = jnp.zeros((batch,), jnp.int32)
        trials = children & ((node <= child[:, None]) | (~accepted)[:, None])
        is_step = accepted[:, None] & (node == count[:, None])
        return (
            jnp.where(accepted, child + 1, current),
            count + accepted.astype(count.dtype),
            tested + jnp.sum(trials, axis=1, dtype=tested.dtype),
            jnp.where(is_step, child[:, None], path),
            jnp.where(going, drawn, token),
            accepted,
        )

    def unfinished(carry) -> Bool[Array, ""]:
        return jnp.any(carry[-1])

    start = (
        zero.astype(jnp.int32),
        zero,
        zero,
        jnp.zeros((batch, nodes), jnp.int32),
        zero.astype(jnp.int32),
        zero == 0,
    )
    _, count, tested, path, token, _ = jax.lax.while_loop(unfinished, step, start)
    return Verdict(count, token, tested, None if draft.parent is None else path)
