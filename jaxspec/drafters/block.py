"""A block of draft tokens in one pass that reads the target's hidden states at every position: DFlash, DSpark."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec.base import (
    BlockHead,
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
    Verdict,
    Weights,
)
from jaxspec.drafters.hidden_states import (
    bound,
    check_target,
    draw_in_a_row,
    on_path,
    reader_at_once,
    row_of,
    shared_with,
)


class BlockState(NamedTuple):
    """Keys and values of what the target has read, and how many positions that are."""

    cache: Cache
    seen: Int[Array, " B"]


def block(head: Bound[BlockHead], target: Model) -> Bound[Drafter]:
    """Drafts a whole block of tokens in one pass over mask tokens, conditioned on the target's hidden states (DFlash).

    The cost does not grow with the number of draft tokens, so they may be many. Given the committed text DFlash's
    tokens are independent of each other; DSpark's are drawn one after the other, each with the logits of its position
    and what a low-rank matrix says of the token before. gamma is cut to what a block has.

    Args:
        head: a network and its parameters: `nets.block.head(config)` in a `Bound`; `jaxspec.load_drafter` reads
            published ones.
        target: the model whose text it drafts, with the taps that it reads (`jaxspec.with_taps`).

    Raises:
        ValueError: the network is for another target, or the target lacks the taps.

    Example:
        >>> import dataclasses, jaxspec
        >>> from jaxspec.nets import block as net, decoder
        >>> shape = decoder.DecoderConfig(32, dim=16, ff_dim=32, layers=3, heads=4, kv_heads=2, head_dim=4)
        >>> target = jaxspec.Model(decoder.language_model(shape, taps=(0, 1)), decoder.init(shape, jax.random.key(0)))
        >>> config = net.BlockConfig(dataclasses.replace(shape, layers=1), 16, taps=(0, 1), block=4, mask_token=31)
        >>> drafter = block(jaxspec.Bound(net.head(config), net.init(config, jax.random.key(1))), target)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen, Liang, Liu, DFlash, arXiv 2602.06036.
    """
    check_target(head.functions.needs, target, "a block drafter")
    return bound(_block(head.functions, target.lm), head.params, target, "block")


@functools.lru_cache
def _block(head: BlockHead, lm: LanguageModel) -> Drafter:
    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> BlockState:
        row = row_of(lm, prompt)
        empty = head.empty(row.tokens.shape[0], row.tokens.shape[1] + headroom)
        cache = head.append(weights.draft, empty, head.read(weights.draft, prefilled))
        return BlockState(head.rewind(cache, row.length), row.length)

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        row, state, shared = context.row, caches.draft, shared_with(lm, weights.target)
        last = buffers.window(row.tokens, row.length - 1, 1)[:, 0]
        count = min(context.gamma, head.count)

        def begin() -> tuple[Array, Array, Array]:
            features = head.block(weights.draft, shared, state.cache, last, count)
            lead, memory = features.shape[1] - count, jnp.zeros((last.shape[0], head.memory), features.dtype)
            for i in range(lead):  # positions that predict no token, which a sequential head reads all the same
                assert head.correct is not None
                _, memory = head.correct(weights.draft, last, features[:, i], memory)
            return features[:, lead:], head.logits(weights.draft, shared, features[:, lead:]), memory

        def logits_at(
            i: int | Int[Array, ""], previous: Int[Array, " B"], carry: Any
        ) -> tuple[Float[Array, "B V"], Any]:
            features, logits, memory = carry
            here = jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False)
            if head.correct is not None:
                mine = jax.lax.dynamic_index_in_dim(features, i, axis=1, keepdims=False)
                added, memory = head.correct(weights.draft, previous, mine, memory)
                here = here + added
            return here, (features, logits, memory)

        def first(carry: Any) -> tuple[Float[Array, "B V"], Any]:
            return logits_at(0, last, begin())

        carry = tuple(jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(begin))
        draft, _ = draw_in_a_row(first, logits_at, carry, context, head.count)
        return draft, caches

    def commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
        context = head.read(weights.draft, on_path(forward, verdict))
        cache = head.append(weights.draft, caches.draft.cache, context)
        seen = row.length - 1
        return caches._replace(draft=BlockState(head.rewind(cache, seen), seen))

    def at_once(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Float[Array, "B C V"], None]:
        row, shared = context.row, shared_with(lm, weights.target)
        last = buffers.window(row.tokens, row.length - 1, 1)[:, 0]
        features = head.block(weights.draft, shared, caches.draft.cache, last, head.count)
        return head.logits(weights.draft, shared, features), None

    # A sequential head's logits depend on the path.
    reader = reader_at_once(init, at_once, commit, head.needs, head.count) if head.correct is None else None
    return Drafter(init, propose, commit, longest=head.count, reader=reader)
