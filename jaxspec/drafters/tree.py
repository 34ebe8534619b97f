"""Trees drafted level by level: one pass of a smaller model for all nodes of a level (SpecInfer, Sequoia)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec import buffers, noise
from jaxspec import tree as trees
from jaxspec.base import (
    Bound,
    Cache,
    Caches,
    Distribution,
    Draft,
    DraftContext,
    Drafter,
    Draw,
    Forward,
    LanguageModel,
    Model,
    Prompt,
    TreeSize,
    Verdict,
    Weights,
)
from jaxspec.drafters.model import ModelState, known, last_logits, read_last_two

DrawName = Literal["without_replacement", "replacement", "top", "mixed"]


class TreeState(NamedTuple):
    """`ModelState`, and how long each row was when its tree was drafted: the nodes lie in the cache from there on."""

    cache: Cache
    seen: Int[Array, " B"]
    start: Int[Array, " B"]


def tree(
    draft: Model, branching: Sequence[int] = (4, 2, 1, 1), *, draw: DrawName = "without_replacement"
) -> Bound[Drafter]:
    """Drafts a tree: every node of level d has branching[d] children, chosen from the model's distribution there.

    Each level costs one pass over its nodes. The model's cache holds the tree as the target's does, and follows the
    accepted path. At temperature 0 children are the model's most probable tokens, whatever `draw`.

    Args:
        draft: the model.
        branching: children of each node, level by level: (4, 2) has 4 + 8 nodes. (1, 1, 1) is a chain of 3.
        draw: "without_replacement": distinct samples (Gumbel-top-k). "replacement": independent samples, which may
            repeat. "top": the most probable tokens, as point masses. "mixed": the most probable tokens but for one,
            which is sampled from the rest and judged first (the best acceptance for what it drafts).

    Raises:
        ValueError: no levels, a branching below 1 or above the vocabulary, an unknown draw, or a model without trees.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> out = jaxspec.generate(target, prompt, drafter=tree(draft, (2, 2)), max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Miao et al., SpecInfer, arXiv 2305.09781; Chen et al., Sequoia, arXiv 2402.12374.
    """
    vocab = draft.lm.vocab_size
    if not branching or min(branching) < 1 or max(branching) > vocab:
        raise ValueError(
            f"branching is {tuple(branching)}: expected at least one level, each from 1 to {vocab} children"
        )
    if draw not in get_args(DrawName):
        raise ValueError(f"draw is {draw!r}: expected one of {', '.join(get_args(DrawName))}")
    if draft.lm.select is None:
        raise ValueError(
            f"{draft.name or 'the model'} takes chains only (its LanguageModel has no select): use drafters.model"
        )
    return Bound(_tree(draft.lm, tuple(branching), draw), draft.params, (draft,))


@functools.cache
def _tree(lm: LanguageModel, branching: tuple[int, ...], draw: DrawName) -> Drafter:
    sizes = tuple(itertools.accumulate(branching, int.__mul__))  # nodes of each level
    firsts = (0, *itertools.accumulate(sizes))  # the first node of each level
    nodes = sum(sizes)
    parents = _parents(branching)
    # Which draft tokens precede the position after each draft token: its ancestors and itself.
    seen = np.asarray(trees.ancestors(jnp.asarray(parents)[None] - 1)[0])

    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> TreeState:
        _, cache = lm.prefill(weights.draft, prompt, buffers.prefill_length(lm, prompt) + headroom)
        length = prompt.length if lm.start_token is None else jnp.ones_like(prompt.length)
        return TreeState(cache, length, length)

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        row, state, batch = context.row, caches.draft, context.limit.shape[0]
        keys = noise.at(context.keys, row.length, noise.Purpose.DRAFT)
        whole = jnp.broadcast_to(jnp.asarray(parents)[None], (batch, nodes))

        def root(state: TreeState) -> tuple[Float[Array, "B 1 W"], Cache]:
            before = ModelState(state.cache, state.seen)
            width = nodes + 1 if context.adaptive else 0
            forward, cache = read_last_two(lm, weights.draft, before, row, context.limit > 0, width)
            return last_logits(lm, weights.draft, forward)[:, None], cache

        def level(depth: int, tokens: Int[Array, "B N"], cache: Cache) -> tuple[Float[Array, "B n W"], Cache]:
            first, last = firsts[depth - 1], firsts[depth]
            forward, cache = lm.extend(weights.draft, cache, known(lm, tokens[:, first:last]), whole[:, :last] - 1)
            return forward.logits, cache

        def skipped(shape: tuple[int, ...], cache: Cache) -> tuple[Array, Cache]:
            return jnp.zeros(shape, jnp.float32), cache

        tokens = jnp.zeros((batch, nodes), jnp.int32)
        cache, found, chosen = state.cache, [], []
        for depth, count in enumerate(branching):
            inner = 1 if depth == 0 else sizes[depth - 1]
            read = functools.partial(level, depth, tokens) if depth else lambda cache: root(state._replace(cache=cache))
            if context.adaptive:
                skip = functools.partial(skipped, (batch, inner, lm.vocab_size))
                logits, cache = jax.lax.cond(jnp.any(context.limit > depth), read, skip, cache)
            else:
                logits, cache = read(cache)
            first = firsts[depth - 1] if depth else 0
            before = seen[None, first : first + inner] if depth else np.zeros((1, 1, nodes), bool)
            distribution = context.to_distribution(logits, tokens, jnp.asarray(before))
            own = noise.split(keys, 1 + first if depth else 0, inner)  # by fed token
            made = _children(distribution, own, count, draw)
            found.append(made.log_probs)
            chosen.append(made)
            flat = made.tokens.reshape(batch, inner * count)
            tokens = jax.lax.dynamic_update_slice_in_dim(tokens, flat, firsts[depth], axis=1)

        def joined(parts: list[Array]) -> Array:
            return jnp.concatenate([part.reshape(batch, -1) for part in parts], axis=1)

        live = joined([made.live for made in chosen])
        parent = jnp.where(live, whole, -1)
        length = jnp.full_like(row.length, nodes)
        made = Draft(tokens, length, parent)
        if found[0] is not None:
            draws = joined([made.draws for made in chosen])
            made = made._replace(log_probs=jnp.concatenate(found, axis=1), draws=draws)
        drafted = context.limit > 0
        start = jnp.where(drafted, row.length, state.start)
        return made, caches._replace(draft=TreeState(cache, jnp.where(drafted, row.length, state.seen), start))

    def commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
        state, fed = caches.draft, len(branching) - 1  # the last level was never fed
        cache = state.cache
        if fed and verdict.path is not None and lm.select is not None:
            step = jnp.arange(fed, dtype=verdict.path.dtype)[None, :]
            # Nothing moves past the accepted ones: in a round without a draft `start` lies in what is committed.
            path = jnp.where(step < verdict.num_accepted[:, None], verdict.path[:, :fed], step)
            cache = lm.select(cache, state.start, jnp.minimum(path, firsts[-2] - 1))
        seen = state.seen + jnp.minimum(verdict.num_accepted, fed).astype(state.seen.dtype)
        return caches._replace(draft=TreeState(cache, jnp.minimum(seen, row.length - 2), state.start))

    return Drafter(init, propose, commit, lm, tree=TreeSize(nodes, len(branching)))


class Children(NamedTuple):
    """The children of each node of a level, chosen: tokens, how, and whether there is one; what they were drawn
    from."""

    tokens: Int[Array, "B n k"]
    draws: Int[Array, "B n k"]
    live: Array
    log_probs: Float[Array, "B n V"] | None


def _children(distribution: Distribution, keys: Key[Array, "B n"], count: int, draw: DrawName) -> Children:
    log_probs, logits = distribution.log_probs, distribution.logits
    if log_probs is None:
        if logits is None:
            raise ValueError("a tree reads logits, and the sampler gives none: set Distribution.logits in it")
        return _top(logits, count, None)
    if draw == "top":
        made = _top(log_probs, count, None)
    elif draw == "replacement":
        each = jax.vmap(lambda keys: noise.split(keys, 0, count))(keys)
        wide = jnp.broadcast_to(log_probs[:, :, None], (*each.shape, log_probs.shape[-1]))
        tokens = noise.categorical(each, wide)
        made = _all(tokens, Draw.WITH_REPLACEMENT, log_probs)
    elif draw == "without_replacement":
        made = _all(noise.without_replacement(keys, log_probs, count), Draw.WITHOUT_REPLACEMENT, log_probs)
    else:
        fixed = noise.largest(log_probs, count - 1) if count > 1 else jnp.zeros((*keys.shape, 0), jnp.int32)
        token = jnp.arange(log_probs.shape[-1], dtype=jnp.int32)
        taken = jnp.any(fixed[..., None] == token[None, None, None], axis=2)
        rest = jax.nn.log_softmax(jnp.where(taken, -jnp.inf, log_probs), axis=-1)
        rest = jnp.where(jnp.isnan(rest), -jnp.inf, rest)  # the fixed ones have all the mass
        sampled = _all(noise.categorical(keys, rest)[..., None], Draw.WITHOUT_REPLACEMENT, rest)
        top = _all(fixed, Draw.FIXED, log_probs)
        tokens, draws, live = (jnp.concatenate(both, axis=-1) for both in zip(sampled[:3], top[:3], strict=True))
        made = Children(tokens, draws, live, rest)
    if distribution.greedy is None or logits is None or made.log_probs is None:
        return made
    # A row at temperature 0 has its most probable tokens instead.
    best, cold = _top(logits, count, made.log_probs), distribution.greedy[:, None, None]
    tokens, draws, live = (jnp.where(cold, x, y) for x, y in zip(best[:3], made[:3], strict=True))
    return Children(tokens, draws, live, made.log_probs)


def _top(scores: Float[Array, "B n V"], count: int, log_probs: Float[Array, "B n V"] | None) -> Children:
    made = _all(noise.largest(scores, count), Draw.FIXED, scores)
    return made._replace(log_probs=log_probs)


def _all(tokens: Int[Array, "B n k"], draw: Draw, log_probs: Float[Array, "B n V"]) -> Children:
    """All chosen alike; a token without a probability is no child."""
    live = jnp.take_along_axis(log_probs, tokens, axis=-1) > -jnp.inf
    return Children(tokens, jnp.full(tokens.shape, int(draw), jnp.int32), live, log_probs)


def _parents(branching: tuple[int, ...]) -> np.ndarray:
    """As in `Draft`: level by level, the children of each node side by side.

    >>> _parents((2, 2)).tolist()
    [0, 0, 1, 1, 2, 2]
    """
    parents, level, first = [], 1, 0
    for count in branching:
        parents += [first + node // count for node in range(level * count)]
        first, level = first + level, level * count
    return np.array(parents, np.int32)
