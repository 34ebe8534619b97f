"""How the children of a tree's nodes are chosen from the drafter's distributions there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Distribution, Draw, noise

DrawName = Literal["without_replacement", "replacement", "top", "mixed"]


class Children(NamedTuple):
    """The children of some nodes, in the order in which they are to be judged.

    Attributes:
        tokens: of each node as many as the most that one of them has.
        draws: how each was chosen, a `Draw`.
        live: whether there is such a child: a token without a probability is none.
        log_probs: what they were drawn from, as `Draft.log_probs`; None: point masses.
    """

    tokens: Int[Array, "B n k"]
    draws: Int[Array, "B n k"]
    live: Bool[Array, "B n k"]
    log_probs: Float[Array, "B n V"] | None


def check(draw: str) -> None:
    """Raises:
    ValueError: no such draw.
    """
    if draw not in get_args(DrawName):
        raise ValueError(f"draw is {draw!r}: expected one of {', '.join(get_args(DrawName))}")


def choose(distribution: Distribution, keys: Key[Array, "B n"], counts: Sequence[int], draw: DrawName) -> Children:
    """Chooses counts[i] children of node i; entries past that are of no meaning.

    A row at temperature 0 has its most probable tokens, whatever the draw.

    Args:
        distribution: the drafter's at each node.
        keys: one for each node.
        counts: children of each node; static.
        draw: as in `drafters.tree`.
    """
    log_probs, logits, count = distribution.log_probs, distribution.logits, max(counts)
    if log_probs is None:
        if logits is None:
            raise ValueError("a tree reads logits, and the sampler gives none: set Distribution.logits in it")
        return _top(logits, count, None)
    if draw == "top":
        made = _top(log_probs, count, None)
    elif draw == "replacement":
        each = jax.vmap(lambda keys: noise.split(keys, 0, count))(keys)
        wide = jnp.broadcast_to(log_probs[:, :, None], (*each.shape, log_probs.shape[-1]))
        made = _all(noise.categorical(each, wide), Draw.WITH_REPLACEMENT, log_probs)
    elif draw == "without_replacement":
        made = _all(noise.without_replacement(keys, log_probs, count), Draw.WITHOUT_REPLACEMENT, log_probs)
    else:
        made = _mixed(log_probs, keys, counts)
    if distribution.greedy is None or logits is None or made.log_probs is None:
        return made
    best, cold = _top(logits, count, made.log_probs), distribution.greedy[:, None, None]
    tokens, draws, live = (jnp.where(cold, x, y) for x, y in zip(best[:3], made[:3], strict=True))
    return Children(tokens, draws, live, made.log_probs)


def _mixed(log_probs: Float[Array, "B n V"], keys: Key[Array, "B n"], counts: Sequence[int]) -> Children:
    """All but one fixed, the most probable ones; that one first, drawn from the rest."""
    fixed = noise.largest(log_probs, max(counts) - 1) if max(counts) > 1 else jnp.zeros((*keys.shape, 0), jnp.int32)
    wanted = jnp.arange(fixed.shape[-1])[None, :] < jnp.asarray(counts)[:, None] - 1
    token = jnp.arange(log_probs.shape[-1], dtype=jnp.int32)[None, None, None]
    taken = jnp.any(jnp.logical_and(fixed[..., None] == token, wanted[None, :, :, None]), axis=2)
    rest = jax.nn.log_softmax(jnp.where(taken, -jnp.inf, log_probs), axis=-1)
    rest = jnp.where(jnp.isnan(rest), -jnp.inf, rest)  # the fixed ones have all the mass
    sampled = _all(noise.categorical(keys, rest)[..., None], Draw.WITHOUT_REPLACEMENT, rest)
    both = zip(sampled[:3], _all(fixed, Draw.FIXED, log_probs)[:3], strict=True)
    tokens, draws, live = (jnp.concatenate(parts, axis=-1) for parts in both)
    return Children(tokens, draws, live, rest)


def _top(scores: Float[Array, "B n V"], count: int, log_probs: Float[Array, "B n V"] | None) -> Children:
    made = _all(noise.largest(scores, count), Draw.FIXED, scores)
    return made._replace(log_probs=log_probs)


def _all(tokens: Int[Array, "B n k"], draw: Draw, log_probs: Float[Array, "B n V"]) -> Children:
    """All chosen alike."""
    live = jnp.take_along_axis(log_probs, tokens, axis=-1) > -jnp.inf
    return Children(tokens, jnp.full(tokens.shape, int(draw), jnp.int32), live, log_probs)
