"""Several continuations as one tree: what they begin with alike is one path, and what is seen most often goes first."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Draft, tree
from jaxspec.core.checks import integers


def check(candidates: int, length: int) -> None:
    """Raises:
    ValueError: no candidates, or of no tokens, or other numbers than integers.
    """
    candidates, length = integers(candidates=candidates, length=length)
    if candidates < 1 or length < 1:
        raise ValueError(f"candidates is {candidates} and length {length}: expected at least 1 of each")


def as_tree(tokens: Int[Array, "B C G"], real: Bool[Array, "B C G"], weight: Float[Array, "B C"], nodes: int) -> Draft:
    """The nodes that most continuations go through, as point masses.

    Args:
        tokens: C continuations of each row.
        real: their real tokens, which are the first ones.
        weight: what each continuation counts; of equals the first goes first.
        nodes: how many to choose; there may be fewer, and the tree has none deeper than G.

    >>> tokens = jnp.array([[[5, 6, 7], [5, 8, 9], [5, 6, 4]]])
    >>> draft = as_tree(tokens, jnp.ones(tokens.shape, bool), jnp.ones((1, 3)), nodes=4)
    >>> draft.tokens.tolist(), draft.parent.tolist()
    ([[5, 6, 8, 7]], [[0, 1, 1, 2]])
    """
    batch, count, length = tokens.shape
    same = jnp.logical_and(tokens[:, :, None] == tokens[:, None, :], jnp.logical_and(real[:, :, None], real[:, None]))
    alike = jnp.cumprod(same.astype(jnp.int32), axis=-1) > 0  # B C C G: up to this token
    first = jnp.argmax(alike, axis=2).astype(jnp.int32)  # of those that begin so
    seen = jnp.sum(jnp.where(alike, weight[:, None, :, None], 0.0), axis=2)
    own = jnp.logical_and(first == jnp.arange(count, dtype=jnp.int32)[None, :, None], real)
    # A candidate for each token of each continuation, by depth, so that parents come first.
    above = first[:, :, :-1] + count * jnp.arange(length - 1, dtype=jnp.int32)[None, None, :]
    above = jnp.pad(above, ((0, 0), (0, 0), (1, 0)), constant_values=-1)

    def by_depth(x: Array) -> Array:
        return x.transpose(0, 2, 1).reshape(batch, -1)

    scores = jnp.where(own, seen, -jnp.inf)
    chosen = tree.best_nodes(by_depth(tokens), by_depth(scores), by_depth(above), nodes)
    return Draft(chosen.tokens, jnp.sum(chosen.parent >= 0, axis=1, dtype=jnp.int32), chosen.parent)
