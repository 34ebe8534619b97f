"""The target drafts for itself, from vectors that stand for tokens to come (PaSS)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec.base import (
    Bound,
    Cache,
    Caches,
    Draft,
    DraftContext,
    Drafter,
    LanguageModel,
    LookAheadEmbeddings,
    Model,
    Weights,
)
from jaxspec.drafters.common import no_commit, no_state
from jaxspec.drafters.hidden_states import bound, check_target, draw_in_a_row, reader_at_once, shared_with


def lookahead_embeddings(head: Bound[LookAheadEmbeddings], target: Model) -> Bound[Drafter]:
    """Drafts with the target itself, in one pass over the last committed token and trained look-ahead vectors (PaSS).

    The pass gives the target's own distribution of the next token, which is accepted with certainty (up to rounding),
    and a draft token more for each vector; these are independent of each other. A round is two passes of the target,
    which yield at least two tokens: it pays where the vectors are good for a third. What is stored is the vectors
    alone. gamma is cut to one more than there are vectors.

    Args:
        head: `nets.lookahead_embeddings.head(config)` and the vectors, in a `Bound`; `jaxspec train` makes them, and
            `jaxspec.load_drafter` reads them.
        target: the model.

    Raises:
        ValueError: the vectors are for another target, or it is no network of `jaxspec.nets`.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import gpt, lookahead_embeddings as net
        >>> shape = gpt.GPTConfig(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=48)
        >>> target = jaxspec.Model(gpt.language_model(shape), gpt.init(shape, jax.random.key(0)))
        >>> config = net.LookAheadConfig(32, dim=16, vectors=2)
        >>> vectors = jaxspec.Bound(net.head(config), net.init(config, jax.random.key(1)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=lookahead_embeddings(vectors, target), max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Monea, Joulin, Grave, PaSS, arXiv 2311.13581.
    """
    check_target(head.functions.needs, target, "the look-ahead vectors")
    return bound(_lookahead(head.functions, target.lm), head.params, target, "lookahead_embeddings")


@functools.lru_cache
def _lookahead(head: LookAheadEmbeddings, lm: LanguageModel) -> Drafter:
    def at_once(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Float[Array, "B C V"], Cache]:
        row, count = context.row, min(context.gamma, head.count)
        last = buffers.window(row.tokens, row.length - 1, 1)
        ahead = jnp.broadcast_to(lm.vocab_size + jnp.arange(count - 1, dtype=last.dtype), (len(last), count - 1))
        cache, tokens = lm.rewind(caches.target, row.length - 1), jnp.concatenate([last, ahead], axis=1)
        forward, cache = head.extend(weights.draft, lm.extend, weights.target, cache, tokens, None)
        return head.logits(weights.draft, shared_with(lm, weights.target), forward.features), cache

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        def first(carry: tuple) -> tuple[Float[Array, "B V"], tuple]:
            logits, cache = at_once(weights, caches._replace(target=carry[1]), context)
            return logits[:, 0], (logits, cache)

        def following(i: Int[Array, ""], token: Int[Array, " B"], carry: tuple) -> tuple[Float[Array, "B V"], tuple]:
            return jax.lax.dynamic_index_in_dim(carry[0], i, axis=1, keepdims=False), carry

        shape = jax.eval_shape(lambda: at_once(weights, caches, context)[0])
        nothing: Any = jnp.zeros(shape.shape, shape.dtype)
        draft, (_, cache) = draw_in_a_row(first, following, (nothing, caches.target), context, head.count)
        return draft, caches._replace(target=cache)

    reader = reader_at_once(no_state, at_once, no_commit, head.needs, head.count)
    return Drafter(no_state, propose, no_commit, longest=head.count, reader=reader)
