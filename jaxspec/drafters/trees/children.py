"""The children of a tree's nodes, chosen from the drafter's distributions there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Distribution, Draw, noise
from jaxspec.core.checks import one_of

DrawName = Literal["without_replacement", "replacement", "top", "mixed"]


class Children(NamedTuple):
    """The children of some nodes, in the order of their trials."""

    tokens: Int[Array, "B n k"]  # each node's children, as many as the node with the most has
    draws: Int[Array, "B n k"]  # how each was chosen, a `Draw`
    # whether there is such a child: a token without a probability is none
    live: Bool[Array, "B n k"]
    # what they were drawn from, as `Draft.log_probs`; None: point masses
    log_probs: Float[Array, "B n V"] | None


def check(draw: str) -> None:
    """Checks the name of a draw."""
    one_of(draw, "draw", get_args(DrawName))


def choose(
    distribution: Distribution, keys: Key[Array, "B n"], counts: Sequence[int], draw: DrawName
) -> Children:
    """Chooses counts[i] children of node i from the drafter's distribution there; entries past that
    mean nothing.

    A row at temperature 0 has its most probable tokens, whatever the draw.
    """
    log_probs = distribution.log_probs
    logits = distribution.logits
    count = max(counts)
    if log_probs is None:
        if logits is None:
            raise ValueError(
                "a tree reads logits, and the sampler gives none: set Distribution.logits in it"
            )
        return _top(logits, count, None)
    if draw == "top":
        children = _top(log_probs, count, None)
    elif draw == "replacement":
        child_keys = jax.vmap(lambda keys: noise.split(keys, 0, count))(keys)  # B n k
        # B n k V
        for_each = jnp.broadcast_to(log_probs[:, :, None], (*child_keys.shape, log_probs.shape[-1]))
        children = _children(
            noise.categorical(child_keys, for_each), Draw.WITH_REPLACEMENT, log_probs
        )
    elif draw == "without_replacement":
        children = _children(
            noise.without_replacement(keys, log_probs, count), Draw.WITHOUT_REPLACEMENT, log_probs
        )
    else:
        children = _mixed(log_probs, keys, counts)
    if distribution.greedy is None or logits is None or children.log_probs is None:
        return children
    best = _top(logits, count, children.log_probs)
    cold = distribution.greedy[:, None, None]
    pairs = zip(best[:3], children[:3], strict=True)
    tokens, draws, live = (jnp.where(cold, fixed, drawn) for fixed, drawn in pairs)
    return Children(tokens, draws, live, children.log_probs)


def in_turn(
    distributions: Sequence[Distribution],
    keys: Key[Array, "B n"],
    turns: Int[np.ndarray, "n k"],
    draw: DrawName,
) -> tuple[Children, tuple[Float[Array, "B n V"], ...]]:
    """Chooses children one after the other, each by the drafter whose turn it is.

    Args:
        distributions: the distributions of each drafter at the nodes.
        keys: the nodes' keys.
        turns: the number of the drafter that chooses each child.
        draw: the name of a draw. The first child of "mixed" is sampled from all tokens, unlike in
            `choose`. No child repeats an earlier sibling, whoever chose that one, unless it is
            drawn with replacement. Rows at temperature 0 have different children, whatever the
            draw.

    Returns:
        The children, and what each of the drafters drew from: nothing, if all children are point
        masses.
    """
    chosen: list[Children] = []
    remaining = list(distributions)  # without the tokens of the children so far
    child_keys = jax.vmap(lambda keys: noise.split(keys, 0, turns.shape[1]))(keys)  # B n k
    for rank, drafter_of_node in enumerate(turns.T):
        distribution = _of_turn(remaining, drafter_of_node)
        child_draw: DrawName = draw
        if draw == "mixed":
            child_draw = "top" if rank else "without_replacement"
        if child_draw == "top":
            distribution = _ranked_at_temperature_0(distribution)
        chosen.append(choose(distribution, child_keys[..., rank], [1] * len(turns), child_draw))
        remaining = [_without(distribution, chosen[-1], draw) for distribution in remaining]
    parts = zip(*(children[:3] for children in chosen), strict=True)
    tokens, draws, live = (jnp.concatenate(values, axis=-1) for values in parts)
    drawn_from = [
        distribution.log_probs
        for distribution in distributions
        if distribution.log_probs is not None
    ]
    if draw == "top":
        drawn_from = []
    return Children(tokens, draws, live, None), tuple(drawn_from)


def _of_turn(distributions: Sequence[Distribution], turn: Int[np.ndarray, " n"]) -> Distribution:
    """Takes for each node the distribution of the drafter whose turn it is there."""

    def at_nodes(values: Sequence[Array | None]) -> Array | None:
        rows = values[0]
        for number, value in enumerate(values[1:], 1):
            if rows is not None and value is not None:
                rows = jnp.where((turn == number)[None, :, None], value, rows)
        return rows

    log_probs, logits = (
        at_nodes([getattr(x, name) for x in distributions]) for name in ("log_probs", "logits")
    )
    return Distribution(log_probs=log_probs, logits=logits, greedy=distributions[0].greedy)


def _ranked_at_temperature_0(distribution: Distribution) -> Distribution:
    """Ranks the tokens of rows at temperature 0 by logits: in their distribution one token has all
    the mass.
    """
    log_probs = distribution.log_probs
    logits = distribution.logits
    greedy = distribution.greedy
    if log_probs is None or logits is None or greedy is None:
        return distribution
    return distribution._replace(log_probs=jnp.where(greedy[:, None, None], logits, log_probs))


def _without(distribution: Distribution, child: Children, draw: DrawName) -> Distribution:
    """Takes a child's token out of the next child's distribution, which need not be normalised.

    Logits are read only for the most probable tokens of rows at temperature 0, which differ
    whatever the draw.
    """

    def rest(values: Float[Array, "B n V"] | None) -> Float[Array, "B n V"] | None:
        if values is None:
            return None
        token = jnp.arange(values.shape[-1], dtype=jnp.int32)[None, None]
        return jnp.where(child.live & (child.tokens == token), -jnp.inf, values)

    if draw == "replacement":
        return distribution._replace(logits=rest(distribution.logits))
    return distribution._replace(
        log_probs=rest(distribution.log_probs), logits=rest(distribution.logits)
    )


def _mixed(
    log_probs: Float[Array, "B n V"], keys: Key[Array, "B n"], counts: Sequence[int]
) -> Children:
    """Draws one child, the first, from the distribution without the others, which are its most
    probable tokens.
    """
    if max(counts) > 1:
        fixed = noise.largest(log_probs, max(counts) - 1)
    else:
        fixed = jnp.zeros((*keys.shape, 0), jnp.int32)
    is_child = jnp.arange(fixed.shape[-1])[None, :] < jnp.asarray(counts)[:, None] - 1  # n k-1
    token = jnp.arange(log_probs.shape[-1], dtype=jnp.int32)[None, None, None]
    is_fixed = jnp.any((fixed[..., None] == token) & is_child[None, :, :, None], axis=2)  # B n V
    unfixed = jax.nn.log_softmax(jnp.where(is_fixed, -jnp.inf, log_probs), axis=-1)
    unfixed = jnp.where(jnp.isnan(unfixed), -jnp.inf, unfixed)  # the fixed ones have all the mass
    sampled = _children(
        noise.categorical(keys, unfixed)[..., None], Draw.WITHOUT_REPLACEMENT, unfixed
    )
    pairs = zip(sampled[:3], _children(fixed, Draw.FIXED, log_probs)[:3], strict=True)
    tokens, draws, live = (jnp.concatenate(parts, axis=-1) for parts in pairs)
    return Children(tokens, draws, live, unfixed)


def _top(
    scores: Float[Array, "B n V"], count: int, log_probs: Float[Array, "B n V"] | None
) -> Children:
    return _children(noise.largest(scores, count), Draw.FIXED, scores)._replace(log_probs=log_probs)


def _children(
    tokens: Int[Array, "B n k"], draw: Draw, log_probs: Float[Array, "B n V"]
) -> Children:
    """Makes children that were all chosen in the same way."""
    live = jnp.take_along_axis(log_probs, tokens, axis=-1) > -jnp.inf
    return Children(tokens, jnp.full(tokens.shape, int(draw), jnp.int32), live, log_probs)
