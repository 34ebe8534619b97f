"""A model's tree that grows where the model is sure, a different one in each row and round (EAGLE-2)."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.core.checks import integers
from jaxspec.drafters.trees import tree_cache
from jaxspec.drafters.trees.best_first import candidates, grow
from jaxspec.drafters.trees.tree_cache import NodeLogits


def dynamic_tree(
    draft: core.Model | core.BoundDrafter, nodes: int = 32, depth: int = 6, width: int = 8
) -> core.BoundDrafter:
    """Drafts a model's `nodes` most probable continuations, as a tree: wide where it is unsure, deep where it is sure.

    Level by level the `width` most probable paths are continued by their `width` most probable tokens, which costs
    `depth` passes of the model over `width` tokens. A path's probability is the product of its tokens', at the
    drafter's temperature (at 1, if that is 0). A row that may generate n more tokens has no node deeper than that.

    All nodes are fixed choices (point masses), so at temperatures above 0 a draft token x is accepted with probability
    p(x): where the target is unsure, a tree that samples (`drafters.tree`) accepts more. With n-gram tables it is a
    tree of what followed most often. Other drafters that know the distribution after any node share its expansion
    (`drafters.trees.best_first`).

    Args:
        draft: the model; or a drafter that reads the target's hidden states (`eagle`, `mtp`, `heads`, `block`) or runs
            its layers (`early_exit`, `skip_layers`).
        nodes: draft tokens a round.
        depth: of the deepest; no more than there are nodes.
        width: paths that are continued on a level, and tokens that continue each.

    Raises:
        ValueError: a number below 1, a width above the vocabulary, more nodes than are ever seen, or a model without
            trees.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = dynamic_tree(draft, nodes=6, depth=3, width=2)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Li et al., EAGLE-2, EMNLP 2024, arXiv 2406.16858.
    """
    nodes, depth, width = integers(nodes=nodes, depth=depth, width=width)
    if min(nodes, depth, width) < 1:
        raise ValueError(f"nodes is {nodes}, depth {depth} and width {width}: expected at least 1 of each")
    depth = min(depth, nodes)  # deeper ones would be seen in vain
    reader = tree_cache.reader_of(draft, depth)
    if width > reader.vocab_size:
        raise ValueError(
            f"width is {width} and the vocabulary has {reader.vocab_size} tokens: expected at most as many"
        )
    if nodes > candidates(depth, width):
        raise ValueError(
            f"nodes is {nodes}, but depth {depth} and width {width} see {candidates(depth, width)}: expected at most "
            "as many; raise the depth or the width"
        )
    if reader.complete_target_pass is not None and (fed := (depth - 1) * width) > nodes:
        raise ValueError(
            f"depth {depth} and width {width} feed {fed} tokens to the target's cache, which has room for {nodes}: "
            f"expected at least {fed} nodes, or a smaller depth or width"
        )
    return tree_cache.with_trees(draft, _dynamic_tree(reader, nodes, depth, width), "dynamic_tree")


@functools.lru_cache
def _dynamic_tree(reader: core.TreeReader, nodes: int, depth: int, width: int) -> core.Drafter:
    # On all levels but the last `width` nodes are fed, which may be more than the nodes that are verified.
    fed = (depth - 1) * width
    spare = max(fed - nodes, 0)

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> tuple[core.Draft, core.Caches]:
        state = caches.draft

        def first(carry: Any) -> NodeLogits:
            return reader.root_logits(weights, state, carry, context, nodes + 1)

        def following(tokens: Int[Array, "B k"], parent: Int[Array, "B F"], carry: Any) -> NodeLogits:
            return reader.node_logits(weights, tokens, parent, carry)

        carry = reader.begin_draft(weights, caches, context, fed)
        draft, slots, carry = grow(first, following, carry, context, nodes=nodes, depth=depth, width=width)
        return draft, reader.end_draft(caches, carry, context, slots)

    # No `complete_target_pass`: nodes lie where they were fed, which is not their order in the draft.
    size = core.TreeSize(nodes, depth)
    functions = reader.init(nodes), propose, reader.commit(depth - 1)
    return core.Drafter(*functions, tree=size, rollback=reader.rollback, spare=spare)
