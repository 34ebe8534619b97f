"""A model that reads trees: its cache holds the nodes of a round, and follows the path that is accepted.

The nodes lie after the committed row, in the order in which they were fed; the last committed token is the one before
them. Those that end a path need not be fed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core import branches, token_rows
from jaxspec.drafters.common import name_of
from jaxspec.drafters.model import ModelState, known, last_logits, prefill, read_last_two, take_back

NodeLogits = tuple[Float[Array, "B n W"], Any]
"""Logits after n nodes, and the carry of whatever makes them: of a model its cache."""


class TreeState(NamedTuple):
    """`ModelState`, and where the tree lies in the cache.

    Attributes:
        cache: of the model.
        num_cached: how many tokens of each row it holds for certain.
        start: how long each row was when its tree was drafted: its first node's place.
        slots: each draft token's place after `start`; -1: it was not fed.
    """

    cache: core.Cache
    num_cached: Int[Array, " B"]
    start: Int[Array, " B"]
    slots: Int[Array, "B N"]


def reader_of(draft: core.Model | core.BoundDrafter, depth: int) -> core.TreeReader:
    """Returns the functions by which a model, or a drafter of chains that can draft trees, reads nodes.

    Args:
        draft: either.
        depth: of the deepest node.

    Raises:
        ValueError: it takes chains only, or has no distributions so far ahead.
    """
    if isinstance(draft, core.Model):
        if draft.lm.select is None:
            raise ValueError(
                f"{draft.name or 'the model'} takes chains only (its LanguageModel has no select): use drafters.model"
            )
        return of_model(draft.lm)
    if not isinstance(draft, core.BoundDrafter):
        raise TypeError(f"draft is {draft!r}: expected a jaxspec.Model, or one of jaxspec.drafters")
    reader = draft.functions.tree_reader
    if reader is None:
        raise ValueError(
            "the drafter cannot draft trees: expected a model, or drafters.eagle, mtp, heads, block, "
            "lookahead_embeddings, early_exit or skip_layers"
        )
    if reader.depth is not None and depth > reader.depth:
        raise ValueError(f"the tree has depth {depth}, and the drafter drafts {reader.depth} tokens ahead at most")
    return reader


def with_trees(draft: core.Model | core.BoundDrafter, functions: core.Drafter, kind: str) -> core.BoundDrafter:
    """Binds a drafter of trees of a `kind` to the language model and the values of what it drafts with."""
    assert functions.tree is not None
    name = f"{kind}({functions.tree.nodes} nodes, {name_of(draft)})"
    if isinstance(draft, core.Model):
        return core.BoundDrafter(functions._replace(lm=draft.lm), draft.params, (draft,), name=name)
    functions = functions._replace(lm=draft.functions.lm, resumes=draft.functions.resumes)
    return draft._replace(functions=functions, name=name)


@functools.lru_cache
def of_model(lm: core.LanguageModel) -> core.TreeReader:
    """Makes a reader of a model: the carry is its cache."""

    def init_for(nodes: int) -> core.DraftInit:
        def init(start: core.DraftStart) -> TreeState:
            _, cache = prefill(lm, start.weights.draft, start)
            length = token_rows.decoder_prompt(lm, start.prompt).length
            return TreeState(cache, length, length, jnp.full((len(length), nodes), -1, jnp.int32))

        return init

    def begin_draft(weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int) -> core.Cache:
        return caches.draft.cache

    def root_logits(
        weights: core.Weights, state: TreeState, cache: core.Cache, context: core.DraftContext, width: int
    ) -> NodeLogits:
        before, width = ModelState(cache, state.num_cached), width if context.adaptive else 0
        forward, cache = read_last_two(lm, weights.draft, before, context.row, context.max_draft > 0, width)
        return last_logits(lm, weights.draft, forward)[:, None], cache

    def node_logits(
        weights: core.Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], cache: core.Cache
    ) -> NodeLogits:
        forward, cache = lm.extend(weights.draft, cache, known(lm, tokens), parent)
        return forward.logits, cache

    def end_draft(
        caches: core.Caches, cache: core.Cache, context: core.DraftContext, slots: Int[Array, "B N"]
    ) -> core.Caches:
        # Rows that may not draft keep the place of their last tree.
        state, drafted, length = caches.draft, context.max_draft > 0, context.row.length
        slots = jnp.where(drafted[:, None], slots, state.slots)
        num_cached, start = jnp.where(drafted, length, state.num_cached), jnp.where(drafted, length, state.start)
        return caches._replace(draft=TreeState(cache, num_cached, start, slots))

    def commit_for(levels: int) -> core.Commit:
        def commit(end: core.RoundEnd) -> core.Caches:
            state, path = end.caches.draft, end.verdict.path
            cache, num_cached = state.cache, state.num_cached
            if levels and path is not None and lm.select is not None:
                # The accepted nodes that were fed move to the front: from start + slot to start + step.
                step = jnp.arange(levels, dtype=path.dtype)[None, :]
                slot = jnp.take_along_axis(state.slots, path[:, :levels], axis=1)
                fed = jnp.logical_and(slot >= 0, step < end.verdict.num_accepted[:, None])
                # Nothing else moves: in a round without a draft `start` lies in what is committed.
                cache = lm.select(cache, state.start, jnp.where(fed, slot, step))
                num_cached = num_cached + jnp.sum(fed, axis=1, dtype=num_cached.dtype)
            num_cached = jnp.minimum(num_cached, end.row.length - 2)
            return end.caches._replace(draft=state._replace(cache=cache, num_cached=num_cached))

        return commit

    functions = init_for, begin_draft, root_logits, node_logits, end_draft, commit_for
    return core.TreeReader(*functions, lm.vocab_size, rollback=take_back)


def read_if_wanted(context: core.DraftContext, depth: int, read: Callable[[Any], NodeLogits], cache: Any) -> NodeLogits:
    """Reads logits by way of a cache; where no row may draft so deep, zeros for logits, and the cache as it is."""
    if not context.adaptive:
        return read(cache)
    return branches.run_or_zeros(jnp.any(context.max_draft > depth), read, cache)
