"""Token recycling: the target's last predictions after each token, as a tree (Luo et al., arXiv
2408.08696).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec import core
from jaxspec.core import noise, token_rows
from jaxspec.core.token_rows import NO_TOKEN
from jaxspec.drafters.common import same_state
from jaxspec.drafters.trees.shape import Shape, by_rank, shape_of

# Acceptance by rank, for which the default tree is made.
ACCEPTANCE = (0.4, 0.15, 0.09, 0.06, 0.05, 0.04, 0.03, 0.03)
NODES = 32
DEPTH = 6


class RecyclingState(NamedTuple):
    """The memory of each row."""

    # after each token the likeliest ones, the likeliest first; NO_TOKEN where nothing is known
    table: Int[Array, "B V K"]
    # the tokens that the target reads in this round, the last committed one first; NO_TOKEN where a
    # node is none
    fed: Int[Array, "B N+1"]


def token_recycling(shape: Sequence[Sequence[int]] | None = None) -> core.BoundDrafter:
    """Proposes, as point masses, a tree of the tokens that the target found most probable after
    each token when it last read it.

    Every pass of the target yields its logits after each token that it reads, accepted or not. The
    most probable tokens replace the remembered ones of that token, and the next tree is read off
    this table: the children of a node are the tokens remembered for it. Nothing is trained and no
    model runs; unlike `online_ngram` it looks at one token of context, but learns from rejected
    drafts, too. The prompt's own pairs of tokens are entered first. Of a token that is read twice
    in a pass the last one counts.

    State: a table of 4 K V bytes a row, K being the most children of a node (1 MB with 8 and 32,000
    tokens). If no row knows a follower of its last token, the round feeds the target one token.

    Args:
        shape: a static tree, as the ranks on the way to each node (see `drafters.tree`); by default
            32 nodes, 4 deep, 8 children at most.

    Raises:
        ValueError: a shape that has a node without its parent or its elder sibling.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9, sharpness=9.0)  # soon repeats itself
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7, 8, 5, 6]]), jnp.array([6]))
        >>> out = jaxspec.generate(target, prompt, drafter=token_recycling(), max_new_tokens=40)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=40).tokens).all())
        True

    Reference: Luo et al., "Turning Trash into Treasure", arXiv 2408.08696.
    """
    if shape is None:
        choices = by_rank(ACCEPTANCE, NODES, DEPTH)
    else:
        choices = shape
    return core.BoundDrafter(
        _token_recycling(shape_of(choices)), name=f"token_recycling({len(choices)} nodes)"
    )


@functools.lru_cache
def _token_recycling(shape: Shape) -> core.Drafter:
    nodes = len(shape.parents)
    depth = len(shape.levels)
    width = max(max(level.counts) for level in shape.levels)
    parents = jnp.asarray(shape.parents, jnp.int32)

    def init(start: core.DraftStart) -> RecyclingState:
        prompt = start.prompt.text
        batch = prompt.tokens.shape[0]
        last = prompt.tokens.shape[1] - 1
        table = jnp.full((batch, start.prefilled.logits.shape[-1], width), NO_TOKEN, jnp.int32)
        inside = jnp.arange(last, dtype=prompt.length.dtype)[None, :] < prompt.length[:, None] - 1
        followers = jnp.pad(
            prompt.tokens[:, 1:, None], ((0, 0), (0, 0), (0, width - 1)), constant_values=NO_TOKEN
        )
        table = enter(table, jnp.where(inside, prompt.tokens[:, :-1], NO_TOKEN), followers)
        return RecyclingState(table, jnp.full((batch, nodes + 1), NO_TOKEN, jnp.int32))

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        table = caches.draft.table
        row = context.row
        limit = context.max_draft
        last = token_rows.window(row.tokens, row.length - 1, 1)
        # the last committed token, and the nodes of the level above that have children
        fed = last
        levels = []
        for level in shape.levels:
            above = fed[:, -len(level.parents) :]
            children = jnp.take_along_axis(table, jnp.maximum(above, 0)[:, :, None], axis=1)[
                :, :, : max(level.counts)
            ]
            children = jnp.where(above[:, :, None] >= 0, children, NO_TOKEN).reshape(len(limit), -1)
            levels.append(children)
            fed = jnp.concatenate([last, children[:, np.array(level.deeper, np.int32)]], axis=1)
        tokens = jnp.concatenate(levels, axis=1)[:, np.array(shape.order)]  # B N
        live = (tokens >= 0) & (jnp.asarray(shape.depths)[None, :] <= limit[:, None])
        draft = core.Draft(
            jnp.maximum(tokens, 0),
            jnp.full_like(row.length, nodes),
            jnp.where(live, parents[None], -1),
        )
        fed = jnp.concatenate([last, jnp.where(live, tokens, NO_TOKEN)], axis=1)
        return draft, caches._replace(draft=RecyclingState(table, fed))

    def commit(end: core.RoundEnd) -> core.Caches:
        table, fed = end.caches.draft
        count = min(width, end.forward.logits.shape[-1])  # a small vocabulary may have fewer tokens
        unused = ((0, 0), (0, 0), (0, width - count))
        best = jnp.pad(noise.largest(end.forward.logits, count), unused, constant_values=NO_TOKEN)
        return end.caches._replace(draft=RecyclingState(enter(table, fed, best), fed))

    return core.Drafter(
        init,
        propose,
        commit,
        may_be_empty=True,
        tree=core.TreeSize(nodes, depth),
        rollback=same_state,
    )


def enter(
    table: Int[Array, "B V K"], tokens: Int[Array, "B T"], followers: Int[Array, "B T K"]
) -> Int[Array, "B V K"]:
    """Puts the followers of each token into the table; the last occurrence of a token wins, and -1
    is skipped.

    >>> table = jnp.full((1, 3, 1), -1)
    >>> enter(table, jnp.array([[2, 0, 2, -1]]), jnp.array([[[5], [6], [7], [8]]]))[
    ...     0, :, 0
    ... ].tolist()
    [6, -1, 7]
    """
    batch, vocab, _ = table.shape
    row = jnp.arange(batch)[:, None]
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    entry = jnp.where(tokens >= 0, tokens, vocab)  # out of the table: dropped
    last = jnp.full((batch, vocab), -1, jnp.int32).at[row, entry].max(position, mode="drop")
    wins: Bool[Array, "B T"] = (
        jnp.take_along_axis(last, jnp.minimum(entry, vocab - 1), axis=1) == position
    )
    return table.at[row, jnp.where(wins, entry, vocab)].set(followers, mode="drop")
