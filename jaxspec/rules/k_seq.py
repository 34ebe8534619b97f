"""K-SEQ, SpecTr's selection among independent draft sequences (Sun et al., NeurIPS 2023, arXiv
2310.15141).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Draw, Keys, Rule, Verdict, tree
from jaxspec.rules import residual_tree
from jaxspec.rules.common import of_chains, rule_of, sample_residual, take_position, uniforms
from jaxspec.rules.rejection import acceptance_ratio, trials, verify_chain

# Halvings of [1, K]. The rule is exact for any result; the bisection only makes it accept more.
HALVINGS = 16


@functools.lru_cache
def k_seq() -> Rule:
    r"""K-SEQ: accepts one of K independent candidates for a token, each with the same chance.

    Each of the K draft tokens x is accepted with probability min(1, p(x) / (r q(x))), one after the
    other. Let b = sum_x min(p(x) / r, q(x)). A candidate is accepted with probability a = 1 - (1 -
    b)^K in all; otherwise the token is drawn from norm(p - (a / b) min(p / r, q)). The two add up
    to p for every r with a <= r b. The smallest such r in [1, K] gives the largest a; bisection
    finds it.

    After an accepted token the candidates for the next one are what follows it in *all* sequences
    that begin with the accepted tokens: sequences that coincide so far are one path.

    Candidates of several drafters (`Draft.sources`) are judged alike, each by the distribution that
    it was drawn from q_i: with b_i = sum_x min(p(x) / r, q_i(x)) the i-th is tested with
    probability c_i = (1 - b_1) ... (1 - b_{i-1}), and the token after K rejections is drawn from
    norm(p - sum_i c_i min(p / r, q_i)). The smallest r with c_1 + ... + c_K <= r is taken, which is
    the one above where all q_i are the same.

    The output has exactly the target's distribution, whatever the drafter. The candidates must be
    drawn independently (`Draw.WITH_REPLACEMENT`, as `drafters.sequences` and
    `drafters.tree(draw="replacement")` do): of siblings drawn otherwise only the first is judged,
    which is exact, and wastes the others. For a chain the rule is `rejection`.

    Example:
        >>> p, q = jnp.array([[0.5, 0.3, 0.2]]), jnp.array([[0.1, 0.2, 0.7]])
        >>> r, accepted, factor = selection(p, q, jnp.array([2]))
        >>> [round(float(x[0]), 3) for x in (r, accepted, factor)]  # one candidate: 0.5
        [1.584, 0.658, 1.584]
    """
    facts = {"acceptance_ratio": acceptance_ratio, "sources": True, "trials": of_chains(trials)}
    return rule_of("k_seq", verify_chain, verify_tree, **facts)


def selection(
    p: Float[Array, "B V"], q: Float[Array, "B V"], count: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """r, a, and a / b of `k_seq` for K = count candidates; a is 0 for none."""
    candidates = jnp.maximum(count, 1).astype(jnp.float32)

    def masses(r: Float[Array, " B"]) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        # b is the chance that one candidate passes, a = 1 - (1 - b)^K that one of K does.
        b = jnp.minimum(jnp.sum(jnp.minimum(p / r[:, None], q), axis=-1), 1.0)
        return b, -jnp.expm1(candidates * jnp.log1p(-b))

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        b, a = masses(middle)
        return jnp.where(a <= middle * b, low, middle), jnp.where(a <= middle * b, middle, high)

    _, r = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.ones_like(candidates), candidates))
    b, a = masses(r)
    # a <= r b, up to rounding
    factor = jnp.minimum(jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 1.0), r)
    has_draws = count > 0
    return r, jnp.where(has_draws, a, 0.0), jnp.where(has_draws, factor, 0.0)


def selection_of_several(
    p: Float[Array, "B V"],
    every_q: Sequence[Float[Array, "B V"]],
    judged: Bool[Array, "B N"],
    sources: Int[Array, "B N"],
) -> tuple[Float[Array, " B"], tuple[Float[Array, " B"], ...]]:
    """r, and the sum of the c_i of each drafter's candidates, of `k_seq` for candidates of several
    drafters.

    Args:
        p: the target's distribution.
        every_q: the drafters' distributions.
        judged: marks the candidates.
        sources: the number of each candidate's drafter.

    >>> p, *every_q = (
    ...     jnp.array([x])
    ...     for x in ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3], [0.2, 0.6, 0.1, 0.1])
    ... )
    >>> r, factors = selection_of_several(p, every_q, jnp.ones((1, 2), bool), jnp.array([[0, 1]]))
    >>> [round(float(x[0]), 3) for x in (r, *factors)]
    [1.5, 1.0, 0.5]
    """

    def tested(r: Float[Array, " B"]) -> Float[Array, "B N"]:
        # c_i: none of the candidates before it passes; 0 of nodes that are no candidates.
        b = tuple(jnp.sum(jnp.minimum(p / r[:, None], q), axis=-1)[:, None] for q in every_q)
        fails = jnp.where(judged, 1.0 - jnp.minimum(residual_tree.of_source(b, sources), 1.0), 1.0)
        before = jnp.pad(jnp.cumprod(fails, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)
        return jnp.where(judged, before, 0.0)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        suffices = jnp.sum(tested(middle), axis=1) <= middle
        return jnp.where(suffices, low, middle), jnp.where(suffices, middle, high)

    candidates = jnp.maximum(jnp.sum(judged, axis=1), 1).astype(jnp.float32)
    _, r = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.ones_like(candidates), candidates))
    c = tested(r)
    return r, tuple(jnp.sum(jnp.where(sources == i, c, 0.0), axis=1) for i in range(len(every_q)))


class Judging(NamedTuple):
    """The place of each row on its way down the tree; the tuples have an entry for each drafter."""

    current: Int[Array, " B"]  # the fed token whose children are judged, or were
    # these two: the results of `selection` there
    r: Float[Array, " B"]
    factors: tuple[Float[Array, " B"], ...]
    # the fed token after which each drafter's children were drawn
    entries: tuple[Int[Array, " B"], ...]
    # the token of the one child that is judged, where it is a point mass; -1 where it is not
    point: Int[Array, " B"]
    tested: Int[Array, " B"]  # draft tokens that were tested
    going: Bool[Array, " B"]  # rows that have gone on to `current`, and not judged its children


def verify_tree(
    keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
) -> Verdict:
    """Judges a tree, all candidates for a token at a time: the children of all nodes with the same
    tokens above them.
    """
    nodes = residual_tree.read(draft, target)
    number = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
    vocab = nodes.log_p.shape[-1]
    first = tree.same_prefix(nodes.parent, draft.tokens)
    # The fed token that each node follows: one of those with the same tokens above them, for all of
    # these.
    after = jnp.where(
        nodes.parent >= 0, jnp.take_along_axis(first, jnp.maximum(nodes.parent, 0), axis=1), -1
    )
    u = uniforms(keys, position, draft)
    point_mass = nodes.draws == int(Draw.FIXED)
    q_of_nodes = residual_tree.of_source(nodes.q, nodes.sources)

    def updated(s: Judging, new: tuple[Array, ...], old: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(jnp.where(s.going, *pair) for pair in zip(new, old, strict=True))

    def distributions(s: Judging) -> tuple[Float[Array, "B V"], list[Float[Array, "B V"]]]:
        p = jnp.exp(take_position(nodes.log_p, s.current))
        ones = (jnp.arange(vocab, dtype=jnp.int32)[None, :] == s.point[:, None]).astype(jnp.float32)
        if not nodes.log_q:
            return p, [ones]
        every_q = []
        for log_q, entry in zip(nodes.log_q, s.entries, strict=True):
            q = jnp.exp(take_position(log_q, jnp.minimum(entry, log_q.shape[1] - 1)))
            every_q.append(jnp.where((s.point >= 0)[:, None], ones, q))
        return p, every_q

    def entries_of(
        judged: Bool[Array, "B N"], eldest: Int[Array, " B"]
    ) -> tuple[Int[Array, " B"], ...]:
        """The fed token that the eldest candidate of each drafter follows; any, for a drafter
        without candidates.
        """
        if nodes.sources is None:
            return (jnp.maximum(take_position(nodes.parent, eldest), 0),)
        eldest_of_each = (
            jnp.argmax(judged & (nodes.sources == i), axis=1) for i in range(len(nodes.q))
        )
        return tuple(jnp.maximum(take_position(nodes.parent, child), 0) for child in eldest_of_each)

    def select(
        s: Judging, judged: Bool[Array, "B N"]
    ) -> tuple[Float[Array, " B"], tuple[Float[Array, " B"], ...]]:
        p, every_q = distributions(s)
        if nodes.sources is not None:
            return selection_of_several(p, every_q, judged, nodes.sources)
        r, _, factor = selection(p, every_q[0], jnp.sum(judged, axis=1))
        return r, (factor,)

    def judge(s: Judging) -> Judging:
        children = (after == s.current[:, None]) & s.going[:, None]
        eldest = jnp.argmax(children, axis=1).astype(jnp.int32)
        # All candidates of a place at a time; but of siblings that were not drawn independently
        # only the eldest.
        dependent = children & (nodes.draws != int(Draw.WITH_REPLACEMENT))
        alone = jnp.any(dependent, axis=1)[:, None] & (number > eldest[:, None])
        judged = children & ~alone
        entries = entries_of(judged, eldest)
        is_point = jnp.any(children, axis=1) & take_position(point_mass, eldest)
        point = jnp.where(is_point, take_position(draft.tokens, eldest), -1)
        now = s._replace(
            entries=updated(s, entries, s.entries), point=jnp.where(s.going, point, s.point)
        )
        r, factors = select(now, judged)
        passes = judged & (u * r[:, None] * jnp.where(point_mass, 1.0, q_of_nodes) < nodes.p)
        accepted = jnp.any(passes, axis=1)
        child = jnp.argmax(passes, axis=1).astype(jnp.int32)
        # The candidates after the accepted one were never tested.
        trials = judged & ((number <= child[:, None]) | (~accepted)[:, None])
        return now._replace(
            current=jnp.where(accepted, take_position(first, child + 1), s.current),
            tested=s.tested + jnp.sum(trials, axis=1, dtype=jnp.int32),
            r=jnp.where(s.going, r, s.r),
            factors=updated(s, factors, s.factors),
            going=accepted,
        )

    zero = jnp.zeros_like(draft.length, jnp.int32)
    ones = jnp.ones(draft.length.shape, jnp.float32)
    drafters = len(nodes.q)
    start = Judging(zero, ones, (ones,) * drafters, (zero,) * drafters, zero - 1, zero, zero == 0)
    end = jax.lax.while_loop(lambda s: jnp.any(s.going), judge, start)
    p, every_q = distributions(end)
    residual = p
    for factor, q in zip(end.factors, every_q, strict=True):
        accepted = factor[:, None] * jnp.minimum(p / end.r[:, None], q)
        # a drafter without a candidate here has no distribution that means anything
        if nodes.sources is not None:
            accepted = jnp.where(factor[:, None] > 0, accepted, 0.0)
        residual = residual - accepted
    residual = jnp.maximum(residual, 0.0)
    residual = jnp.where(
        jnp.sum(residual, axis=-1, keepdims=True) > residual_tree.MIN_MASS, residual, p
    )
    next_token = sample_residual(keys, position, jnp.log(residual))
    count, path = tree.path_to(nodes.parent, end.current)
    return Verdict(count, next_token, end.tested, path)
