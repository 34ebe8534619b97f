"""The children of a tree's nodes, chosen from the drafter's distributions there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Distribution, Draw, noise
from jaxspec.core.checks import one_of

DrawName = Literal["without_replacement", "replacement", "top", "mixed"]


class Children(NamedTuple):
    """The children of some nodes, in the order in which they are to be judged."""

    tokens: Int[Array, "B n k"]  # each node's children, as many as the node with the most has
    draws: Int[Array, "B n k"]  # how each was chosen, a `Draw`
    live: Bool[Array, "B n k"]  # whether there is such a child: a token without a probability is none
    log_probs: Float[Array, "B n V"] | None  # what they were drawn from, as `Draft.log_probs`; None: point masses


def check(draw: str) -> None:
    """Checks the name of a draw."""
    one_of(draw, "draw", get_args(DrawName))


def choose(distribution: Distribution, keys: Key[Array, "B n"], counts: Sequence[int], draw: DrawName) -> Children:
    """Chooses counts[i] children of node i from the drafter's distribution there; entries past that mean nothing.

    A row at temperature 0 has its most probable tokens, whatever the draw.
    """
    log_probs, logits, count = distribution.log_probs, distribution.logits, max(counts)
    if log_probs is None:
        if logits is None:
            raise ValueError("a tree reads logits, and the sampler gives none: set Distribution.logits in it")
        return _top(logits, count, None)
    if draw == "top":
        children = _top(log_probs, count, None)
    elif draw == "replacement":
        child_keys = jax.vmap(lambda keys: noise.split(keys, 0, count))(keys)  # B n k
        for_each = jnp.broadcast_to(log_probs[:, :, None], (*child_keys.shape, log_probs.shape[-1]))  # B n k V
        children = _children(noise.categorical(child_keys, for_each), Draw.WITH_REPLACEMENT, log_probs)
    elif draw == "without_replacement":
        children = _children(noise.without_replacement(keys, log_probs, count), Draw.WITHOUT_REPLACEMENT, log_probs)
    else:
        children = _mixed(log_probs, keys, counts)
    if distribution.greedy is None or logits is None or children.log_probs is None:
        return children
    best, cold = _top(logits, count, children.log_probs), distribution.greedy[:, None, None]
    pairs = zip(best[:3], children[:3], strict=True)
    tokens, draws, live = (jnp.where(cold, fixed, drawn) for fixed, drawn in pairs)
    return Children(tokens, draws, live, children.log_probs)


def _mixed(log_probs: Float[Array, "B n V"], keys: Key[Array, "B n"], counts: Sequence[int]) -> Children:
    """Draws one child, the first, from the distribution without the others, which are its most probable tokens."""
    fixed = noise.largest(log_probs, max(counts) - 1) if max(counts) > 1 else jnp.zeros((*keys.shape, 0), jnp.int32)
    is_child = jnp.arange(fixed.shape[-1])[None, :] < jnp.asarray(counts)[:, None] - 1  # n k-1
    token = jnp.arange(log_probs.shape[-1], dtype=jnp.int32)[None, None, None]
    is_fixed = jnp.any(jnp.logical_and(fixed[..., None] == token, is_child[None, :, :, None]), axis=2)  # B n V
    unfixed = jax.nn.log_softmax(jnp.where(is_fixed, -jnp.inf, log_probs), axis=-1)
    unfixed = jnp.where(jnp.isnan(unfixed), -jnp.inf, unfixed)  # the fixed ones have all the mass
    sampled = _children(noise.categorical(keys, unfixed)[..., None], Draw.WITHOUT_REPLACEMENT, unfixed)
    pairs = zip(sampled[:3], _children(fixed, Draw.FIXED, log_probs)[:3], strict=True)
    tokens, draws, live = (jnp.concatenate(parts, axis=-1) for parts in pairs)
    return Children(tokens, draws, live, unfixed)


def _top(scores: Float[Array, "B n V"], count: int, log_probs: Float[Array, "B n V"] | None) -> Children:
    return _children(noise.largest(scores, count), Draw.FIXED, scores)._replace(log_probs=log_probs)


def _children(tokens: Int[Array, "B n k"], draw: Draw, log_probs: Float[Array, "B n V"]) -> Children:
    """Makes children that were all chosen in the same way."""
    live = jnp.take_along_axis(log_probs, tokens, axis=-1) > -jnp.inf
    return Children(tokens, jnp.full(tokens.shape, int(draw), jnp.int32), live, log_probs)
