"""The residual: the rest of the target's distribution at a node after some of its children are rejected.

What rules on trees share (`rejection`, `traversal`). At a node p becomes max(a p - b q, 0), and 0 at the tokens of
rejected children: taking more of q away and normalising changes the two numbers only, so no array of distributions is
carried. Whether a child is accepted is asked of numbers, and only a rejection reads the vocabulary.

Axis letters as in `jaxspec.core`: B batch, N nodes of a tree, I inner ones, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Draw
from jaxspec.rules.common import MIN_MASS, at_nodes, real_parent, take_position


class Tree(NamedTuple):
    """A draft tree with what the target and the drafter have at its nodes."""

    tokens: Int[Array, "B N"]  # the nodes' tokens
    parent: Int[Array, "B N"]  # `Draft.parent`, with -1 also for padding and for tokens drawn from NaN
    draws: Int[Array, "B N"]  # how each node was chosen, a `Draw`
    # these two: the probability of each node's token after its parent; q is of no meaning for a point mass
    p: Float[Array, "B N"]
    q: Float[Array, "B N"]
    repeated: Bool[Array, "B N"]  # whether an elder sibling has the same token, of which a rejection leaves nothing
    # these two: the distributions after the fed tokens
    log_p: Float[Array, "B N+1 V"]
    log_q: Float[Array, "B I V"] | None


class Residual(NamedTuple):
    """The residual after each fed token: max(a p - b q, 0), but 0 at the tokens of rejected children."""

    # these two: the numbers above; 1 and 0 before any rejection
    a: Float[Array, "B N+1"]
    b: Float[Array, "B N+1"]
    unseen: Float[Array, "B N+1"]  # the mass of q on tokens that no rejected child has


def read(draft: Draft, target: Distribution) -> Tree:
    """A draft's tree and the distributions that it is judged by."""
    assert target.log_probs is not None
    tokens, parent = draft.tokens, real_parent(draft)
    p = jnp.exp(at_nodes(target.log_probs, draft))
    if draft.log_probs is None:
        q, draws = jnp.ones_like(p), jnp.full_like(parent, int(Draw.FIXED))
    else:
        q = jnp.exp(at_nodes(draft.log_probs, draft))
        draws = draft.draws
        if draws is None:
            draws = jnp.full_like(parent, int(Draw.WITHOUT_REPLACEMENT))
        parent = jnp.where(jnp.logical_and(jnp.isnan(q), draws != int(Draw.FIXED)), -1, parent)
    # A sibling that repeats a token was judged already: nothing of p is left for it.
    twin = jnp.logical_and(parent[:, :, None] == parent[:, None, :], tokens[:, :, None] == tokens[:, None, :])
    repeated = jnp.any(jnp.logical_and(twin, jnp.tri(parent.shape[1], k=-1, dtype=bool)[None]), axis=-1)
    return Tree(tokens, parent, draws, p, q, repeated, target.log_probs, draft.log_probs)


def initial(tree: Tree) -> Residual:
    """Returns the residual before any rejection."""
    ones = jnp.ones((tree.tokens.shape[0], tree.tokens.shape[1] + 1), jnp.float32)
    return Residual(ones, jnp.zeros_like(ones), ones)


