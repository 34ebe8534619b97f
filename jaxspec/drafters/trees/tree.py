"""Trees drafted level by level: one pass of a smaller model for all nodes of a level (SpecInfer,
Sequoia).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core import noise
from jaxspec.core.checks import integer
from jaxspec.drafters.common import steps_of, with_trees
from jaxspec.drafters.stepwise import NodeLogits, drafter_of, read_if_wanted
from jaxspec.drafters.trees import children, several
from jaxspec.drafters.trees.children import DrawName
from jaxspec.drafters.trees.shape import Level, Shape, seen, shape_of, sources, turns
from jaxspec.drafters.trees.shape import branching as branching_choices


def tree(
    draft: core.Model | core.BoundDrafter | Sequence[core.Model | core.BoundDrafter],
    branching: Sequence[int] | None = None,
    *,
    shape: Sequence[Sequence[int]] | None = None,
    draw: DrawName = "without_replacement",
) -> core.BoundDrafter:
    """Drafts a tree, whose nodes have children that are chosen from the model's distribution there.

    Each level costs one pass, over its nodes that have children. The model's cache holds these as
    the target's does, and follows the accepted path. At temperature 0 children are the model's most
    probable tokens, whatever `draw`.

    Args:
        draft: the model; or a stepwise drafter (`core.Steps`), such as `eagle`, `heads` or
            `early_exit`. Or a list of these, which draft one tree: the drafter that drew a node
            draws its first child, the next in the list the second child, and so on; the first
            drafter begins. Each reads every node that has children, into its cache.
        branching: children of each node, level by level: (4, 2) has 4 + 8 nodes; (1, 1, 1) is a
            chain of 3. By default (4, 2, 1, 1).
        shape: instead, any static tree, as the ranks on the way to each node: (1, 0) is the first
            child of the root's second child. Medusa publishes its trees so, and `analysis.plan`
            finds the one that suits a machine.
        draw: "without_replacement": distinct samples (Gumbel-top-k). "replacement": independent
            samples, which may repeat; what follows a repeated one then follows its twin. "top": the
            most probable tokens, as point masses. "mixed": the most probable tokens but for one,
            which is sampled from the rest and judged first (the best acceptance for what it
            drafts). Several drafters draw no child that another has drawn, unless the draw is
            "replacement"; with "mixed" the first child is sampled from all tokens.

    Raises:
        ValueError: the tree is empty. A node has more children than the vocabulary has tokens. A
            node of a shape lacks its parent or its elder sibling. Both a branching and a shape are
            given. The draw is unknown. A model takes no trees. The list of drafters is empty, a
            drafter draws no node, or two drafters run the target's layers.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=9)
        >>> for drafter in (
        ...     tree(draft, (2, 2)),
        ...     tree(draft, shape=[(0,), (1,), (0, 0), (0, 0, 0)]),
        ... ):
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
        if branching is not None and (
            isinstance(branching, str) or not isinstance(branching, Iterable)
        ):
            raise ValueError(f"branching is {branching!r}: expected {expected}")
        if branching is None:
            counts = (4, 2, 1, 1)
        else:
            counts = tuple(integer(n, "branching", expected) for n in branching)
        if not counts or min(counts) < 1:
            raise ValueError(
                f"branching is {counts}: expected at least one level, each of 1 child or more"
            )
        shape = branching_choices(counts)
    children.check(draw)
    static = shape_of(shape)
    bound = several.as_drafters(draft)
    steps = tuple(steps_of(drafter, len(static.levels)) for drafter in bound)
    widest = max(max(level.counts) for level in static.levels)
    width = min(of_drafter.width for of_drafter in steps)
    if widest > width:
        raise ValueError(
            f"a node of the tree has {widest} children and the vocabulary {width} tokens: expected "
            "at most as many"
        )
    if len(bound) == 1:
        return with_trees(bound[0], _tree(steps[0], static, draw), "tree")
    _check_all_draw(static, len(bound))
    functions = _several(tuple(drafter.functions for drafter in bound), static, draw)
    return several.bound_together(bound, functions, "tree")


def _check_all_draw(shape: Shape, drafters: int) -> None:
    """Checks that every drafter draws a node; each of them runs."""
    idle = sorted({*range(drafters)} - {*sources(shape, drafters).tolist()})
    if idle:
        names = ", ".join(f"draft[{number}]" for number in idle)
        raise ValueError(
            f"{names} would draw no node of the tree: expected fewer than {drafters} drafters, or "
            "a tree whose nodes have more children, of which each drafter draws one"
        )


@functools.lru_cache
def _tree(steps: core.Steps, shape: Shape, draw: DrawName) -> core.Drafter:
    nodes = len(shape.parents)

    def draft(
        reading: core.Reading, context: core.DraftContext
    ) -> tuple[core.Draft, Any, Int[Array, "#B N"]]:
        drafted, (carry,), slots = by_level([reading], context, shape=shape, draw=draw)
        return drafted, carry, slots

    drafter = drafter_of(steps, draft, shape.fed, nodes)
    return drafter._replace(tree=core.TreeSize(nodes, len(shape.levels)))


@functools.lru_cache
def _several(drafters: tuple[core.Drafter, ...], shape: Shape, draw: DrawName) -> core.Drafter:
    size = core.TreeSize(
        len(shape.parents), len(shape.levels), 1 if draw == "top" else len(drafters)
    )
    return several.together(
        drafters, functools.partial(by_level, shape=shape, draw=draw), shape.fed, size
    )


