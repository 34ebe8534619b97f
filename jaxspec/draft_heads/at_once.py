"""Drafters that have the distributions of a whole draft before they draw its first token: loops for chains and trees.

Shapes: B batch, C draft tokens that there are logits for, F and n nodes of a tree that are fed, W logits of a drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import Cache, Caches, Commit, Draft, DraftContext, DraftInit, TreeReader, Weights
from jaxspec.drafters.sequential import sequential


def draw_in_a_row(
    first: Callable[[Any], tuple[Float[Array, "B W"], Any]],
    following: Callable[[Int[Array, ""], Int[Array, " B"], Any], tuple[Float[Array, "B W"], Any]],
    carry: Any,
    context: DraftContext,
    count: int,
) -> tuple[Draft, Any]:
    """Runs `sequential` for a drafter with logits of at most `count` tokens, whatever gamma; functions as there."""
    gamma = min(context.gamma, count)

    def begin(carry: Any):
        logits, carry = first(carry)
        return logits, None, carry

    def proceed(i: Int[Array, ""], last: Int[Array, " B"], carry: Any):
        logits, carry = following(i, last, carry)
        return logits, None, carry

    def padded(x: Array) -> Array:  # among other drafters (`drafters.fallback`) gamma may be larger
        if x.ndim < 2 or gamma == context.gamma:
            return x
        return jnp.pad(x, [(0, 0), (0, context.gamma - gamma)] + [(0, 0)] * (x.ndim - 2))

    cut = context._replace(gamma=gamma, max_draft=jnp.minimum(context.max_draft, gamma))
    draft, carry = sequential(begin, proceed, carry, cut)
    return jax.tree.map(padded, draft), carry


def reader_at_once(
    init: DraftInit,
    logits: Callable[[Weights, Caches, DraftContext], tuple[Float[Array, "B C W"], Cache | None]],
    commit: Commit,
    vocab_size: int,
    count: int,
) -> TreeReader:
    """Drafts trees for a drafter whose distributions depend on the depth alone, and are all there at once.

    Args:
        init, commit: the drafter's.
        logits: (weights, caches, context) -> the logits of `count` draft tokens, or of one for each node of a smaller
            tree; and the target's cache, if it was used.
        vocab_size: width of the logits.
        count: how many draft tokens have logits.
    """

    def start(weights: Weights, caches: Caches, context: DraftContext, fed: int) -> tuple:
        levels, cache = logits(weights, caches, context)
        return levels, jnp.zeros((), jnp.int32), cache

    def first(weights: Weights, state: Any, carry: tuple, context: DraftContext, width: int) -> Any:
        return carry[0][:, :1], carry

    def following(weights: Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], carry: tuple) -> Any:
        levels, depth, cache = carry
        level = jax.lax.dynamic_slice_in_dim(levels, depth + 1, 1, axis=1)
        return jnp.broadcast_to(level, (*tokens.shape, levels.shape[-1])), (levels, depth + 1, cache)

    def after(caches: Caches, carry: tuple, context: DraftContext, slots: Int[Array, "B N"]) -> Caches:
        return caches if carry[2] is None else caches._replace(target=carry[2])

    return TreeReader(lambda nodes: init, start, first, following, after, lambda levels: commit, vocab_size, count)
