"""Traversal verification (Weng et al., arXiv 2505.12398): block verification for token trees."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Verdict, tree
from jaxspec.rules import residual_tree
from jaxspec.rules.block import trials, verify_chain
from jaxspec.rules.common import (
    likelihood_ratio,
    of_chains,
    rule_of,
    sample_residual,
    take_position,
    tree_verdict,
    uniforms,
)
from jaxspec.rules.residual_tree import Residual, put

SMALLEST = 1e-37  # of what is divided by


@functools.lru_cache
def traversal() -> Rule:
    r"""Judge a tree from its leaves: accept the path to the first node that passes, where paths are
    weighed as a whole.

    The last committed token has the weight 1. From there every row follows first children down to a
    leaf. A child x of a node of weight w has the weight min(1, w p(x) / q(x)). A leaf passes its
    test, a uniform draw, with its weight w as probability. Then it is accepted with all nodes above
    it, and the next token is drawn from p after it. Otherwise it is taken off the tree, and its
    parent changes to

        p' = norm(max(0, w p - q)),    w' = s / (s + 1 - w),    s = sum_x max(0, w p(x) - q(x)),

    These weigh its next child, and so on. A node whose children are all gone is a leaf itself. At
    the last committed token w remains 1, and the token is drawn from the p that is left there. q is
    the child's distribution, given its earlier siblings (`Draft.draws`).

    The output has exactly the target's distribution. For a chain the rule is block verification. On
    a tree it accepts at least as many tokens in expectation as `rejection`, which loses a branch
    with its first token. It gains nothing for point masses, or at temperature 0.

    As under `block`, verdicts depend on draft tokens after the accepted ones, so all draws must be
    fresh each round.

    Example:
        The toy of `rules.block` is one branch of a tree, and the other is a token that p does not
        have. Both tokens of the first branch are accepted: its weight is 1/2 after one and 1 after
        two.

        >>> from jaxspec.core import noise
        >>> p, q = (jnp.log(jnp.array(x)) for x in ([1 / 3, 2 / 3, 0], [2 / 3, 1 / 3, 0]))
        >>> parent = jnp.array([[0, 1, 0]])
        >>> draft = Draft(
        ...     jnp.array([[0, 1, 2]]), jnp.array([3]), parent, log_probs=jnp.stack([q, q])[None]
        ... )
        >>> target = Distribution(log_probs=jnp.stack([p, p, p, p])[None])
        >>> verdict = traversal().verify(
        ...     noise.row_keys(jax.random.key(0), 1), jnp.array([5]), draft, target
        ... )
        >>> verdict.num_accepted.tolist(), verdict.path[0, :2].tolist()
        ([2], [0, 1])
    """
    facts = {"acceptance_ratio": likelihood_ratio, "sources": True, "trials": of_chains(trials)}
    return rule_of("traversal", verify_chain, verify_tree, **facts)


class Traversal(NamedTuple):
    """The place of each row on its way through the tree."""

    current: Int[Array, " B"]  # the fed token that is judged, or whose children are
    on_tree: Bool[Array, "B N"]  # draft tokens that are still on the tree
    weight: Float[Array, "B N+1"]  # each fed token's weight, valid once the walk has entered it
    residual: Residual  # the `Residual` of p after each fed token


def verify_tree(
    keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
) -> Verdict:
    """Judges a tree. Only removing a node reads the vocabulary: one row of p and one of q.

    The loop over these ends as soon as every row has accepted a node, and is over as many as the
    row with the most.
    """
    nodes = residual_tree.read(draft, target)
    number = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
    # the last committed token passes always
    drawn = jnp.pad(uniforms(keys, position, draft), ((0, 0), (1, 0)))

    def first_child(s: Traversal) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
        """The first remaining child, and whether one remains; no child of a node of weight 0
        passes.
        """
        children = s.on_tree & (nodes.parent == s.current[:, None])
        has_child = jnp.any(children, axis=1) & (take_position(s.weight, s.current) > 0)
        return jnp.argmax(children, axis=1).astype(jnp.int32), has_child

    def enter(s: Traversal) -> Traversal:
        # One level down in every row whose place has a child left: the child's weight is min(1, w p
        # / q).
        child, has_child = first_child(s)
        p, q = residual_tree.trial_probs(nodes, s.residual, child)
        weight = jnp.minimum(take_position(s.weight, s.current) * p / jnp.maximum(q, SMALLEST), 1.0)
        return s._replace(
            current=jnp.where(has_child, child + 1, s.current),
            weight=put(s.weight, child + 1, weight, has_child),
        )

    def descend(s: Traversal) -> Traversal:
        return jax.lax.while_loop(lambda s: jnp.any(first_child(s)[1]), enter, s)

    def fails(s: Traversal) -> Bool[Array, " B"]:
        return take_position(drawn, s.current) >= take_position(s.weight, s.current)

    def leave(s: Traversal) -> Traversal:
        # In rows whose node fails its test: take it off the tree, and weigh its parent anew by what
        # is left of p there, w' = s / (s + 1 - w); then go down to the parent's next leaf. Other
        # rows have accepted, and stay.
        failed = fails(s)
        child = jnp.maximum(s.current - 1, 0)
        parent = jnp.maximum(take_position(nodes.parent, child), 0)
        weight = take_position(s.weight, parent)
        mass, residual = residual_tree.after_rejection(nodes, s.residual, child, weight, failed)
        total = mass + (1.0 - weight)
        # Nothing over nothing: w p equals q, and the child's weight was 1, up to rounding.
        after = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)
        gone = failed[:, None] & (number == child[:, None])
        return descend(
            Traversal(
                current=jnp.where(failed, parent, s.current),
                on_tree=s.on_tree & ~gone,
                weight=put(s.weight, parent, after, failed),
                residual=residual,
            )
        )

    initial = residual_tree.initial(nodes)
    zero = jnp.zeros_like(draft.length, jnp.int32)
    start = descend(Traversal(zero, nodes.parent >= 0, jnp.ones_like(drawn), initial))
    end = jax.lax.while_loop(lambda s: jnp.any(fails(s)), leave, start)
    next_token = sample_residual(
        keys, position, residual_tree.log_left(nodes, end.residual, end.current)
    )
    return tree_verdict(nodes.parent, *tree.path_to(nodes.parent, end.current), next_token)
