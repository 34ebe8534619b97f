"""The residual: the rest of the target's distribution at a node after some of its children are
rejected.

What rules on trees share (`rejection`, `traversal`). At a node p becomes max(a p - b q, 0), and 0
at the tokens of rejected children: taking more of q away and normalising changes the two numbers
only, so no array of distributions is carried. Whether a child is accepted is asked of numbers, and
only a rejection reads the vocabulary.

Where several drafters drew the children of a node (`Draft.sources`), p becomes max(a p - b_1 q_1 -
b_2 q_2 - ..., 0): each drafter has a factor b. With one drafter the tuples below have one entry.

Axis letters as in `jaxspec.core`: B batch, N nodes of a tree, I inner ones, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Draw
from jaxspec.rules.common import MIN_MASS, at_nodes, real_parent, take_position


class Tree(NamedTuple):
    """A draft tree with the target's and the drafter's probabilities at its nodes."""

    tokens: Int[Array, "B N"]  # the nodes' tokens
    # `Draft.parent`, with -1 also for padding and for tokens drawn from NaN
    parent: Int[Array, "B N"]
    draws: Int[Array, "B N"]  # how each node was chosen, a `Draw`
    # the number of each node's distribution; None: there is one for all
    sources: Int[Array, "B N"] | None
    # these two: the probability of each node's token after its parent, by each drafter for q; a
    # point mass's q is of no meaning
    p: Float[Array, "B N"]
    q: tuple[Float[Array, "B N"], ...]
    # whether an elder sibling has the same token, of which a rejection leaves nothing
    repeated: Bool[Array, "B N"]
    # these two: the distributions after the fed tokens
    log_p: Float[Array, "B N+1 V"]
    # one for each drafter; () if all nodes are point masses
    log_q: tuple[Float[Array, "B I V"], ...]


class Residual(NamedTuple):
    """The residual after each fed token: max(a p - b q, 0), but 0 at the tokens of rejected
    children.
    """

    # these two: the numbers above, b for each q; 1 and 0 before any rejection
    a: Float[Array, "B N+1"]
    b: tuple[Float[Array, "B N+1"], ...]
    # the mass of each q on tokens that no rejected child has
    unseen: tuple[Float[Array, "B N+1"], ...]


def read(draft: Draft, target: Distribution) -> Tree:
    """A draft's tree and the distributions that it is judged by."""
    assert target.log_probs is not None
    tokens = draft.tokens
    parent = real_parent(draft)
    p = jnp.exp(at_nodes(target.log_probs, draft))
    if draft.log_probs is None:
        log_q = ()
        q = (jnp.ones_like(p),)
        draws = jnp.full_like(parent, int(Draw.FIXED))
    else:
        log_q = draft.log_probs, *draft.other_log_probs
        q = tuple(jnp.exp(at_nodes(log_probs, draft)) for log_probs in log_q)
        draws = draft.draws
        if draws is None:
            draws = jnp.full_like(parent, int(Draw.WITHOUT_REPLACEMENT))
        is_broken = jnp.isnan(of_source(q, draft.sources))
        parent = jnp.where(is_broken & (draws != int(Draw.FIXED)), -1, parent)
    # A sibling that repeats a token was judged already: nothing of p is left for it.
    twin = (parent[:, :, None] == parent[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
    repeated = jnp.any(twin & jnp.tri(parent.shape[1], k=-1, dtype=bool)[None], axis=-1)
    return Tree(tokens, parent, draws, draft.sources, p, q, repeated, target.log_probs, log_q)


def of_source(values: tuple[Array, ...], sources: Int[Array, "*shape"] | None) -> Array:
    """Takes each entry from the array of its source; None: from the only one.

    >>> of_source((jnp.array([1, 2, 3]), jnp.array([4, 5, 6])), jnp.array([0, 1, 0])).tolist()
    [1, 5, 3]
    """
    selected = values[0]
    for number, value in enumerate(values[1:], 1):
        selected = jnp.where(sources == number, value, selected)
    return selected


def initial(tree: Tree) -> Residual:
    """Returns the residual before any rejection."""
    ones = jnp.ones((tree.tokens.shape[0], tree.tokens.shape[1] + 1), jnp.float32)
    return Residual(ones, tuple(jnp.zeros_like(ones) for _ in tree.q), tuple(ones for _ in tree.q))


def trial_probs(
    tree: Tree, residual: Residual, child: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The probability of a child's token in the residual of p at its parent, and in the
    distribution that the child was drawn from.

    Its elder siblings are rejected. The second is 1 for a point mass.
    """
    parent = jnp.maximum(take_position(tree.parent, child), 0)
    a = take_position(residual.a, parent)
    all_b = [take_position(b, parent) for b in residual.b]
    p = take_position(tree.p, child)
    probs = tuple(take_position(q, child) for q in tree.q)
    left_of_p = a * p
    for b, q in zip(all_b, probs, strict=True):
        # q may be NaN: nothing of it was taken
        left_of_p = left_of_p - jnp.where(b != 0, b * q, 0.0)
    left_of_p = jnp.maximum(left_of_p, 0.0)
    scale = _scale(tree, residual, child, parent)
    source = _source(tree, child)
    repeated = take_position(tree.repeated, child)
    return jnp.where(repeated, 0.0, left_of_p), jnp.where(
        scale != 0, scale * of_source(probs, source), 1.0
    )


def after_rejection(
    tree: Tree,
    residual: Residual,
    child: Int[Array, " B"],
    weight: Float[Array, " B"],
    rejected: Bool[Array, " B"],
) -> tuple[Float[Array, " B"], Residual]:
    """Computes the residual after a child is rejected: at its parent norm(max(w p - q, 0)), where w
    is a weight.

    All of its elder siblings were rejected before; in rows where it is not `rejected` nothing
    changes.

    Returns the mass of max(w p - q, 0), and the residual. If the mass is 0 (w p equals q, up to
        rounding), no trial was needed: the numbers stay.
    """
    parent = jnp.maximum(take_position(tree.parent, child), 0)
    # w (a p - b q) less the child's scaled q is again of the form a' p - b' q: a' = w a, b' = w b +
    # scale, where only the child's own q has the scale added.
    a = weight * take_position(residual.a, parent)
    b = [weight * take_position(b, parent) for b in residual.b]
    child_scale = _scale(tree, residual, child, parent)
    source = _source(tree, child)
    b = [
        x + (child_scale if source is None else jnp.where(source == i, child_scale, 0.0))
        for i, x in enumerate(b)
    ]
    values, unseen = _rest(tree, parent, child, a, b)
    mass = jnp.sum(values, axis=-1)
    turned = rejected & (mass > MIN_MASS)
    # Normalising divides both numbers by the mass.
    scale = 1.0 / jnp.where(turned, mass, 1.0)
    unseen = tuple(
        put(old, parent, new, rejected) for old, new in zip(residual.unseen, unseen, strict=True)
    )
    a = put(residual.a, parent, a * scale, turned)
    b = tuple(put(old, parent, new * scale, turned) for old, new in zip(residual.b, b, strict=True))
    return mass, Residual(a, b, unseen)


def log_left(tree: Tree, residual: Residual, fed: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The logarithm of the residual of p after a fed token whose children are all rejected, not
    normalised.
    """
    a = take_position(residual.a, fed)
    b = [take_position(b, fed) for b in residual.b]
    values, _ = _rest(tree, fed, jnp.full_like(fed, tree.tokens.shape[1]), a, b)
    has_mass = jnp.any(values > 0, axis=-1, keepdims=True)
    return jnp.where(has_mass, jnp.log(values), take_position(tree.log_p, fed))


def put(
    x: Array, index: Int[Array, " B"], value: Float[Array, " B"], where: Bool[Array, " B"]
) -> Array:
    """x with x[b, index[b]] = value[b], in some rows."""
    is_place = jnp.arange(x.shape[1], dtype=index.dtype)[None, :] == index[:, None]
    return jnp.where(is_place & where[:, None], value[:, None], x)


def _source(tree: Tree, child: Int[Array, " B"]) -> Int[Array, " B"] | None:
    if tree.sources is None:
        return None
    return take_position(tree.sources, child)


def _scale(
    tree: Tree, residual: Residual, child: Int[Array, " B"], parent: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Computes the factor of q in a child's own distribution, given its elder siblings; 0: it is a
    point mass.
    """
    draw = take_position(tree.draws, child)
    unseen = of_source(
        tuple(take_position(x, parent) for x in residual.unseen), _source(tree, child)
    )
    normalised = jnp.where(unseen != 0, 1.0 / jnp.where(unseen != 0, unseen, 1.0), 0.0)
    scale = jnp.where(draw == int(Draw.WITH_REPLACEMENT), 1.0, normalised)
    return jnp.where(draw == int(Draw.FIXED), 0.0, scale)


def _rest(
    tree: Tree,
    fed: Int[Array, " B"],
    last: Int[Array, " B"],
    a: Float[Array, " B"],
    b: Sequence[Float[Array, " B"]],
) -> tuple[Float[Array, "B V"], list[Float[Array, " B"]]]:
    """max(a p - b q, 0) after a fed token, 0 at the tokens of its children up to `last`; the rest
    of each q's mass.
    """
    (rows, nodes), vocab = tree.tokens.shape, tree.log_p.shape[-1]
    node = jnp.arange(nodes, dtype=jnp.int32)[None, :]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    gone = (tree.parent == fed[:, None]) & (node <= last[:, None])
    slot = jnp.where(gone, tree.tokens, vocab)  # out of the vocabulary: nowhere
    is_left = jnp.ones((rows, vocab), bool).at[row, slot].set(False, mode="drop")
    # From here on rows of the vocabulary, [B, V]: the only ones that a rejection reads.
    p = jnp.exp(take_position(tree.log_p, fed))
    all_q = [
        jnp.exp(take_position(log_q, jnp.minimum(fed, log_q.shape[1] - 1))) for log_q in tree.log_q
    ]
    # Of point masses alone there is no q.
    removed = [
        jnp.where(x[:, None] != 0, x[:, None] * q, 0.0) for x, q in zip(b, all_q, strict=False)
    ]
    difference = a[:, None] * p
    for mass in removed:
        difference = difference - mass
    values = jnp.where(is_left, jnp.maximum(difference, 0.0), 0.0)
    return values, [jnp.sum(jnp.where(is_left, q, 0.0), axis=-1) for q in all_q] or [
        jnp.ones_like(a)
    ]
