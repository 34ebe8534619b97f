"""A model's tree that grows where the model is sure, a different one in each row and round
(EAGLE-2).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core import noise
from jaxspec.core import tree as trees
from jaxspec.core.checks import integers
from jaxspec.drafters.common import as_drafter, steps_of, with_trees
from jaxspec.drafters.stepwise import drafter_of, read_if_wanted


def dynamic_tree(
    draft: core.Model | core.BoundDrafter, nodes: int = 32, depth: int = 6, width: int = 8
) -> core.BoundDrafter:
    """Drafts a model's `nodes` most probable continuations, as a tree: wide where it is unsure,
    deep where it is sure.

    Level by level the `width` most probable paths are continued by their `width` most probable
    tokens, which costs `depth` passes of the model over `width` tokens. A path's probability is the
    product of its tokens', at the drafter's temperature (at 1, if that is 0). A row that may
    generate n more tokens has no node deeper than that.

    All nodes are fixed choices (point masses), so at temperatures above 0 a draft token x is
    accepted with probability p(x): where the target is unsure, a tree that samples
    (`drafters.tree`) accepts more. With n-gram tables it is a tree of what followed most often.

    Args:
        draft: the model; or a stepwise drafter (`core.Steps`), such as `eagle`, `heads` or
            `early_exit`.
        nodes: draft tokens a round.
        depth: the depth of the deepest node, at most the number of nodes.
        width: paths that are continued on a level, and tokens that continue each.

    Raises:
        ValueError: a number below 1, a width above the vocabulary, more nodes than are ever seen,
            or a model without trees.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = dynamic_tree(draft, nodes=6, depth=3, width=2)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Li et al., EAGLE-2, EMNLP 2024, arXiv 2406.16858.
    """
    nodes, depth, width = integers(1, nodes=nodes, depth=depth, width=width)
    depth = min(depth, nodes)  # deeper ones would be seen in vain
    drafter = as_drafter(draft, "draft")
    steps = steps_of(drafter, depth)
    if width > steps.width:
        raise ValueError(
            f"width is {width} and the vocabulary has {steps.width} tokens: expected at most as "
            "many"
        )
    if nodes > candidates(depth, width):
        raise ValueError(
            f"nodes is {nodes}, but depth {depth} and width {width} see "
            f"{candidates(depth, width)}: expected at most "
            "as many; raise the depth or the width"
        )
    if steps.complete_target_pass is not None and (fed := (depth - 1) * width) > nodes:
        raise ValueError(
            f"depth {depth} and width {width} feed {fed} tokens to the target's cache, which has "
            f"room for {nodes}: expected at least {fed} nodes, or a smaller depth or width"
        )
    return with_trees(drafter, _dynamic_tree(steps, nodes, depth, width), "dynamic_tree")


@functools.lru_cache
def _dynamic_tree(steps: core.Steps, nodes: int, depth: int, width: int) -> core.Drafter:
    # On all levels but the last `width` nodes are fed, which may be more than the nodes that are
    # verified.
    fed = (depth - 1) * width
    draft = functools.partial(grow, nodes=nodes, depth=depth, width=width)
    # Nodes lie where they were fed, which is not their order in the draft.
    drafter = drafter_of(steps, draft, fed, nodes)._replace(complete_target_pass=None)
    return drafter._replace(tree=core.TreeSize(nodes, depth), spare=max(fed - nodes, 0))


def grow(
    reading: core.Reading, context: core.DraftContext, *, nodes: int, depth: int, width: int
) -> tuple[core.Draft, Any, Int[Array, "B N"]]:
    """Drafts the most probable nodes of a tree that is expanded level by level.

    A node's score is the drafter's probability of the path to it. On each level the `width` nodes
    with the best scores are fed, and each gets its `width` most probable tokens as children. Of all
    nodes that were seen the `nodes` best are the draft: a child never has a better score than its
    parent, and of equals the parent comes first, so they are a tree. Nothing is drawn: every node
    is a function of the committed tokens. So it is a fixed choice (a point mass) for the rule, and
    the selection of nodes depends on no sample.

    Returns:
        The draft; the carry; and each node's number among the tokens that were fed, -1 if it was
        not.
    """
    batch = context.max_draft.shape[0]
    limit = context.max_draft
    carry = reading.carry
    # Fed tokens are numbered in the order of feeding, candidates in the order in which they are
    # seen.
    fed_tokens = jnp.zeros((batch, max(depth - 1, 1) * width), jnp.int32)
    # B F, grows by k a level; a fed token's number, -1: the root
    fed_parent = jnp.zeros((batch, 0), jnp.int32)
    fed_as = jnp.zeros((batch, 0), jnp.int32)  # B F: which candidate each fed token is
    # B n: the candidates whose children come next; -1: the root
    frontier = jnp.full((batch, 1), -1, jnp.int32)
    reached = jnp.zeros((batch, 1), jnp.float32)  # B n: their scores
    # The candidates' tokens, level by level.
    tokens = []
    scores = []
    parents = []
    for level in range(depth):
        level_tokens = fed_tokens[:, (level - 1) * width : level * width]
        if level:
            read = functools.partial(reading.nodes, level_tokens, fed_parent, level)
        else:
            read = reading.root
        logits, carry = read_if_wanted(context, level, read, carry)
        distribution = context.to_distribution(
            logits, fed_tokens, _seen(fed_parent, width, fed_tokens.shape[1])
        )
        log_probs = _log_probs(distribution)
        best = noise.largest(log_probs, width)  # B n k: each node's children
        # Rounding must not raise a child above its parent.
        score = (
            jnp.minimum(jnp.take_along_axis(log_probs, best, axis=-1), 0.0) + reached[:, :, None]
        )
        score = jnp.where(level < limit[:, None, None], score, -jnp.inf)
        num_seen = sum(seen.shape[1] for seen in tokens)
        tokens.append(best.reshape(batch, -1))
        scores.append(score.reshape(batch, -1))
        parents.append(jnp.repeat(frontier, width, axis=1))
        if level == depth - 1:
            break
        # The best of this level are fed next: `chosen` are their numbers among its candidates.
        reached, chosen = jax.lax.top_k(scores[-1], width)  # of equals the first
        frontier = (num_seen + chosen).astype(jnp.int32)
        if not level:
            follows = jnp.full_like(frontier, -1)
        else:
            follows = (level - 1) * width + chosen // width
        fed_tokens = jax.lax.dynamic_update_slice_in_dim(
            fed_tokens, jnp.take_along_axis(tokens[-1], chosen, axis=1), level * width, axis=1
        )
        fed_parent = jnp.concatenate([fed_parent, follows.astype(jnp.int32)], axis=1)
        fed_as = jnp.concatenate([fed_as, frontier], axis=1)
    # B C for all C candidates
    all_tokens, all_scores, above = (
        jnp.concatenate(parts, axis=1) for parts in (tokens, scores, parents)
    )
    best = trees.best_nodes(all_tokens, all_scores, above, nodes)
    draft = core.Draft(best.tokens, jnp.full_like(context.row.length, nodes), best.parent)
    return draft, carry, _find(best.chosen, fed_as)


def candidates(depth: int, width: int) -> int:
    """Counts the nodes that are scored; the best of them are chosen.

    >>> candidates(depth=3, width=2)
    10
    """
    return width + (depth - 1) * width * width


def _find(nodes: Int[Array, "B n"], among: Int[Array, "B F"]) -> Int[Array, "B n"]:
    """Finds where each of the wanted numbers stands; -1: nowhere.

    >>> _find(jnp.array([[7, -1, 5]]), jnp.array([[5, 6, 7]])).tolist()
    [[2, -1, 0]]
    """
    if not among.shape[1]:
        return jnp.full_like(nodes, -1)
    same = nodes[:, :, None] == among[:, None, :]
    return jnp.where(jnp.any(same, axis=-1), jnp.argmax(same, axis=-1), -1).astype(jnp.int32)


def _seen(parent: Int[Array, "B F"], width: int, padded: int) -> Bool[Array, "#B n padded"]:
    """Marks the fed tokens that precede the position after each of the last `width`; none, if none
    was fed.
    """
    if not parent.shape[1]:
        return jnp.zeros((1, 1, padded), bool)
    on_path = trees.ancestors(parent)[:, -width:]
    return jnp.pad(on_path, ((0, 0), (0, 0), (0, padded - parent.shape[1])))


def _log_probs(distribution: core.Distribution) -> Float[Array, "B n V"]:
    """Returns log probabilities to rank by; in rows at temperature 0 those at 1. NaN ranks last."""
    log_probs = distribution.log_probs
    logits = distribution.logits
    greedy = distribution.greedy
    if log_probs is None or greedy is not None:
        if logits is None:
            raise ValueError(
                "a tree reads logits, and the sampler gives none: set Distribution.logits in it"
            )
        at_one = jax.nn.log_softmax(logits, axis=-1)
        if log_probs is None or greedy is None:
            log_probs = at_one
        else:
            log_probs = jnp.where(greedy[:, None, None], at_one, log_probs)
    return jnp.where(jnp.isnan(log_probs), -jnp.inf, log_probs)
