"""One token after another, each drawn from the distribution after those before it.

A drafter that knows its logits after any draft token writes `core.Steps`. `chain` makes a drafter
of these, and `drafters.tree` and `drafters.dynamic_tree` make theirs of the same functions.
`drafters.model` is an example.
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
from jaxspec.core.round import padded

NodeLogits = tuple[Float[Array, "B n W"], Any]
"""Logits after n tokens, and the carry of `core.Reading`."""
Parent = Int[Array, "B F"] | None
"""The parents of all draft tokens of a tree that were fed so far; None: a chain."""


@functools.lru_cache
def chain(steps: core.Steps, *, coupled: bool = False, trees: bool = True) -> core.Drafter:
    """Makes a drafter of up to gamma tokens; owns the noise, the limits and the early stop.

    Args:
        steps: the drafter's functions; the same drafter is returned for the same ones.
        coupled: draw each token with plain sampling's own noise for its position; given that noise
            it is certain, and so proposed as a point mass.
        trees: whether drafters of trees may use the functions, too.

    Example:
        >>> import jaxspec
        >>> from jaxspec import drafters
        >>> from jaxspec.drafters.common import no_commit, no_state
        >>> def begin(
        ...     weights, caches, context, fed
        ... ):  # sure of the last token + 1; reads no more than that token
        ...     def nodes(tokens, parent, level, carry):
        ...         return 99.0 * jax.nn.one_hot((tokens + 1) % 5, 5), carry
        ...
        ...     last = core.token_rows.window(context.row.tokens, context.row.length - 1, 1)
        ...     return core.Reading((), lambda carry: nodes(last, None, 0, carry), nodes)
        >>> count = chain(core.Steps(no_state, begin, no_commit, width=5))
        >>> from jaxspec.testing import table_model
        >>> target, prompt = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     core.Prompt(jnp.array([[3]]), jnp.array([1])),
        ... )
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=9)
        >>> for drafter in (count, drafters.tree(count, (2, 1))):
        ...     out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        ...     print((out.tokens == plain.tokens).all())
        True
        True
    """
    drafter = drafter_of(steps, functools.partial(sequential, coupled=coupled))
    propose_within = drafter.propose

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        if steps.depth is None:
            depth = context.gamma
        else:
            depth = min(steps.depth, context.gamma)
        if depth == context.gamma:
            return propose_within(weights, caches, context)
        # Among other drafters (`drafters.fallback`) gamma may be more than there are tokens.
        limit = jnp.minimum(context.max_draft, depth)
        draft, caches = propose_within(
            weights, caches, context._replace(gamma=depth, max_draft=limit)
        )
        return padded(draft, context.gamma), caches

    steps_of_trees = steps if trees and not coupled else None
    return drafter._replace(propose=propose, longest=steps.depth, steps=steps_of_trees)


DraftFunction = Callable[
    [core.Reading, core.DraftContext], tuple[core.Draft, Any, Int[Array, "#B N"] | None]
]
"""(reading, context) -> a draft, the carry after it, and the slots that `core.Reading.end` takes,
if there is one.
"""


def drafter_of(
    steps: core.Steps, draft: DraftFunction, fed: int | None = None, nodes: int = 0
) -> core.Drafter:
    """Makes a drafter from a reading: it drafts chains, or trees of `nodes` nodes and feeds `fed`
    of them.
    """

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        reading = steps.begin(weights, caches, context, fed)
        drafted, carry, slots = draft(reading, context)
        return drafted, caches if reading.end is None or slots is None else reading.end(
            carry, drafted, slots
        )

    return core.Drafter(
        lambda start: steps.init(start, nodes),
        propose,
        steps.commit,
        complete_target_pass=steps.complete_target_pass,
        rollback=steps.rollback,
    )


def at_once(
    read: Callable[[Any], NodeLogits], carry: Any, end: Callable[[Any], core.Caches] | None = None
) -> core.Reading:
    """Makes the reading of a drafter whose logits all come from one pass: `read` returns the logits
    of every draft token.

    Args:
        read: carry -> logits [B, G, W], token by token, and the carry.
        carry: the value that `read` is given, such as a cache.
        end: carry -> the caches after the draft; None: they stay as they are.
    """

    def root(state: tuple[Array, Any]) -> NodeLogits:
        logits, after = read(state[1])
        return logits[:, :1], (logits, after)

    def nodes(
        tokens: Int[Array, "B n"], parent: Any, level: Any, state: tuple[Array, Any]
    ) -> NodeLogits:
        return at_level(state[0], tokens, level), state

    empty: Any = jax.eval_shape(read, carry)[0]
    state = jnp.zeros(empty.shape, empty.dtype), carry
    return core.Reading(
        state, root, nodes, None if end is None else lambda state, draft, slots: end(state[1])
    )


def at_level(
    logits: Float[Array, "B G W"], tokens: Int[Array, "B n"], level: Any
) -> Float[Array, "B n W"]:
    """Takes the logits of one level for each of its nodes."""
    of_level = jax.lax.dynamic_slice_in_dim(logits, level, 1, axis=1)
    return jnp.broadcast_to(of_level, (*tokens.shape, logits.shape[-1]))


class DraftLoop(NamedTuple):
    """A draft in the making."""

    # these three: as in `Draft`
    tokens: Int[Array, "B G"]
    log_probs: Float[Array, "B G V"] | None
    length: Int[Array, " B"]
    # these three: as in `Draft.aux`; None where not asked for
    gumbel: Float[Array, "B G V"] | None
    confidence: Float[Array, "B G"] | None
    entropy: Float[Array, "B G"] | None
    going: Bool[Array, " B"]  # rows that draft another token
    carry: Any  # the drafter's own


def sequential(
    reading: core.Reading, context: core.DraftContext, *, coupled: bool = False
) -> tuple[core.Draft, Any, Int[Array, "#B G"] | None]:
    """Drafts a chain; returns it, the carry, and the slots of its tokens, -1 for those that were
    not fed.

    None if nobody takes slots.
    """
    gamma = context.gamma
    limit = context.max_draft
    dynamic = context.adaptive or reading.going is not None
    keys = noise.at(context.keys, context.row.length, noise.Purpose.DRAFT)
    position = context.row.length

    def choose(
        i: Int[Array, ""],
        distribution: core.Distribution,
        going: Bool[Array, " B"],
        loop: DraftLoop,
    ) -> tuple[Int[Array, " B"], DraftLoop]:
        """Chooses token i of each row, and records its distribution or its noise."""
        if distribution.log_probs is None:
            assert distribution.tokens is not None
            # -1, where nothing is allowed, could not be fed
            return jnp.maximum(distribution.tokens[:, 0], 0), loop
        log_probs = distribution.log_probs[:, 0]  # B V
        if coupled:
            token_keys = noise.at(
                context.keys, position + i.astype(position.dtype), noise.Purpose.TOKEN
            )
            gumbel = noise.gumbel(token_keys, log_probs.shape[-1])
            token = noise.categorical(token_keys, log_probs, drawn=gumbel)
            return token, loop._replace(gumbel=_put(loop.gumbel, gumbel, i))
        token_keys = jax.vmap(lambda key: jax.random.fold_in(key, i))(keys)
        token = noise.categorical(token_keys, log_probs, going)
        return token, loop._replace(log_probs=_put(loop.log_probs, log_probs, i))

    def draw(i: Int[Array, ""], logits: Float[Array, "B 1 W"], loop: DraftLoop) -> DraftLoop:
        """Draws token i of each row from its logits, and asks which rows go on after it."""
        seen = (jnp.arange(gamma, dtype=jnp.int32) < i)[None, None, :]
        distribution = context.to_distribution(logits, loop.tokens, seen)
        if reading.going is None:
            going = loop.going
        else:
            going = loop.going & reading.going(loop.carry)
        if dynamic:
            going = going & (i < limit)
        token, loop = choose(i, distribution, going, loop)
        length = loop.length + going.astype(loop.length.dtype)
        if context.entropy is not None:
            loop = loop._replace(entropy=_put(loop.entropy, context.entropy(distribution), i))
        if context.confidence is not None and context.should_continue is not None:
            if reading.estimate is not None:  # of this token, made of the tokens before it
                distribution = distribution._replace(estimate=reading.estimate(loop.carry))
            confidence = _put(
                loop.confidence, jnp.where(going, context.confidence(distribution), 0.0), i
            )
            going = going & context.should_continue(i, confidence)
            loop = loop._replace(confidence=confidence)
        return loop._replace(tokens=_put(loop.tokens, token, i), length=length, going=going)

    def one_token(i: Int[Array, ""], loop: DraftLoop) -> DraftLoop:
        last = jax.lax.dynamic_slice_in_dim(loop.tokens, i - 1, 1, axis=1)  # B 1
        logits, carry = reading.nodes(last, None, i, loop.carry)
        return draw(i, logits, loop._replace(carry=carry))

    # Where no row may draft, nothing is read.
    logits, carry = read_if_wanted(
        context._replace(adaptive=dynamic), 0, reading.root, reading.carry
    )
    loop = draw(jnp.zeros((), jnp.int32), logits, _empty(context, logits, carry, coupled))
    if not dynamic:
        loop = jax.lax.fori_loop(jnp.int32(1), jnp.int32(gamma), one_token, loop)
        num_fed = gamma - 1
    else:

        def unfinished(state: tuple[Int[Array, ""], DraftLoop]) -> Bool[Array, ""]:
            i, loop = state
            return (i < gamma) & jnp.any(loop.going & (i < limit))

        def step(state: tuple[Int[Array, ""], DraftLoop]) -> tuple[Int[Array, ""], DraftLoop]:
            return state[0] + 1, one_token(*state)

        drawn, loop = jax.lax.while_loop(unfinished, step, (jnp.ones((), jnp.int32), loop))
        num_fed = drawn - 1
    aux = {"gumbel": loop.gumbel, "confidence": loop.confidence, "entropy": loop.entropy}
    aux = {name: values for name, values in aux.items() if values is not None}
    draft = core.Draft(loop.tokens, loop.length, log_probs=loop.log_probs, aux=aux or None)
    if reading.end is None:
        return draft, loop.carry, None
    slots = jnp.arange(gamma, dtype=jnp.int32)[None]
    return draft, loop.carry, jnp.where(slots < num_fed, slots, -1)


def read_if_wanted(
    context: core.DraftContext, depth: int, read: Callable[[Any], NodeLogits], carry: Any
) -> NodeLogits:
    """Reads logits; where no row may draft so deep, returns zeros for logits, and the carry as it
    is.
    """
    if not context.adaptive:
        return read(carry)
    return branches.run_or_zeros(jnp.any(context.max_draft > depth), read, carry)


def _empty(
    context: core.DraftContext, logits: Float[Array, "B 1 W"], carry: Any, coupled: bool
) -> DraftLoop:
    shape = context.max_draft.shape[0], context.gamma
    distribution: core.Distribution = jax.eval_shape(context.to_distribution, logits)
    log_probs = distribution.log_probs
    # B G V
    rows = None
    if log_probs is not None:
        rows = jnp.zeros((*shape, log_probs.shape[-1]), jnp.float32)
    return DraftLoop(
        tokens=jnp.zeros(shape, jnp.int32),
        log_probs=None if coupled else rows,
        length=jnp.zeros_like(context.row.length),
        gumbel=rows if coupled else None,
        confidence=None if context.confidence is None else jnp.zeros(shape, jnp.float32),
        entropy=None if context.entropy is None else jnp.zeros(shape, jnp.float32),
        going=context.max_draft >= 0,
        carry=carry,
    )


def _put(rows: Array | None, new: Array, i: Int[Array, ""]) -> Array:
    assert rows is not None
    return jax.lax.dynamic_update_slice_in_dim(rows, new[:, None].astype(rows.dtype), i, axis=1)
