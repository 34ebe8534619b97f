"""Votes among several continuations: the likeliest one, token by token, or a tree of the most
frequent ones.

What look-ups found at several places of a text is joined here. A continuation is real up to its
first token that is not; what lies after that is not read.

Shapes: B batch, C continuations, G tokens of each, K groups of continuations that vote together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Draft, TreeSize, tree
from jaxspec.core.checks import integers


def tree_size(candidates: int, length: int) -> TreeSize | None:
    """Returns the size of a tree of `candidates` continuations of `length` tokens; None for a
    single one, a chain.
    """
    candidates, length = integers(1, candidates=candidates, length=length)
    if candidates > 1:
        return TreeSize(candidates * length, length)
    return None


def likeliest(
    tokens: Int[Array, "B C G"], real: Bool[Array, "B C G"], voters: Bool[Array, "B K C"]
) -> tuple[Int[Array, "B K G"], Float[Array, "B K G"]]:
    """Chooses a continuation token by token. The texts that agree with all tokens chosen so far
    vote for the next one.

    Args:
        real: their real tokens.
        voters: True for continuations that vote, in each of K groups.

    Returns:
        The tokens (ties go to the first continuation), and the probability of each with all before
        it, by shares of the votes. It is 0 after the end of all continuations, where tokens have no
        meaning.

    >>> tokens = jnp.array([[[3, 1, 8], [3, 2, 7], [4, 2, 7], [3, 2, 0]]])
    >>> path, probability = likeliest(tokens, tokens > 0, jnp.ones((1, 1, 4), bool))
    >>> path.tolist(), probability.round(2).tolist()
    ([[[3, 2, 7]]], [[[0.75, 0.5, 0.25]]])
    """

    def choose(
        carry: tuple[Bool[Array, "B K C"], Float[Array, "B K"]], step: tuple[Array, Array, Array]
    ):
        alive, probability = carry
        token, present, same = step  # B C; B C; B C C
        votes = jnp.einsum("bkc,bic->bki", alive.astype(jnp.float32), same.astype(jnp.float32))
        votes = jnp.where(alive & present[:, None, :], votes, 0.0)
        winner = jnp.take_along_axis(token, jnp.argmax(votes, axis=2), axis=1)  # B K
        # Of those that had all tokens so far; some of them may end here, and vote for none.
        share = jnp.max(votes, axis=2) / jnp.maximum(jnp.sum(alive, axis=2, dtype=jnp.float32), 1.0)
        agreed = present[:, None, :] & (token[:, None, :] == winner[:, :, None])
        probability = probability * share
        return (alive & agreed, probability), (winner, probability)

    start = voters, jnp.ones(voters.shape[:2], jnp.float32)
    steps = (
        tokens.transpose(2, 0, 1),
        real.transpose(2, 0, 1),
        _same(tokens, real).transpose(3, 0, 1, 2),
    )
    _, (path, probability) = jax.lax.scan(choose, start, steps)
    return path.transpose(1, 2, 0), probability.transpose(1, 2, 0)


def as_tree(
    tokens: Int[Array, "B C G"], real: Bool[Array, "B C G"], weight: Float[Array, "B C"], nodes: int
) -> Draft:
    """Drafts, as point masses, the nodes that most continuations go through; what begins alike is
    one path.

    Of continuations with equal weights the first goes first. The tree has `nodes` nodes at most,
    none deeper than G.

    >>> tokens = jnp.array([[[5, 6, 7], [5, 8, 9], [5, 6, 4]]])
    >>> draft = as_tree(tokens, jnp.ones(tokens.shape, bool), jnp.ones((1, 3)), nodes=4)
    >>> draft.tokens.tolist(), draft.parent.tolist()
    ([[5, 6, 8, 7]], [[0, 1, 1, 2]])
    """
    batch, count, length = tokens.shape
    # B C C G: up to this token
    alike = jnp.cumprod(_same(tokens, real).astype(jnp.int32), axis=-1) > 0
    # B C G: the first continuation that begins so has the node
    first = jnp.argmax(alike, axis=2).astype(jnp.int32)
    votes = jnp.sum(jnp.where(alike, weight[:, None, :, None], 0.0), axis=2)
    is_node = (first == jnp.arange(count, dtype=jnp.int32)[None, :, None]) & jnp.any(alike, axis=2)
    # Candidates for the tree are the tokens of all continuations, by depth, so that parents come
    # first: token g of continuation c is number g * C + c, and the one above it lies in the first
    # continuation that begins so.
    above = first[:, :, :-1] + count * jnp.arange(length - 1, dtype=jnp.int32)[None, None, :]
    above = jnp.pad(above, ((0, 0), (0, 0), (1, 0)), constant_values=-1)

    def by_depth(values: Array) -> Array:
        return values.transpose(0, 2, 1).reshape(batch, -1)

    scores = jnp.where(is_node, votes, -jnp.inf)
    chosen = tree.best_nodes(by_depth(tokens), by_depth(scores), by_depth(above), nodes)
    return Draft(chosen.tokens, jnp.sum(chosen.parent >= 0, axis=1, dtype=jnp.int32), chosen.parent)


def _same(tokens: Int[Array, "B C G"], real: Bool[Array, "B C G"]) -> Bool[Array, "B C C G"]:
    """Returns where two continuations have the same real token."""
    both_real = real[:, :, None] & real[:, None, :]
    return (tokens[:, :, None] == tokens[:, None, :]) & both_real
