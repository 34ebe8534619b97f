"""Speculative sampling: the acceptance rule of Algorithm 1 (Leviathan et al., arXiv 2211.17192), on chains and
trees."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.accept.common import (
    NOTHING,
    chain_verdict,
    count_accepted,
    draft_distribution_at,
    draft_probs,
    is_real,
    likelihood_ratio,
    match,
    probs_at,
    residual,
    sample_residual,
    take_position,
    uniforms,
)
from jaxspec.base import Distribution, Draft, Draw, Keys, Rule, Verdict


@functools.cache
def rejection() -> Rule:
    r"""Accept draft token x with probability min(1, p(x) / q(x)); after a rejection p becomes norm(max(0, p - q)).

    In a chain the token after the first rejection is drawn from that residual. In a tree the residual is p for the next
    sibling, and so on (multi-round rejection sampling): with p_1 = p, the i-th child x_i of a node is accepted with
    probability min(1, p_i(x_i) / q_i(x_i)), p_{i+1} = norm(max(0, p_i - q_i)), and when no child is left the next token
    is drawn from what p has become. q_i is the distribution that x_i was drawn from, given its earlier siblings
    (`Draft.draws`).

    The output has exactly the target's distribution, whatever the drafter. A fixed draft token is a point mass: it is
    accepted with probability p(x), and its residual is p without x. At temperature 0 both distributions are point
    masses, and the rule is exact match.

    Returns:
        A `base.Rule`. With B rows, N draft tokens, I entries of the drafter's distributions (a chain: I = N) and V
        tokens: draft.tokens [B, N], draft.log_probs [B, I, V] or None, target.log_probs [B, N + 1, V] or target.tokens
        [B, N + 1].

    Example:
        >>> from jaxspec import noise
        >>> p = jnp.log(jnp.array([[[0.0, 1.0], [0.5, 0.5]]]))
        >>> keys, position = noise.row_keys(jax.random.key(0), 1), jnp.array([3])
        >>> verdict = rejection().verify(keys, position, Draft(jnp.array([[0]]), jnp.array([1])), Distribution(p))
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([0], [1])
        >>> siblings = Draft(jnp.array([[0, 1]]), jnp.array([2]), parent=jnp.array([[0, 0]]))
        >>> verdict = rejection().verify(keys, position, siblings, Distribution(jnp.concatenate([p, p[:, :1]], axis=1)))
        >>> verdict.num_accepted.tolist(), verdict.path[0, 0].tolist(), verdict.num_tested.tolist()
        ([1], 1, [2])

    Reference: trees as in Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781; siblings without replacement as in
    Jeon et al., arXiv 2402.14160, and Chen et al., Sequoia, arXiv 2402.12374.
    """

    def verify(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution) -> Verdict:
        if target.tokens is not None:
            return match(draft, target.tokens)
        if draft.parent is not None:
            return verify_tree(keys, position, draft, target)
        assert target.log_probs is not None
        u = uniforms(keys, position, draft)
        accepted = u * draft_probs(draft) < probs_at(target.log_probs[:, :-1], draft.tokens)
        count = count_accepted(accepted, draft.length)
        return chain_verdict(draft, count, residual_token(keys, position, draft, target, count))

    return Rule(verify, "rejection", exact=True, trees=True, acceptance_ratio=acceptance_ratio)


def acceptance_ratio(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """min(p, q) / p."""
    return jnp.minimum(likelihood_ratio(log_p, log_q, tokens), 1.0)


def residual_token(
    keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution, count: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The token after `count` accepted ones of a chain: from the residual, or from p itself after the last real one."""
    assert target.log_probs is not None
    p = jnp.exp(take_position(target.log_probs, count))
    left = residual(p, draft_distribution_at(draft, count, p.shape[-1]))
    return sample_residual(keys, position, jnp.log(left))


class Walk(NamedTuple):
    """Where each row is on its way down the tree.

    What is left of p at the current node is max(a p - b q, 0), and 0 at the tokens of rejected children: taking more of
    q away and normalising changes the two numbers only, so no array of distributions is carried.

    Attributes:
        current: the fed token whose children are tried.
        tried: draft tokens below this number have had their trial.
        a, b: see above; 1 and 0 at a node's first child.
        rejected: tokens of the current node's rejected children.
        count, tested: draft tokens that were accepted, and that had a trial.
        path: the accepted ones.
        going: rows whose current node may have children left.
    """

    current: Int[Array, " B"]
    tried: Int[Array, " B"]
    a: Float[Array, " B"]
    b: Float[Array, " B"]
    rejected: Bool[Array, "B V"]
    count: Int[Array, " B"]
    tested: Int[Array, " B"]
    path: Int[Array, "B N"]
    going: Bool[Array, " B"]


