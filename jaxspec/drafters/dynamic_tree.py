"""A model's tree that grows where the model is sure, a different one in each row and round (EAGLE-2)."""

from __future__ import annotations

import functools

from jaxtyping import Array, Int

from jaxspec.base import (
    Bound,
    Cache,
    Caches,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    LanguageModel,
    Model,
    Prompt,
    TreeSize,
    Weights,
)
from jaxspec.drafters import tree_cache
from jaxspec.drafters.best_first import candidates, grow
from jaxspec.drafters.tree_cache import Logits, TreeState


def dynamic_tree(draft: Model, nodes: int = 32, depth: int = 6, width: int = 8) -> Bound[Drafter]:
    """Drafts a model's `nodes` most probable continuations, as a tree: wide where it is unsure, deep where it is sure.

    Level by level the `width` most probable paths are continued by their `width` most probable tokens, which costs
    `depth` passes of the model over `width` tokens. A path's probability is the product of its tokens', at the
    drafter's temperature (at 1, if that is 0). A row that may generate n more tokens has no node deeper than that.

    All nodes are fixed choices (point masses), so at temperatures above 0 a draft token x is accepted with probability
    p(x): where the target is unsure, a tree that samples (`drafters.tree`) accepts more. With n-gram tables it is a
    tree of what followed most often. Other drafters that know the distribution after any node share its expansion
    (`drafters.best_first`).

    Args:
        draft: the model.
        nodes: draft tokens a round.
        depth: of the deepest.
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
    if min(nodes, depth, width) < 1:
        raise ValueError(f"nodes is {nodes}, depth {depth} and width {width}: expected at least 1 of each")
    tree_cache.check_takes_trees(draft)
    if width > draft.lm.vocab_size:
        raise ValueError(
            f"width is {width} and the vocabulary has {draft.lm.vocab_size} tokens: expected at most as many"
        )
    if nodes > candidates(depth, width):
        raise ValueError(
            f"nodes is {nodes}, but depth {depth} and width {width} see {candidates(depth, width)}: expected at most "
            "as many; raise the depth or the width"
        )
    return Bound(_dynamic_tree(draft.lm, nodes, depth, width), draft.params, (draft,))


@functools.cache
def _dynamic_tree(lm: LanguageModel, nodes: int, depth: int, width: int) -> Drafter:
    fed = (depth - 1) * width  # which may be more than are verified
    spare = max(fed - nodes, 0)

    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> TreeState:
        return tree_cache.init_for(lm, nodes)(weights, prompt, headroom + spare, prefilled)

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        state = caches.draft

        def first(cache: Cache) -> Logits:
            return tree_cache.read_row(lm, weights.draft, state._replace(cache=cache), context, nodes + 1)

        def following(tokens: Int[Array, "B k"], parent: Int[Array, "B F"], cache: Cache) -> Logits:
            return tree_cache.read_nodes(lm, weights.draft, cache, tokens, parent)

        draft, slots, cache = grow(first, following, state.cache, context, nodes=nodes, depth=depth, width=width)
        return draft, caches._replace(draft=tree_cache.after_draft(state, cache, context, slots))

    return Drafter(init, propose, tree_cache.commit_for(lm, depth - 1), lm, tree=TreeSize(nodes, depth))