def trial_probs(
    tree: Tree, residual: Residual, child: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The probability of a child's token in what is left of p at its parent, and in what the child was drawn from.

    Its elder siblings are rejected. The second is 1 for a point mass.
    """
    parent = jnp.maximum(take_position(tree.parent, child), 0)
    a, b = (take_position(x, parent) for x in residual[:2])
    p, q = take_position(tree.p, child), take_position(tree.q, child)
    left_of_p = jnp.maximum(a * p - jnp.where(b != 0, b * q, 0.0), 0.0)  # q may be NaN: nothing of it was taken
    scale = _scale(tree, residual, child, parent)
    repeated = take_position(tree.repeated, child)
    return jnp.where(repeated, 0.0, left_of_p), jnp.where(scale != 0, scale * q, 1.0)


def after_rejection(
    tree: Tree, residual: Residual, child: Int[Array, " B"], weight: Float[Array, " B"], rejected: Bool[Array, " B"]
) -> tuple[Float[Array, " B"], Residual]:
    """Computes the residual after a child is rejected: at its parent norm(max(w p - q, 0)), where w is a weight.

    All of its elder siblings were rejected before; in rows where it is not `rejected` nothing changes.

    Returns:
        The mass of max(w p - q, 0), and what is left. If the mass is 0 (w p equals q, up to rounding), no trial was
        needed: the numbers stay.
    """
    parent = jnp.maximum(take_position(tree.parent, child), 0)
    # w (a p - b q) less the child's scaled q is again of the form a' p - b' q: a' = w a, b' = w b + scale.
    a, b = (weight * take_position(x, parent) for x in residual[:2])
    b = b + _scale(tree, residual, child, parent)
    values, unseen = _rest(tree, parent, child, a, b)
    mass = jnp.sum(values, axis=-1)
    turned = jnp.logical_and(rejected, mass > MIN_MASS)
    # Normalising divides both numbers by the mass.
    scale = 1.0 / jnp.where(turned, mass, 1.0)
    seen = residual._replace(unseen=put(residual.unseen, parent, unseen, rejected))
    a, b = (put(old, parent, new * scale, turned) for old, new in ((residual.a, a), (residual.b, b)))
    return mass, seen._replace(a=a, b=b)


def log_left(tree: Tree, residual: Residual, fed: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The logarithm of what is left of p after a fed token all of whose children are rejected, not normalised."""
    a, b = (take_position(x, fed) for x in residual[:2])
    values, _ = _rest(tree, fed, jnp.full_like(fed, tree.tokens.shape[1]), a, b)
    has_mass = jnp.any(values > 0, axis=-1, keepdims=True)
    return jnp.where(has_mass, jnp.log(values), take_position(tree.log_p, fed))


def put(x: Array, index: Int[Array, " B"], value: Float[Array, " B"], where: Bool[Array, " B"]) -> Array:
    """x with x[b, index[b]] = value[b], in some rows."""
    is_place = jnp.arange(x.shape[1], dtype=index.dtype)[None, :] == index[:, None]
    return jnp.where(jnp.logical_and(is_place, where[:, None]), value[:, None], x)


def _scale(tree: Tree, residual: Residual, child: Int[Array, " B"], parent: Int[Array, " B"]) -> Float[Array, " B"]:
    """Computes the factor of q in a child's own distribution, given its elder siblings; 0: it is a point mass."""
    draw, unseen = take_position(tree.draws, child), take_position(residual.unseen, parent)
    normalised = jnp.where(unseen != 0, 1.0 / jnp.where(unseen != 0, unseen, 1.0), 0.0)
    scale = jnp.where(draw == int(Draw.WITH_REPLACEMENT), 1.0, normalised)
    return jnp.where(draw == int(Draw.FIXED), 0.0, scale)


def _rest(
    tree: Tree, fed: Int[Array, " B"], last: Int[Array, " B"], a: Float[Array, " B"], b: Float[Array, " B"]
) -> tuple[Float[Array, "B V"], Float[Array, " B"]]:
    """max(a p - b q, 0) after a fed token, 0 at the tokens of its children up to `last`; the rest of q's mass."""
    (rows, nodes), vocab = tree.tokens.shape, tree.log_p.shape[-1]
    node, row = jnp.arange(nodes, dtype=jnp.int32)[None, :], jnp.arange(rows, dtype=jnp.int32)[:, None]
    gone = jnp.logical_and(tree.parent == fed[:, None], node <= last[:, None])
    slot = jnp.where(gone, tree.tokens, vocab)  # out of the vocabulary: nowhere
    is_left = jnp.ones((rows, vocab), bool).at[row, slot].set(False, mode="drop")
    # From here on rows of the vocabulary, [B, V]: the only ones that a rejection reads.
    p = jnp.exp(take_position(tree.log_p, fed))
    if tree.log_q is None:
        return jnp.where(is_left, jnp.maximum(a[:, None] * p, 0.0), 0.0), jnp.ones_like(a)
    q = jnp.exp(take_position(tree.log_q, jnp.minimum(fed, tree.log_q.shape[1] - 1)))
    removed = jnp.where(b[:, None] != 0, b[:, None] * q, 0.0)
    values = jnp.where(is_left, jnp.maximum(a[:, None] * p - removed, 0.0), 0.0)
    return values, jnp.sum(jnp.where(is_left, q, 0.0), axis=-1)
