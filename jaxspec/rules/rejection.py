"""Speculative sampling: the acceptance rule of Algorithm 1 (Leviathan et al., arXiv 2211.17192), on
chains and trees.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Trials, Verdict, tree
from jaxspec.rules import common, residual_tree
from jaxspec.rules.residual_tree import Residual


@functools.lru_cache
def rejection() -> Rule:
    r"""Accept draft token x with probability min(1, p(x) / q(x)); after a rejection p becomes
    norm(max(0, p - q)).

    In a chain the token after the first rejection is drawn from that residual. In a tree the
    residual becomes p for the next sibling, and so on (multi-round rejection sampling). With p_1 =
    p, the i-th child x_i of a node is accepted with probability min(1, p_i(x_i) / q_i(x_i)), and
    p_{i+1} = norm(max(0, p_i - q_i)). When no child is left, the next token is drawn from the last
    p_i. x_i was drawn from q_i, given its earlier siblings (`Draft.draws`). Siblings' q_i may
    belong to different drafters (`Draft.sources`).

    The output has exactly the target's distribution, whatever the drafter. A fixed draft token is a
    point mass: it is accepted with probability p(x), and its residual is p without x. At
    temperature 0 both distributions are point masses, and the rule is exact match.

    Example:
        >>> from jaxspec.core import noise
        >>> p = jnp.log(jnp.array([[[0.0, 1.0], [0.5, 0.5]]]))
        >>> keys, position = noise.row_keys(jax.random.key(0), 1), jnp.array([3])
        >>> verdict = rejection().verify(
        ...     keys, position, Draft(jnp.array([[0]]), jnp.array([1])), Distribution(p)
        ... )
        >>> verdict.num_accepted.tolist(), verdict.next_token.tolist()
        ([0], [1])
        >>> siblings = Draft(jnp.array([[0, 1]]), jnp.array([2]), parent=jnp.array([[0, 0]]))
        >>> verdict = rejection().verify(
        ...     keys, position, siblings, Distribution(jnp.concatenate([p, p[:, :1]], axis=1))
        ... )
        >>> verdict.num_accepted.tolist(), verdict.path[0, 0].tolist(), verdict.num_tested.tolist()
        ([1], 1, [2])

    Reference: Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781 (trees). Jeon et al., arXiv
    2402.14160, and Chen et al., Sequoia, arXiv 2402.12374 (siblings without replacement).
    """
    facts = {
        "acceptance_ratio": acceptance_ratio,
        "lenience": 1.0,
        "sources": True,
        "trials": trials,
    }
    return common.rule_of("rejection", verify_chain, verify_tree, **facts)


def acceptance_ratio(
    log_p: common.LogProbRows, log_q: common.LogProbRows, tokens: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Computes min(p, q) / p. Its mean over the target's tokens is the acceptance rate."""
    return jnp.minimum(common.likelihood_ratio(log_p, log_q, tokens), 1.0)


def verify_chain(
    keys: Keys,
    position: Int[Array, " B"],
    draft: Draft,
    target: Distribution,
    lenience: float = 1.0,
    forced: tuple[Bool[Array, " B"], Bool[Array, "B N"]] | None = None,
) -> Verdict:
    """Judges a chain, token by token; arguments as in `verify_tree`."""
    assert target.log_probs is not None
    u = common.uniforms(keys, position, draft)
    p = common.gather_probs(target.log_probs[:, :-1], draft.tokens)
    # u q < p in place of u < p / q: no division by a probability of 0.
    accepted = u * (lenience * common.draft_probs(draft)) < p
    if forced is not None:
        accepted = jnp.where(forced[0][:, None], forced[1], accepted)
    count = common.count_accepted(accepted, draft.length)
    return common.chain_verdict(draft, count, residual_token(keys, position, draft, target, count))


