"""One token after another, each drawn from the distribution after those before it.

A drafter that knows its logits after any draft token writes `core.Steps`. `chain` makes a drafter of these, and
`drafters.tree` and `drafters.dynamic_tree` make theirs of the same functions. `drafters.model` is an example.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core import branches, noise

NodeLogits = tuple[Float[Array, "B n W"], Any]
"""Logits after n tokens, and the carry of `core.Reading`."""


@functools.lru_cache
def chain(steps: core.Steps, *, coupled: bool = False, trees: bool = True) -> core.Drafter:
    """Makes a drafter of up to gamma tokens; owns the noise, the limits and the early stop.

    Args:
        steps: the drafter's functions; the same drafter is returned for the same ones.
        coupled: draw each token with plain sampling's own noise for its position; given that noise it is certain, and
            so proposed as a point mass.
        trees: whether drafters of trees may use the functions, too.

    Example:
        >>> import jaxspec
        >>> from jaxspec import drafters
        >>> from jaxspec.drafters.common import no_commit, no_state
        >>> def begin(weights, caches, context, fed):  # sure of the last token + 1; reads no more than that token
        ...     def nodes(tokens, parent, level, carry):
        ...         return 99.0 * jax.nn.one_hot((tokens + 1) % 5, 5), carry
        ...     last = core.token_rows.window(context.row.tokens, context.row.length - 1, 1)
        ...     return core.Reading((), lambda carry: nodes(last, None, 0, carry), nodes)
        >>> count = chain(core.Steps(no_state, begin, no_commit, width=5))
        >>> from jaxspec.testing import table_model
        >>> target, prompt = table_model(jax.random.key(1), vocab=5), core.Prompt(jnp.array([[3]]), jnp.array([1]))
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=9)
        >>> for drafter in (count, drafters.tree(count, (2, 1))):
        ...     out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        ...     print((out.tokens == plain.tokens).all())
        True
        True
    """

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> tuple[core.Draft, core.Caches]:
        longest = context.gamma
        if steps.depth is not None and steps.depth < longest:  # among other drafters (`drafters.fallback`)
            limit = jnp.minimum(context.max_draft, steps.depth)
            context = context._replace(gamma=steps.depth, max_draft=limit)
        reading = steps.begin(weights, caches, context, None)
        draft, carry, num_fed = sequential(reading, context, coupled=coupled)
        if reading.end is not None:
            slots = jnp.arange(context.gamma, dtype=jnp.int32)[None]
            caches = reading.end(carry, draft, jnp.where(slots < num_fed, slots, -1))

        def padded(x: Array) -> Array:
            if x.ndim < 2 or context.gamma == longest:
                return x
            return jnp.pad(x, [(0, 0), (0, longest - context.gamma)] + [(0, 0)] * (x.ndim - 2))

        return jax.tree.map(padded, draft), caches

    return core.Drafter(
        lambda start: steps.init(start, 0),
        *(propose, steps.commit),
        longest=steps.depth,
        steps=steps if trees and not coupled else None,
        complete_target_pass=steps.complete_target_pass,
        rollback=steps.rollback,
    )


class DraftLoop(NamedTuple):
    """A draft in the making."""

    # these three: as in `Draft`
    tokens: Int[Array, "B G"]
    log_probs: Float[Array, "B G V"] | None
    length: Int[Array, " B"]
    # these two: as in `Draft.aux`; None where not asked for
    gumbel: Float[Array, "B G V"] | None
    confidence: Float[Array, "B G"] | None
    going: Bool[Array, " B"]  # rows that draft another token
    carry: Any  # the drafter's own


def sequential(
    reading: core.Reading, context: core.DraftContext, *, coupled: bool = False
) -> tuple[core.Draft, Any, int | Int[Array, ""]]:
    """Drafts a chain; returns it, the carry, and how many of its tokens were fed."""
    gamma, limit = context.gamma, context.max_draft
    dynamic = context.adaptive or reading.going is not None
    keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
    position = context.row.length

    def draw(i: Int[Array, ""], logits: Float[Array, "B 1 W"], loop: DraftLoop) -> DraftLoop:
        seen = (jnp.arange(gamma, dtype=jnp.int32) < i)[None, None, :]
        distribution = context.to_distribution(logits, loop.tokens, seen)
        going = loop.going if reading.going is None else jnp.logical_and(loop.going, reading.going(loop.carry))
        if dynamic:
            going = jnp.logical_and(going, i < limit)
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
            if reading.estimate is not None:  # of this token, made of the tokens before it
                distribution = distribution._replace(estimate=reading.estimate(loop.carry))
            confidence = _put(loop.confidence, jnp.where(going, context.confidence(distribution), 0.0), i)
            going = jnp.logical_and(going, context.should_continue(i, confidence))
            loop = loop._replace(confidence=confidence)
        return loop._replace(tokens=_put(loop.tokens, token, i), length=length, going=going)

    def one_token(i: Int[Array, ""], loop: DraftLoop) -> DraftLoop:
        last = jax.lax.dynamic_slice_in_dim(loop.tokens, i - 1, 1, axis=1)  # B 1
        logits, carry = reading.nodes(last, None, i, loop.carry)
        return draw(i, logits, loop._replace(carry=carry))

    # Where no row may draft, nothing is read.
    logits, carry = read_if_wanted(context._replace(adaptive=dynamic), 0, reading.root, reading.carry)
    loop = draw(jnp.zeros((), jnp.int32), logits, _empty(context, logits, carry, coupled))
    if not dynamic:
        loop = jax.lax.fori_loop(jnp.int32(1), jnp.int32(gamma), one_token, loop)
        num_fed = gamma - 1
    else:

        def unfinished(state: tuple[Int[Array, ""], DraftLoop]) -> Bool[Array, ""]:
            i, loop = state
            return jnp.logical_and(i < gamma, jnp.any(jnp.logical_and(loop.going, i < limit)))

        def step(state: tuple[Int[Array, ""], DraftLoop]) -> tuple[Int[Array, ""], DraftLoop]:
            return state[0] + 1, one_token(*state)

        drawn, loop = jax.lax.while_loop(unfinished, step, (jnp.ones((), jnp.int32), loop))
        num_fed = drawn - 1
    aux = {"gumbel": loop.gumbel, "confidence": loop.confidence}
    aux = {name: values for name, values in aux.items() if values is not None}
    return core.Draft(loop.tokens, loop.length, log_probs=loop.log_probs, aux=aux or None), loop.carry, num_fed


def read_if_wanted(context: core.DraftContext, depth: int, read: Callable[[Any], NodeLogits], carry: Any) -> NodeLogits:
    """Reads logits; where no row may draft so deep, returns zeros for logits, and the carry as it is."""
    if not context.adaptive:
        return read(carry)
    return branches.run_or_zeros(jnp.any(context.max_draft > depth), read, carry)


def _empty(context: core.DraftContext, logits: Float[Array, "B 1 W"], carry: Any, coupled: bool) -> DraftLoop:
    shape = context.max_draft.shape[0], context.gamma
    distribution: core.Distribution = jax.eval_shape(context.to_distribution, logits)
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
    assert rows is not None
    return jax.lax.dynamic_update_slice_in_dim(rows, new[:, None].astype(rows.dtype), i, axis=1)
