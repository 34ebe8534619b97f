"""The draft loop: one token after another, each drawn from the distribution after those before it.

A drafter that gives logits needs little else: see `drafters.model`. Its `propose` is

    def propose(weights, caches, context):
        draft, state = sequential(first, following, caches.draft, context)
        return draft, caches._replace(draft=state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, DraftContext, branches, noise

Logits = tuple[Float[Array, "B W"], Bool[Array, " B"] | None, Any]
"""Logits of the next token; whether a row can be continued here (None: every row can); the drafter's carry."""


class DraftLoop(NamedTuple):
    """A draft in the making.

    Attributes:
        tokens, log_probs, length: as in `Draft`.
        gumbel, confidence: as in `Draft.aux`; None where not asked for.
        going: rows that draft another token.
        carry: the drafter's own.
    """

    tokens: Int[Array, "B G"]
    log_probs: Float[Array, "B G V"] | None
    length: Int[Array, " B"]
    gumbel: Float[Array, "B G V"] | None
    confidence: Float[Array, "B G"] | None
    going: Bool[Array, " B"]
    carry: Any


def sequential(
    first: Callable[[Any], Logits],
    following: Callable[[Int[Array, ""], Int[Array, " B"], Any], Logits],
    carry: Any,
    context: DraftContext,
    *,
    coupled: bool = False,
    may_be_empty: bool = False,
) -> tuple[Draft, Any]:
    """Drafts up to gamma tokens; owns the noise, the limits and the early stop.

    Args:
        first: carry -> logits of the first draft token. Not called where no row may draft.
        following: (i, draft token i - 1, carry) -> logits of draft token i.
        carry: what the two pass on; of one structure throughout.
        context: of the round.
        coupled: draw token i with plain sampling's own noise for its position; given that noise it is certain, and so
            proposed as a point mass.
        may_be_empty: whether `first` and `following` may end rows (static).

    Returns:
        The draft, a chain, and the carry.

    Example:
        >>> from jaxspec.core import Prompt
        >>> def count(i, last, carry):  # sure of last + 1
        ...     return 99.0 * jax.nn.one_hot(last + 1, 9), None, carry
        >>> row = Prompt(jnp.array([[3, 4, 0]]), jnp.array([2]))
        >>> context = DraftContext(noise.row_keys(jax.random.key(0), 1), row, jnp.array([3]), 3, False,
        ...                        lambda logits, *_: Distribution(jax.nn.log_softmax(logits)))
        >>> sequential(lambda carry: count(0, jnp.array([4]), carry), count, None, context)[0].tokens.tolist()
        [[5, 6, 7]]
    """
    gamma, limit = context.gamma, context.max_draft
    dynamic = context.adaptive or may_be_empty
    keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
    position = context.row.length

    def draw(i: Int[Array, ""], logits: Logits, loop: DraftLoop) -> DraftLoop:
        values, can_continue, carry = logits
        seen = (jnp.arange(gamma, dtype=jnp.int32) < i)[None, None, :]
        distribution = context.to_distribution(values[:, None], loop.tokens, seen)
        going = loop.going if can_continue is None else jnp.logical_and(loop.going, can_continue)
        if dynamic:
            going = jnp.logical_and(going, i < limit)
        loop = loop._replace(carry=carry)
        if coupled and distribution.log_probs is not None:
            at = noise.at(context.keys, position + i.astype(position.dtype), noise.Purpose.TOKEN)
            gumbel = noise.gumbel(at, distribution.log_probs.shape[-1])
            token = noise.categorical(at, distribution.log_probs[:, 0], drawn=gumbel)
            loop = loop._replace(gumbel=_put(loop.gumbel, gumbel, i))
        elif distribution.log_probs is not None:
            token_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
            token = noise.categorical(token_keys, distribution.log_probs[:, 0], going)
            loop = loop._replace(log_probs=_put(loop.log_probs, distribution.log_probs[:, 0], i))
        else:
            assert distribution.tokens is not None
            token = jnp.maximum(distribution.tokens[:, 0], 0)  # -1, where nothing is allowed, could not be fed
        length = loop.length + going.astype(loop.length.dtype)
        if context.confidence is not None and context.should_continue is not None:
            confidence = _put(loop.confidence, jnp.where(going, context.confidence(distribution), 0.0), i)
            going = jnp.logical_and(going, context.should_continue(i, confidence))
            loop = loop._replace(confidence=confidence)
        return loop._replace(tokens=_put(loop.tokens, token, i), length=length, going=going)

    def one_token(i: Int[Array, ""], loop: DraftLoop) -> DraftLoop:
        last = jax.lax.dynamic_index_in_dim(loop.tokens, i - 1, axis=1, keepdims=False)
        return draw(i, following(i, last, loop.carry), loop)

    def begin(carry: Any) -> tuple[tuple[Float[Array, "B W"], Bool[Array, " B"]], Any]:
        values, can_continue, carry = first(carry)
        return (values, jnp.ones(limit.shape, bool) if can_continue is None else can_continue), carry

    # Where nothing is begun no row can be continued: zeros are False.
    begun = branches.run_or_zeros(jnp.any(limit > 0), begin, carry) if dynamic else begin(carry)
    (values, can_continue), carry = begun
    empty = _empty(context, values, carry, coupled)
    loop = draw(jnp.zeros((), jnp.int32), (values, can_continue, carry), empty)
    if dynamic:

        def unfinished(state: tuple[Int[Array, ""], DraftLoop]) -> Bool[Array, ""]:
            i, loop = state
            return jnp.logical_and(i < gamma, jnp.any(jnp.logical_and(loop.going, i < limit)))

        def step(state: tuple[Int[Array, ""], DraftLoop]) -> tuple[Int[Array, ""], DraftLoop]:
            return state[0] + 1, one_token(*state)

        _, loop = jax.lax.while_loop(unfinished, step, (jnp.ones((), jnp.int32), loop))
    else:
        loop = jax.lax.fori_loop(jnp.int32(1), jnp.int32(gamma), one_token, loop)
    aux = {"gumbel": loop.gumbel, "confidence": loop.confidence}
    aux = {name: values for name, values in aux.items() if values is not None}
    return Draft(loop.tokens, loop.length, log_probs=loop.log_probs, aux=aux or None), loop.carry


def _empty(context: DraftContext, logits: Float[Array, "B W"], carry: Any, coupled: bool) -> DraftLoop:
    """Makes a draft of no tokens, with buffers for gamma."""
    shape = context.max_draft.shape[0], context.gamma
    distribution: Distribution = jax.eval_shape(context.to_distribution, logits[:, None])
    log_probs = distribution.log_probs
    rows = None if log_probs is None else jnp.zeros((*shape, log_probs.shape[-1]), jnp.float32)  # B G V
    return DraftLoop(
        tokens=jnp.zeros(shape, jnp.int32),
        log_probs=None if coupled else rows,
        length=jnp.zeros_like(context.row.length),
        gumbel=rows if coupled else None,
        confidence=None if context.confidence is None else jnp.zeros(shape, jnp.float32),
        going=context.max_draft >= 0,
        carry=carry,
    )


def _put(rows: Array | None, new: Array, i: Int[Array, ""]) -> Array:
    """Replaces entry i of each row."""
    assert rows is not None
    return jax.lax.dynamic_update_slice_in_dim(rows, new[:, None].astype(rows.dtype), i, axis=1)