def residual_token(
    keys: Keys,
    position: Int[Array, " B"],
    draft: Draft,
    target: Distribution,
    count: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Draws the token after `count` accepted ones of a chain: from the residual, or from p after
    the last draft token.
    """
    assert target.log_probs is not None
    p = jnp.exp(common.take_position(target.log_probs, count))
    residual = common.residual(p, common.draft_distribution_at(draft, count, p.shape[-1]))
    return common.sample_residual(keys, position, jnp.log(residual))


def trials(
    keys: Keys,
    position: Int[Array, " B"],
    draft: Draft,
    target: Distribution,
    lenience: float = 1.0,
) -> Trials:
    """The numbers that `verify_chain` and `verify_tree` compare.

    In a tree they are of a child whose elder siblings are rejected: they left the p_i and q_i that
    it is judged by.

    >>> from jaxspec.core import noise
    >>> p, q = (jnp.log(jnp.array([[[x, 1 - x]]])) for x in (0.25, 0.5))
    >>> draft, target = (
    ...     Draft(jnp.array([[0]]), jnp.array([1]), log_probs=q),
    ...     Distribution(p.repeat(2, axis=1)),
    ... )
    >>> numbers = trials(noise.row_keys(jax.random.key(0), 1), jnp.array([3]), draft, target)
    >>> numbers.acceptance.tolist(), numbers.residual_mass.tolist()
    ([[0.5]], [[0.25]])
    """
    u = common.uniforms(keys, position, draft)
    if draft.parent is not None:
        return Trials(u, *_tree_trials(draft, target, lenience))
    assert target.log_probs is not None
    log_p = target.log_probs[:, :-1]
    p = common.gather_probs(log_p, draft.tokens)
    q = lenience * common.draft_probs(draft)
    difference = jnp.exp(log_p) - common.draft_distributions(draft, log_p.shape[-1])
    return Trials(
        u, common.probability_of_passing(p, q), jnp.sum(jnp.maximum(difference, 0.0), axis=-1)
    )


def _tree_trials(
    draft: Draft, target: Distribution, lenience: float
) -> tuple[Float[Array, "B N"], Float[Array, "B N"]]:
    """Returns the acceptance and the residual's mass of each node, as if no node were accepted."""
    nodes = residual_tree.read(draft, target)
    rows = draft.tokens.shape[0]
    always = jnp.ones(rows, bool)
    ones = jnp.ones(rows, jnp.float32)

    # A node is only judged once its elder siblings are rejected. So rejecting all nodes in order
    # gives what each of them is judged by, whichever are accepted in fact.
    def judge(
        residual: Residual, node: Int[Array, ""]
    ) -> tuple[Residual, tuple[Float[Array, " B"], Float[Array, " B"]]]:
        child = jnp.full(rows, node, jnp.int32)
        p, q = residual_tree.trial_probs(nodes, residual, child)
        mass, residual = residual_tree.after_rejection(nodes, residual, child, ones, always)
        # The residual of a rejected child is without its token, which matters where it is never
        # rejected.
        return residual, (
            common.probability_of_passing(p, lenience * q),
            mass + jnp.maximum(p - q, 0.0),
        )

    number = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    _, (acceptance, mass) = jax.lax.scan(judge, residual_tree.initial(nodes), number)
    return acceptance.T, mass.T


class Descent(NamedTuple):
    """The place of each row on its way down the tree."""

    current: Int[Array, " B"]  # the fed token whose children are tried
    tried: Int[Array, " B"]  # draft tokens below this number were tested, or never will be
    residual: Residual  # what rejections left of p and q after each fed token


def verify_tree(
    keys: Keys,
    position: Int[Array, " B"],
    draft: Draft,
    target: Distribution,
    lenience: float = 1.0,
    forced: tuple[Bool[Array, " B"], Bool[Array, "B N"]] | None = None,
) -> Verdict:
    """Judges a tree: every row goes from child to child until it has no child left to try.

    Only a rejection reads the vocabulary: one row of p and one of q. The loop over rejections takes
    as many steps as the row with the most.

    `lenience` scales q in trials (see `rules.lenient`). `forced`: rows whose trials are decided
    beforehand, and the nodes that they accept.
    """
    nodes = residual_tree.read(draft, target)
    number = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
    u = common.uniforms(keys, position, draft)

    def trial(s: Descent) -> tuple[Int[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
        """The child that is to be tried, whether it is accepted, and whether rejected."""
        children = (nodes.parent == s.current[:, None]) & (number >= s.tried[:, None])
        # Children are tried in the order in which they were drawn, each against what its elder
        # siblings left of p.
        child = jnp.argmax(children, axis=1).astype(jnp.int32)
        has_child = jnp.any(children, axis=1)
        p, q = residual_tree.trial_probs(nodes, s.residual, child)
        passes = common.take_position(u, child) * (lenience * q) < p
        if forced is not None:
            passes = jnp.where(forced[0], common.take_position(forced[1], child), passes)
        return child, has_child & passes, has_child & ~passes

    def accept(s: Descent) -> Descent:
        child, accepted, _ = trial(s)
        # As a fed token the child has the number child + 1, and draft tokens from that number on
        # are its own children or later ones.
        current = jnp.where(accepted, child + 1, s.current)
        tried = jnp.where(accepted, child + 1, s.tried)
        return s._replace(current=current, tried=tried)

    def descend(s: Descent) -> Descent:
        return jax.lax.while_loop(lambda s: jnp.any(trial(s)[1]), accept, s)

    def reject(s: Descent) -> Descent:
        child, _, rejected = trial(s)
        _, residual = residual_tree.after_rejection(
            nodes, s.residual, child, jnp.ones_like(u[:, 0]), rejected
        )
        return descend(s._replace(tried=jnp.where(rejected, child + 1, s.tried), residual=residual))

    zero = jnp.zeros_like(draft.length, jnp.int32)
    # All rows move together: down while any row accepts, then one rejection in each row that has a
    # child left.
    start = descend(Descent(zero, zero, residual_tree.initial(nodes)))
    end = jax.lax.while_loop(lambda s: jnp.any(trial(s)[2]), reject, start)
    next_token = common.sample_residual(
        keys, position, residual_tree.log_left(nodes, end.residual, end.current)
    )
    return common.tree_verdict(nodes.parent, *tree.path_to(nodes.parent, end.current), next_token)
