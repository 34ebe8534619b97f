"""The target drafts for itself, from vectors that stand for tokens to come (PaSS)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec.base import (
    Bound,
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
from jaxspec.drafters.hidden_states import bound, check_target, draw_in_a_row


def lookahead_embeddings(head: Bound[LookAheadEmbeddings], target: Model) -> Bound[Drafter]:
    """Drafts with the target itself, in one pass over the last committed token and trained look-ahead vectors (PaSS).

    The pass gives the target's own distribution of the next token, which is accepted with certainty (up to rounding),
    and a draft token more for each vector; these are independent of each other. A round is two passes of the target,
    which yield at least two tokens: it pays where the vectors are good for a third. What is stored is the vectors
    alone. gamma is cut to one more than there are vectors.

    Args:
        head: vectors [n, dim]: `Bound(nets.lookahead_embeddings.head(target.lm, n), vectors)`.
        target: the model.

    Raises:
        ValueError: the vectors are of another width, or the target is no network of `jaxspec.nets`.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import gpt, lookahead_embeddings as net
        >>> shape = gpt.GPTConfig(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=48)
        >>> target = jaxspec.Model(gpt.language_model(shape), gpt.init(shape, jax.random.key(0)))
        >>> vectors = jaxspec.Bound(net.head(target.lm, 2), net.init(16, 2, jax.random.key(1)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=lookahead_embeddings(vectors, target), max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Monea, Joulin, Grave, PaSS, arXiv 2311.13581.
    """
    check_target(head.functions.needs, target, "look-ahead vectors")
    expected = head.functions.count - 1, head.functions.needs.hidden_size
    if jnp.shape(head.params) != expected:
        raise ValueError(f"the look-ahead vectors have shape {jnp.shape(head.params)}, expected {expected}")
    return bound(_lookahead(head.functions, target.lm), head.params, target)


@functools.cache
def _lookahead(head: LookAheadEmbeddings, lm: LanguageModel) -> Drafter:
    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        row = context.row
        last = buffers.window(row.tokens, row.length - 1, 1)[:, 0]
        count = min(context.gamma, head.count)

        def first(carry: tuple) -> tuple[Float[Array, "B V"], tuple]:
            _, cache = carry
            logits, cache = head.logits(weights.target, weights.draft, lm.rewind(cache, row.length - 1), last, count)
            return logits[:, 0], (logits, cache)

        def following(i: Int[Array, ""], token: Int[Array, " B"], carry: tuple) -> tuple[Float[Array, "B V"], tuple]:
            return jax.lax.dynamic_index_in_dim(carry[0], i, axis=1, keepdims=False), carry

        logits = jnp.zeros((last.shape[0], count, lm.vocab_size), jnp.float32)
        draft, (_, cache) = draw_in_a_row(first, following, (logits, caches.target), context, head.count)
        return draft, caches._replace(target=cache)

    return Drafter(no_state, propose, no_commit, longest=head.count)