def verify_tree(keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution) -> Verdict:
    """The rule on a tree: every row goes from child to child, one trial a step, until it has no child left to try.

    A step reads one row of p and one of q. The number of steps is that of the trials of the row with the most, not of
    the nodes: accepted tokens and their rejected elder siblings, and the children of the last node.
    """
    assert target.log_probs is not None and draft.parent is not None
    log_probs, (batch, nodes) = target.log_probs, draft.tokens.shape
    vocab = log_probs.shape[-1]
    parent = jnp.where(is_real(draft), draft.parent, -1)
    node, token = jnp.arange(nodes, dtype=parent.dtype)[None, :], jnp.arange(vocab, dtype=draft.tokens.dtype)[None, :]
    u = uniforms(keys, position, draft)

    def distributions(current: Int[Array, " B"]) -> tuple[Float[Array, "B V"], Float[Array, "B V"]]:
        p = jnp.exp(take_position(log_probs, current))
        if draft.log_probs is None:
            return p, jnp.zeros_like(p)
        return p, jnp.exp(take_position(draft.log_probs, jnp.minimum(current, draft.log_probs.shape[1] - 1)))

    def left_of(p: Float[Array, "B V"], q: Float[Array, "B V"], s: Walk) -> Float[Array, "B V"]:
        taken = jnp.where(s.b[:, None] != 0, s.b[:, None] * q, 0.0)  # q may be NaN: nothing of it was taken
        left = jnp.maximum(s.a[:, None] * p - taken, 0.0)
        return jnp.where(s.rejected, 0.0, left)

    def one_trial(s: Walk) -> Walk:
        children = jnp.logical_and(parent == s.current[:, None], node >= s.tried[:, None])
        trial = jnp.logical_and(s.going, jnp.any(children, axis=1))
        child = jnp.argmax(children, axis=1).astype(parent.dtype)
        x = take_position(draft.tokens, child)
        p, q = distributions(s.current)
        left, is_x = left_of(p, q, s), token == x[:, None]
        if draft.log_probs is None:
            scale = jnp.zeros_like(s.a)  # of q in the child's own distribution; 0: it is a point mass
        else:
            draw = _draw_of(draft, child)
            unseen = jnp.sum(jnp.where(s.rejected, 0.0, q), axis=-1)
            without = jnp.where(unseen != 0, 1.0 / jnp.where(unseen != 0, unseen, 1.0), 0.0)  # NaN is never accepted
            scale = jnp.where(draw == int(Draw.WITH_REPLACEMENT), 1.0, without)
            scale = jnp.where(draw == int(Draw.FIXED), 0.0, scale)
        q_x = jnp.where(scale != 0, scale * take_position(q, x), 1.0)
        p_x = take_position(left, x)
        accepted = jnp.logical_and(trial, take_position(u, child) * q_x < p_x)

        after = s._replace(b=s.b + scale, rejected=jnp.logical_or(s.rejected, is_x))
        mass = jnp.sum(left_of(p, q, after), axis=-1)
        # Nothing is left where p equals q, up to rounding: then p stays as it is, and the trial was for nothing.
        turned = jnp.logical_and(jnp.logical_and(trial, jnp.logical_not(accepted)), mass > NOTHING)
        mass = jnp.where(turned, mass, 1.0)

        def choose(down: Array, on: Array, stay: Array) -> Array:
            shape = -1, *[1] * (stay.ndim - 1)
            return jnp.where(accepted.reshape(shape), down, jnp.where(turned.reshape(shape), on, stay))

        return Walk(
            current=jnp.where(accepted, child + 1, s.current),
            tried=jnp.where(trial, child + 1, s.tried),
            a=choose(jnp.ones_like(s.a), s.a / mass, s.a),
            b=choose(jnp.zeros_like(s.b), after.b / mass, s.b),
            rejected=choose(jnp.zeros_like(s.rejected), after.rejected, s.rejected),
            count=s.count + accepted.astype(s.count.dtype),
            tested=s.tested + trial.astype(s.tested.dtype),
            path=jnp.where(jnp.logical_and(accepted[:, None], node == s.count[:, None]), child[:, None], s.path),
            going=trial,
        )

    zero, one = jnp.zeros_like(draft.length), jnp.ones((batch,), jnp.float32)
    start = Walk(
        current=zero.astype(parent.dtype),
        tried=zero.astype(parent.dtype),
        a=one,
        b=jnp.zeros_like(one),
        rejected=jnp.zeros((batch, vocab), bool),
        count=zero,
        tested=zero,
        path=jnp.zeros_like(parent),
        going=zero == 0,
    )
    end = jax.lax.while_loop(lambda s: jnp.any(s.going), one_trial, start)
    log_left = jnp.log(left_of(*distributions(end.current), end))
    return Verdict(end.count, sample_residual(keys, position, log_left), end.tested, end.path)


def _draw_of(draft: Draft, child: Int[Array, " B"]) -> Int[Array, " B"]:
    if draft.draws is None:
        return jnp.full(child.shape, int(Draw.WITHOUT_REPLACEMENT), jnp.int32)
    return take_position(draft.draws, child)
