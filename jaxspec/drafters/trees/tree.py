"""Trees drafted level by level: one pass of a smaller model for all nodes of a level (SpecInfer, Sequoia)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.core import noise
from jaxspec.core.checks import integer
from jaxspec.drafters.common import as_drafter, steps_of, with_trees
from jaxspec.drafters.stepwise import NodeLogits, drafter_of, read_if_wanted
from jaxspec.drafters.trees import children
from jaxspec.drafters.trees.children import DrawName
from jaxspec.drafters.trees.shape import Level, Shape, seen, shape_of
from jaxspec.drafters.trees.shape import branching as branching_choices


def tree(
    draft: core.Model | core.BoundDrafter,
    branching: Sequence[int] | None = None,
    *,
    shape: Sequence[Sequence[int]] | None = None,
    draw: DrawName = "without_replacement",
) -> core.BoundDrafter:
    """Drafts a tree, whose nodes have children that are chosen from the model's distribution there.

    Each level costs one pass, over those of its nodes that have children. The model's cache holds these as the target's
    does, and follows the accepted path. At temperature 0 children are the model's most probable tokens, whatever
    `draw`.

    Args:
        draft: the model; or a stepwise drafter (`core.Steps`), such as `eagle`, `heads` or `early_exit`.
        branching: children of each node, level by level: (4, 2) has 4 + 8 nodes; (1, 1, 1) is a chain of 3. By default
            (4, 2, 1, 1).
        shape: instead, any static tree, as the ranks on the way to each node: (1, 0) is the first child of the root's
            second child. Medusa publishes its trees so, and `analysis.plan` finds the one that suits a machine.
        draw: "without_replacement": distinct samples (Gumbel-top-k). "replacement": independent samples, which may
            repeat; what follows a repeated one then follows its twin. "top": the most probable tokens, as point masses.
            "mixed": the most probable tokens but for one, which is sampled from the rest and judged first (the best
            acceptance for what it drafts).

    Raises:
        ValueError: there are no nodes. A node has more children than the vocabulary has tokens. A node of a shape lacks
            its parent or its elder sibling. Both a branching and a shape are given. The draw is unknown. The model
            takes no trees.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=9)
        >>> for drafter in (tree(draft, (2, 2)), tree(draft, shape=[(0,), (1,), (0, 0), (0, 0, 0)])):
        ...     out = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=9)
        ...     print((out.tokens == plain.tokens).all())
        True
        True

    Reference: Miao et al., SpecInfer, arXiv 2305.09781; Chen et al., Sequoia, arXiv 2402.12374.
    """
    if shape is not None and branching is not None:
        raise ValueError("got both a branching and a shape: give one of them")
    if shape is None:
        expected = "the children of a node for each level, such as (4, 2)"
        if branching is not None and (isinstance(branching, str) or not isinstance(branching, Iterable)):
            raise ValueError(f"branching is {branching!r}: expected {expected}")
        counts = (4, 2, 1, 1) if branching is None else tuple(integer(n, "branching", expected) for n in branching)
        if not counts or min(counts) < 1:
            raise ValueError(f"branching is {counts}: expected at least one level, each of 1 child or more")
        shape = branching_choices(counts)
    children.check(draw)
    static, drafter = shape_of(shape), as_drafter(draft, "draft")
    steps = steps_of(drafter, len(static.levels))
    widest = max(max(level.counts) for level in static.levels)
    if widest > steps.width:
        raise ValueError(
            f"a node of the tree has {widest} children and the vocabulary {steps.width} tokens: expected at most as "
            "many"
        )
    return with_trees(drafter, _tree(steps, static, draw), "tree")


@functools.lru_cache
def _tree(steps: core.Steps, shape: Shape, draw: DrawName) -> core.Drafter:
    nodes = len(shape.parents)
    drafter = drafter_of(steps, functools.partial(by_level, shape=shape, draw=draw), shape.fed, nodes)
    return drafter._replace(tree=core.TreeSize(nodes, len(shape.levels)))


def by_level(
    reading: core.Reading, context: core.DraftContext, *, shape: Shape, draw: DrawName
) -> tuple[core.Draft, Any, Int[Array, "#B N"]]:
    """Drafts a static tree, level by level; returns it, the carry, and the slots of its nodes."""
    batch, nodes, before = context.max_draft.shape[0], len(shape.parents), seen(shape)
    fed_parents = np.array(shape.parents[: shape.fed], np.int32)[None] - 1  # 1 F
    keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)

    def read(level: Level, depth: int, tokens: Int[Array, "B F"], carry: Any) -> NodeLogits:
        if not depth:
            return reading.root(carry)
        first, last = level.parents[0] - 1, level.parents[-1]
        parent = jnp.broadcast_to(fed_parents[:, :last], (batch, last))
        return reading.nodes(tokens[:, first:last], parent, depth, carry)

    tokens = jnp.zeros((batch, nodes), jnp.int32)  # the fed ones, of which there are `num_fed` so far
    # For each node of the level the fed token that its children follow: itself, or its twin.
    origin = jnp.zeros((batch, 1), jnp.int32)
    carry, levels, parents, num_fed = reading.carry, [], [], 0
    for depth, level in enumerate(shape.levels):
        count, first = len(level.parents), level.parents[0]
        read_level = functools.partial(read, level, depth, tokens)
        logits, carry = read_if_wanted(context, depth, read_level, carry)  # B n W
        distribution = context.to_distribution(logits, tokens, jnp.asarray(before[None, first : first + count]))
        chosen = children.choose(distribution, noise.split(keys, first, count), level.counts, draw)  # B n k
        levels.append(chosen)
        parents.append(jnp.broadcast_to(origin[:, :, None], chosen.tokens.shape).astype(jnp.int32))
        if level.deeper:
            # The children that have children are fed next, after those that were fed so far.
            deeper = np.array(level.deeper)
            fed, followed = (values.reshape(batch, -1)[:, deeper] for values in (chosen.tokens, parents[-1]))
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, fed, num_fed, axis=1)
            twin = _twins(fed, followed) if draw == "replacement" else jnp.arange(len(deeper))[None]
            origin = num_fed + 1 + twin
            num_fed += len(deeper)
    slots = np.where(np.arange(nodes) < shape.fed, np.arange(nodes), -1)[None]
    return _joined(shape, levels, parents), carry, jnp.asarray(slots, jnp.int32)


def _joined(shape: Shape, levels: Sequence[children.Children], parents: Sequence[Int[Array, "B n k"]]) -> core.Draft:
    """Joins what the levels have for their children, B n k each, in the order of the draft's nodes, B N."""

    def in_order(parts: Sequence[Array]) -> Array:
        return jnp.concatenate([entries.reshape(len(entries), -1) for entries in parts], axis=1)[
            :, np.array(shape.order)
        ]

    tokens, live = in_order([chosen.tokens for chosen in levels]), in_order([chosen.live for chosen in levels])
    length = jnp.full((len(tokens),), len(shape.parents), jnp.int32)
    draft = core.Draft(tokens, length, jnp.where(live, in_order(parents), -1))
    log_probs = [chosen.log_probs for chosen in levels if chosen.log_probs is not None]
    if not log_probs:  # point masses, of which nobody reads how they were chosen
        return draft
    draws = in_order([chosen.draws for chosen in levels])
    return draft._replace(log_probs=jnp.concatenate(log_probs, axis=1), draws=draws)


def _twins(tokens: Int[Array, "B n"], parents: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Finds for each node the first that follows the same parent with the same token: itself, if it is none's twin.

    The second of two twins is never accepted where the first was rejected, so what follows it could not be reached.
    Its followers were drawn from the same distribution as the first one's, and are moved to the first.

    >>> _twins(jnp.array([[5, 7, 5, 5]]), jnp.array([[1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 3]]
    """
    same = jnp.logical_and(tokens[:, :, None] == tokens[:, None, :], parents[:, :, None] == parents[:, None, :])
    return jnp.argmax(same, axis=-1).astype(jnp.int32)
