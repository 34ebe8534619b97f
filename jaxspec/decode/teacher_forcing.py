"""Reads finished texts once more, in one pass that has a gradient.

Logits are the largest arrays by far: they are made for a few positions at a time, and again for the
gradient.

Shapes: B rows, P tokens of a prompt, T new tokens, C of them at once, V vocabulary, top tokens
reported beside each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core import (
    Cache,
    LanguageModel,
    LogProbs,
    Params,
    Preceding,
    Prompt,
    Room,
    Sampler,
    chunks,
    programs,
    token_rows,
)
from jaxspec.decode import log_probs
from jaxspec.sampling import samplers

POSITIONS = 256  # of all rows together, about, whose logits are in memory at once

ReadLogits = Callable[..., tuple[Any, Any]]
"""(carried, logits [B, C, V], further arrays [B, C, ...]) -> (carried, outputs [B, C, ...])."""


def at_new_tokens(
    lm: LanguageModel,
    params: Params,
    prompt: Prompt,
    tokens: Int[Array, "B T"],
    read: ReadLogits,
    carried: Any = None,
    beside: tuple[Array, ...] = (),
) -> Any:
    """Calls `read` with the logits that each new token was drawn from, from the first tokens to the
    last ones.

    Args:
        lm, params: the model whose logits are taken.
        prompt, tokens: the prompts, and the tokens generated after them; each prompt has the same
            number of rows.
        read: the function of the logits of some positions; it is called again for the gradient.
        carried: the value that the first call is given; each further call is given the previous
            call's.
        beside: further arrays [B, T, ...] that it reads.

    Returns:
        The outputs of `read` at all positions.
    """
    # another model's text may have ids that this one lacks
    shared_ids = jnp.minimum(tokens, lm.vocab_size - 1)
    room = token_rows.reading_room(lm, prompt, tokens.shape[1])
    before = token_rows.repeat_rows(
        _prefill(lm, params, prompt, room), len(tokens) // len(prompt.length)
    )
    carried, first = read(carried, before[0], *(x[:, :1] for x in beside))
    if tokens.shape[1] == 1:
        return first
    after, _ = lm.extend(params, before[1], shared_ids[:, :-1])
    later = tuple(x[:, 1:] for x in beside)
    size = max(1, POSITIONS // len(tokens))
    if lm.inside is None:
        # Such a model has made all logits by now.
        later_outputs = read(carried, after.logits, *later)[1]
    else:
        head = lm.inside.head

        def read_block(carried: Any, block: tuple[Array, ...]) -> tuple[Any, Any]:
            features, *more = (jnp.moveaxis(x, 0, 1) for x in block)
            carried, outputs = read(carried, head(params, features), *more)
            return carried, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), outputs)

        later_outputs = _by_blocks(read_block, carried, (after.features, *later), size)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, later_outputs)


def _prefill(lm: LanguageModel, params: Params, prompt: Prompt, room: Room) -> tuple[Array, Cache]:
    """Reads the prompts; returns the logits after each row's last token [B, 1, V], and the
    cache.
    """
    width = prompt.tokens.shape[1]
    if width <= chunks.LONGEST or lm.limits.start_token is not None:
        forward, cache = lm.prefill(params, prompt, room)
        return forward.logits, cache
    # The loop over chunks of a long prompt has no gradient, and one pass over the whole prompt has.
    first_token = Prompt(prompt.tokens[:, :1], jnp.ones_like(prompt.length))
    first, cache = lm.prefill(params, first_token, room)
    forward, cache = lm.extend(params, cache, prompt.tokens[:, 1:], real=prompt.length - 1)
    is_one = (prompt.length == 1)[:, None, None]
    last = jnp.maximum(prompt.length - 2, 0)
    if lm.inside is None:
        logits = chunks.at(forward.logits, last)
    else:
        logits = lm.inside.head(params, chunks.at(forward.features, last))
    return jnp.where(is_one, first.logits, logits), lm.rewind(cache, prompt.length)


def _by_blocks(
    read_block: Callable[[Any, tuple[Array, ...]], tuple[Any, Any]],
    carried: Any,
    rows: tuple[Array, ...],
    size: int,
) -> Any:
    """Calls `read_block` with [size, B, ...] of arrays [B, T, ...], block after block; the last one
    may be smaller.
    """
    count = rows[0].shape[1] // size
    over_time = tuple(jnp.moveaxis(x, 1, 0) for x in rows)  # [T, B, ...]
    block = jax.checkpoint(read_block)
    outputs = []
    if count:
        blocks_of_rows = tuple(
            x[: count * size].reshape(count, size, *x.shape[1:]) for x in over_time
        )
        carried, blocks = jax.lax.scan(block, carried, blocks_of_rows)
        outputs.append(jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:]), blocks))
    if count * size < len(over_time[0]):
        outputs.append(block(carried, tuple(x[count * size :] for x in over_time))[1])
    if len(outputs) == 1:
        joined = outputs[0]
    else:
        joined = jax.tree.map(lambda *x: jnp.concatenate(x), *outputs)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), joined)


@programs.jit(static_argnames=("lm", "sampler"))
def log_probs_of(
    lm: LanguageModel,
    sampler: Sampler,
    params: Params,
    prompt: Prompt,
    sampling_params: Any,
    tokens: Int[Array, "B T"],
    length: Int[Array, " B"],
    top_tokens: Int[Array, "B T top"],
) -> LogProbs:
    """Computes a generation's `core.LogProbs` by a pass over the finished rows.

    Args:
        lm, params: the target.
        sampler, sampling_params: the sampler and its values, an entry for each row.
        prompt: the prompts; each has the same number of rows.
        tokens, length: the new tokens, and how many of each row are real.
        top_tokens: further tokens whose raw log probabilities are wanted.
    """
    times = len(tokens) // len(prompt.length)
    begun = token_rows.repeat_rows(token_rows.decoder_prompt(lm, prompt), times)
    padded = jnp.pad(begun.tokens, ((0, 0), (0, tokens.shape[1])))
    row = Prompt(token_rows.append(padded, begun.length, tokens), begun.length)
    if isinstance(sampler, samplers.Chain):
        processors = sampler.processors
    else:
        processors = ()
    memory = samplers.memories(processors, sampling_params, row, row.length, lm.vocab_size)
    real = jnp.arange(tokens.shape[1], dtype=length.dtype)[None, :] < length[:, None]

    def read(
        carried: Any, logits: Array, tokens: Array, real: Array, top_tokens: Array
    ) -> tuple[Any, LogProbs]:
        # Where there is no token, logits and memory are those of a place that has a distribution.
        # The garbage that is there would make the gradient NaN, though it counts for nothing.
        logits = jnp.where(real[..., None], logits, 0.0)
        if not processors:
            distribution = sampler(sampling_params, logits)
            return carried, log_probs.at_tokens(tokens, logits, distribution, top_tokens)

        def next_place(carried: Any, entries: tuple[Array, ...]) -> tuple[Any, LogProbs]:
            length, memory = carried
            logits, tokens, real, top_tokens = (x[:, None] for x in entries)
            preceding = Preceding(row._replace(length=length), begun.length, memory=memory)
            distribution = sampler(sampling_params, logits, preceding)
            values = log_probs.at_tokens(tokens, logits, distribution, top_tokens)
            count = real[:, 0].astype(length.dtype)
            memory = samplers.advanced(processors, sampling_params, memory, tokens, count)
            return (length + count, memory), LogProbs(*(x[:, 0] for x in values))

        over_time = tuple(jnp.moveaxis(x, 1, 0) for x in (logits, tokens, real, top_tokens))
        carried, values = jax.lax.scan(next_place, carried, over_time)
        return carried, LogProbs(*(jnp.moveaxis(x, 0, 1) for x in values))

    beside = (tokens, real, top_tokens)
    values = at_new_tokens(lm, params, prompt, tokens, read, (row.length, memory), beside)
    return log_probs.where(real, values)