def by_level(
    readings: Sequence[core.Reading], context: core.DraftContext, *, shape: Shape, draw: DrawName
) -> tuple[core.Draft, list[Any], Int[Array, "#B N"]]:
    """Drafts a static tree, level by level; returns it, the carry of each drafter, and the slots of
    its nodes.
    """
    batch = context.max_draft.shape[0]
    nodes = len(shape.parents)
    before = seen(shape)
    fed_parents = np.array(shape.parents[: shape.fed], np.int32)[None] - 1  # 1 F
    keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)

    def read(
        reading: core.Reading, level: Level, depth: int, tokens: Int[Array, "B F"], carry: Any
    ) -> NodeLogits:
        if not depth:
            return reading.root(carry)
        first = level.parents[0] - 1
        last = level.parents[-1]
        parent = jnp.broadcast_to(fed_parents[:, :last], (batch, last))
        return reading.nodes(tokens[:, first:last], parent, depth, carry)

    # the fed ones, of which there are `num_fed` so far
    tokens = jnp.zeros((batch, nodes), jnp.int32)
    # For each node of the level the fed token that its children follow: itself, or its twin.
    origin = jnp.zeros((batch, 1), jnp.int32)
    carries = [reading.carry for reading in readings]
    levels = []
    parents = []
    num_fed = 0
    # what the drafters drew each level from
    log_probs: list[tuple[Float[Array, "B n V"], ...]] = []
    for depth, (level, turn) in enumerate(
        zip(shape.levels, turns(shape, len(readings)), strict=True)
    ):
        count = len(level.parents)
        first = level.parents[0]
        distributions = []
        for number, reading in enumerate(readings):
            read_level = functools.partial(read, reading, level, depth, tokens)
            # B n W
            logits, carries[number] = read_if_wanted(context, depth, read_level, carries[number])
            seen_here = jnp.asarray(before[None, first : first + count])
            distributions.append(context.to_distribution(logits, tokens, seen_here))
        node_keys = noise.split(keys, first, count)
        if len(readings) == 1:
            chosen = children.choose(distributions[0], node_keys, level.counts, draw)  # B n k
            drawn_from = ()
            if chosen.log_probs is not None:
                drawn_from = (chosen.log_probs,)
        else:
            chosen, drawn_from = children.in_turn(distributions, node_keys, turn, draw)
        levels.append(chosen)
        log_probs.append(drawn_from)
        parents.append(jnp.broadcast_to(origin[:, :, None], chosen.tokens.shape).astype(jnp.int32))
        if level.deeper:
            # The children that have children are fed next, after those that were fed so far.
            deeper = np.array(level.deeper)
            fed, followed = (
                values.reshape(batch, -1)[:, deeper] for values in (chosen.tokens, parents[-1])
            )
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, fed, num_fed, axis=1)
            if draw == "replacement":
                twin = _twins(fed, followed)
            else:
                twin = jnp.arange(len(deeper))[None]
            origin = num_fed + 1 + twin
            num_fed += len(deeper)
    slots = np.where(np.arange(nodes) < shape.fed, np.arange(nodes), -1)[None]
    draft = _joined(shape, levels, parents, log_probs)
    if draft.other_log_probs:
        drawn_by = jnp.asarray(sources(shape, len(readings)))
        draft = draft._replace(sources=jnp.broadcast_to(drawn_by, (batch, nodes)))
    return draft, carries, jnp.asarray(slots, jnp.int32)


def _joined(
    shape: Shape,
    levels: Sequence[children.Children],
    parents: Sequence[Int[Array, "B n k"]],
    log_probs: Sequence[tuple[Float[Array, "B n V"], ...]],
) -> core.Draft:
    """Joins the levels' values for their children, B n k each, in the order of the draft's nodes, B
    N.
    """

    def in_order(parts: Sequence[Array]) -> Array:
        return jnp.concatenate([entries.reshape(len(entries), -1) for entries in parts], axis=1)[
            :, np.array(shape.order)
        ]

    tokens = in_order([chosen.tokens for chosen in levels])
    live = in_order([chosen.live for chosen in levels])
    length = jnp.full((len(tokens),), len(shape.parents), jnp.int32)
    draft = core.Draft(tokens, length, jnp.where(live, in_order(parents), -1))
    if not log_probs[0]:  # point masses, of which nobody reads how they were chosen
        return draft
    draws = in_order([chosen.draws for chosen in levels])
    first, *others = (
        jnp.concatenate(of_levels, axis=1) for of_levels in zip(*log_probs, strict=True)
    )
    return draft._replace(log_probs=first, draws=draws, other_log_probs=tuple(others))


def _twins(tokens: Int[Array, "B n"], parents: Int[Array, "B n"]) -> Int[Array, "B n"]:
    """Finds for each node the first that follows the same parent with the same token: itself, if it
    has no such twin.

    The second of two twins is never accepted where the first was rejected, so what follows it could
    not be reached. Its followers were drawn from the same distribution as the first one's, and are
    moved to the first.

    >>> _twins(jnp.array([[5, 7, 5, 5]]), jnp.array([[1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 3]]
    """
    same = (tokens[:, :, None] == tokens[:, None, :]) & (parents[:, :, None] == parents[:, None, :])
    return jnp.argmax(same, axis=-1).astype(jnp.int32)
