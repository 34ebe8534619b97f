"""A tree that grows where the drafter is sure: EAGLE-2's expansion and re-ranking (Li et al., arXiv 2406.16858).

For a drafter that can give the distribution after any node. Every row has a tree of its own, of static shapes. See
`drafters.dynamic_tree`, whose `propose` is little more than

    draft, slots, cache = grow(first, following, cache, context, nodes=32, depth=6, width=8)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, DraftContext, noise
from jaxspec.core import tree as trees
from jaxspec.drafters.trees.tree_cache import NodeLogits, read_if_wanted


def grow(
    first: Callable[[Any], NodeLogits],
    following: Callable[[Int[Array, "B k"], Int[Array, "B F"], Any], NodeLogits],
    carry: Any,
    context: DraftContext,
    *,
    nodes: int,
    depth: int,
    width: int,
) -> tuple[Draft, Int[Array, "B N"], Any]:
    """Drafts the most probable nodes of a tree that is expanded level by level.

    A node's score is the drafter's probability of the path to it. On each level the `width` nodes with the best scores
    are fed, and each gets its `width` most probable tokens as children. Of all nodes that were seen the `nodes` best
    are the draft: a child never has a better score than its parent, and of equals the parent comes first, so they are
    a tree. Nothing is drawn: every node is a function of what is committed, so it is a fixed choice (a point mass) for
    the rule, and which nodes are left out depends on no sample.

    Args:
        first: carry -> logits after the last committed token [B, 1, W].
        following: (tokens [B, width], parent, carry) -> logits after these tokens. `parent` is that of all tokens fed
            so far, with these, as `core.Extend` has it: the last `width` entries are these tokens'.
        carry: what the two pass on; of one structure throughout.
        context: of the round.
        nodes, depth, width: see above; `depth` is the deepest level's.

    Returns:
        The draft; each node's number among the tokens that were fed, -1 if it was not; and the carry.
    """
    batch, limit = context.max_draft.shape[0], context.max_draft
    # Fed tokens are numbered in the order of feeding, candidates in the order in which they are seen.
    fed_tokens = jnp.zeros((batch, max(depth - 1, 1) * width), jnp.int32)
    fed_parent = jnp.zeros((batch, 0), jnp.int32)  # B F, grows by k a level; a fed token's number, -1: the root
    fed_as = jnp.zeros((batch, 0), jnp.int32)  # B F: which candidate each fed token is
    frontier = jnp.full((batch, 1), -1, jnp.int32)  # B n: the candidates whose children come next; -1: the root
    reached = jnp.zeros((batch, 1), jnp.float32)  # B n: their scores
    tokens, scores, parents = [], [], []  # of the candidates, level by level
    for level in range(depth):
        level_tokens = fed_tokens[:, (level - 1) * width : level * width]
        read = functools.partial(following, level_tokens, fed_parent) if level else first
        logits, carry = read_if_wanted(context, level, read, carry)
        distribution = context.to_distribution(logits, fed_tokens, _seen(fed_parent, width, fed_tokens.shape[1]))
        log_probs = _log_probs(distribution)
        best = noise.largest(log_probs, width)  # B n k: each node's children
        # Rounding must not raise a child above its parent.
        score = jnp.minimum(jnp.take_along_axis(log_probs, best, axis=-1), 0.0) + reached[:, :, None]
        score = jnp.where(level < limit[:, None, None], score, -jnp.inf)
        num_seen = sum(part.shape[1] for part in tokens)
        tokens.append(best.reshape(batch, -1))
        scores.append(score.reshape(batch, -1))
        parents.append(jnp.repeat(frontier, width, axis=1))
        if level == depth - 1:
            break
        # The best of this level are fed next: `chosen` are their numbers among its candidates.
        reached, chosen = jax.lax.top_k(scores[-1], width)  # of equals the first
        frontier = (num_seen + chosen).astype(jnp.int32)
        follows = jnp.full_like(frontier, -1) if not level else (level - 1) * width + chosen // width
        fed_tokens = jax.lax.dynamic_update_slice_in_dim(
            fed_tokens, jnp.take_along_axis(tokens[-1], chosen, axis=1), level * width, axis=1
        )
        fed_parent = jnp.concatenate([fed_parent, follows.astype(jnp.int32)], axis=1)
        fed_as = jnp.concatenate([fed_as, frontier], axis=1)
    # B C for all C candidates
    all_tokens, all_scores, above = (jnp.concatenate(parts, axis=1) for parts in (tokens, scores, parents))
    best = trees.best_nodes(all_tokens, all_scores, above, nodes)
    draft = Draft(best.tokens, jnp.full_like(context.row.length, nodes), best.parent)
    return draft, _find(best.chosen, fed_as), carry


def candidates(depth: int, width: int) -> int:
    """Counts the nodes that are seen, of which the best are chosen.

    >>> candidates(depth=3, width=2)
    10
    """
    return width + (depth - 1) * width * width


def _find(wanted: Int[Array, "B n"], among: Int[Array, "B F"]) -> Int[Array, "B n"]:
    """Finds where each of the wanted numbers stands; -1: nowhere.

    >>> _find(jnp.array([[7, -1, 5]]), jnp.array([[5, 6, 7]])).tolist()
    [[2, -1, 0]]
    """
    if not among.shape[1]:
        return jnp.full_like(wanted, -1)
    same = wanted[:, :, None] == among[:, None, :]
    return jnp.where(jnp.any(same, axis=-1), jnp.argmax(same, axis=-1), -1).astype(jnp.int32)


def _seen(parent: Int[Array, "B F"], width: int, padded: int) -> Bool[Array, "#B n padded"]:
    """Marks the fed tokens that precede the position after each of the last `width`; none, if none was fed."""
    if not parent.shape[1]:
        return jnp.zeros((1, 1, padded), bool)
    on_path = trees.ancestors(parent)[:, -width:]
    return jnp.pad(on_path, ((0, 0), (0, 0), (0, padded - parent.shape[1])))


def _log_probs(distribution: Distribution) -> Float[Array, "B n V"]:
    """Returns log probabilities to rank by; in rows at temperature 0 those at 1. NaN ranks last."""
    log_probs, logits, greedy = distribution.log_probs, distribution.logits, distribution.greedy
    if log_probs is None or greedy is not None:
        if logits is None:
            raise ValueError("a tree reads logits, and the sampler gives none: set Distribution.logits in it")
        at_one = jax.nn.log_softmax(logits, axis=-1)
        if log_probs is None or greedy is None:
            log_probs = at_one
        else:
            log_probs = jnp.where(greedy[:, None, None], at_one, log_probs)
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
