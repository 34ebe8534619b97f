"""Running a decoder: whole generations as one jitted program, or round by round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxspec import core
from jaxspec.core import chunks, programs, token_rows
from jaxspec.core.checks import are_shapes
from jaxspec.decode import device_memory
from jaxspec.decode import state as states
from jaxspec.decode.request import Prepared


class Trace(core.RoundInfo):
    """The draft and the committed tokens of every round.

    Rows are padded with rounds after their end: all counts are 0 there.

    The fields are `core.RoundInfo`'s, with an axis for the rounds after the rows'; parent and path
    are None for chains, and numbers unless they were asked for.
    """


class Outcome(NamedTuple):
    """The result of a whole generation, as it leaves the device."""

    # these two: the new tokens of each row, padded, and how many are real
    tokens: Int[Array, "batch new"]
    length: Int[Array, " batch"]
    failed: Int[Array, " batch"]  # why a row ended early, a `core.Failure`; 0 for none
    # these two: counts, and the rounds they are of
    stats: core.Stats
    trace: Trace
    finish: Int[Array, " batch"]  # why each row ended, a `core.Finish`
    # the new tokens' log probabilities; None unless they were asked for
    log_probs: core.LogProbs | None = None


Edit = Callable[[core.State, core.RoundInfo | None], tuple[core.State, core.RoundInfo | None]]
Begin = Callable[[Prepared], core.State]


def run(prepared: Prepared, begin: Begin | None = None) -> Outcome:
    """Prefill to the last token of the longest row, in one dispatch. Raises ValueError if memory
    does not suffice.

    `begin` makes the state after prefill, to time or to watch it, such as `prefill`: in two
    dispatches.
    """
    p = prepared
    if begin is None:
        check_fits(p)
        return generation(p.decoder, p.weights, p.prompt, p.request, p.max_new_tokens, p.before)
    return finish(p.decoder, p.weights, begin(p), p.max_new_tokens)[1]


def check_fits(prepared: Prepared) -> None:
    """Raises ValueError if a generation would not fit in memory, before allocating any of it.

    It is checked when a generation runs, not when it is prepared, since many run in parts. Small
    generations are not checked, nor generations of shapes, which are compiled for absent devices.
    """
    p = prepared
    batch = prepared.request.max_new_tokens.shape[0]
    width = prepared.prompt.tokens.shape[1]
    size = p.max_new_tokens
    nodes = p.decoder.nodes
    options = p.options
    if are_shapes(p.weights) or not device_memory.is_large(batch, width, size + nodes):
        return
    arrays = jax.eval_shape(lambda arrays: arrays, (p.weights, p.prompt, p.request, p.before))
    shapes, structure = jax.tree.flatten(arrays)
    state, prefill = _sizes_after_prefill(
        p.decoder, token_rows.headroom(size, nodes), structure, tuple(shapes)
    )
    of_nodes = 3 + len(core.TraceNumbers._fields) * p.decoder.numbers
    # tokens, counts and drafts of each round, in 32 bits
    history = 4 * size * batch * (5 + of_nodes * nodes)
    logits = 4 * (nodes + 1) * p.target.lm.vocab_size * batch
    limit = int(np.max(options.max_new_tokens))
    purpose = f"max_new_tokens={limit} for {batch} prompts"
    lower = "max_new_tokens"
    if nodes >= device_memory.LONG:
        purpose = f"gamma={options.gamma} for {batch} prompts"
        lower = "gamma"
    elif options.num_samples > 1 and size <= device_memory.LONG:
        purpose = f"num_samples={options.num_samples}"
        lower = "num_samples"
    elif width > size:
        purpose = f"{batch} prompts of up to {width} tokens, padding included,"
        lower = "their number or their length"
    parts = {"weights": device_memory.size_of(p.weights), "caches and rows": state}
    parts |= {"what prefill makes": prefill, "what a round makes": history + logits}
    device_memory.check_memory(parts, purpose, lower, device_memory.devices(p.weights))


@functools.lru_cache
def _sizes_after_prefill(
    decoder: core.Decoder, headroom: int, structure: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[int, int]:
    """Returns `device_memory.sizes_of` prefill, which is traced: that takes as long as a short call of
    `generate`.
    """
    weights, prompt, request, before = jax.tree.unflatten(structure, shapes)
    return device_memory.sizes_of(
        functools.partial(decoder.init, headroom=headroom), weights, prompt, request, before=before
    )


def prefill(prepared: Prepared) -> core.State:
    """Computes the state after prefill, in one dispatch. Raises ValueError if the generation would
    not fit in memory.
    """
    p = prepared
    check_fits(p)
    return start(p.decoder, p.weights, p.prompt, p.request, p.max_new_tokens, p.before)


def prefill_in_chunks(prepared: Prepared, report: Callable[[int], object]) -> core.State:
    """Computes the state after prefill by a loop on the host over chunks of the prompts, so that it
    can be watched.

    Each chunk goes on from the caches of the one before, as a chat does from turn to turn: two
    programs, for any number of chunks. Texts are the same as after `prefill`, whose chunks may have
    other borders, up to rounding.

    `goes_in_chunks` must be true, with one sample of each prompt. `report` is given the number of
    tokens of the longest prompt that have been read.
    """
    check_fits(prepared)
    p = prepared
    longest = int(jnp.max(prepared.prompt.length))
    # Every chunk is a slice of one width, or the program would be compiled again for the last. So a
    # chunk with another after it ends where a whole slice still fits the buffer. Slices overlap by
    # one token: the last one that was read is read again, see `core.Before`.
    latest_end = p.prompt.tokens.shape[1] - chunks.LONGEST + 1

    def chunk_end(full_end: int) -> int:
        """Returns the end of a chunk that would end at `full_end` as a whole slice."""
        is_last = full_end >= longest
        return full_end if is_last else min(full_end, latest_end)

    already_read = 0
    if p.before is not None:
        already_read = int(jnp.max(p.before.start))
    end = chunk_end(already_read + chunks.LONGEST)
    prompt = p.prompt._replace(length=jnp.minimum(p.prompt.length, end))
    state = start(p.decoder, p.weights, prompt, p.request, p.max_new_tokens, p.before)
    while end < longest:
        report(int(jax.device_get(jnp.max(state.start))))  # waits for the chunk
        before = state.caches.before(prompt.length, chunks.LONGEST)
        end = chunk_end(end + chunks.LONGEST - 1)
        prompt = p.prompt._replace(length=jnp.minimum(p.prompt.length, end))
        state = go_on(p.decoder, p.weights, prompt, p.request, p.max_new_tokens, before)
    report(longest)
    return state


def goes_in_chunks(prepared: Prepared) -> bool:
    """Says whether `prefill_in_chunks` can read the prompts: no encoder does, and the drafter goes
    on from caches.
    """
    p = prepared
    return p.target.lm.limits.start_token is None and (
        p.drafter is None or p.drafter.functions.resumes
    )


def iterate_rounds(
    prepared: Prepared, edit: Edit | None = None, begin: Begin = prefill
) -> Iterator[tuple[core.State, core.RoundInfo | None]]:
    """Yields the state after prefill (with None) and after each round, until all rows are done: the
    host's own loop.

    The next round consumes the state: its buffers become the new one's, so read what you need
    before you ask for more. `edit` changes a round's result before it is yielded and continued
    (stop strings do).
    """
    state = begin(prepared)
    info = None
    while True:
        if edit is not None:
            state, info = edit(state, info)
        done = state.done
        yield state, info
        if jax.device_get(jnp.all(done)):
            return
        state, info = advance(prepared.decoder, prepared.weights, state)


@programs.jit(static_argnames=("decoder", "max_new_tokens"))
def generation(
    decoder: core.Decoder,
    weights: core.Weights,
    prompt: core.Prompt,
    request: core.Request,
    max_new_tokens: int,
    before: core.Before | None = None,
) -> Outcome:
    """`run`, as a jitted function of arrays; decoder and max_new_tokens, the size of the output,
    are static.
    """
    state = start.function(decoder, weights, prompt, request, max_new_tokens, before)
    return _all_rounds(decoder, weights, state, max_new_tokens)[1]


@programs.jit(static_argnames=("decoder", "max_new_tokens"), donate_argnames=("state",))
def finish(
    decoder: core.Decoder, weights: core.Weights, state: core.State, max_new_tokens: int
) -> tuple[core.State, Outcome]:
    """Runs all rounds after prefill. The given state is consumed: the returned one takes its
    buffers.
    """
    return _all_rounds(decoder, weights, state, max_new_tokens)


def _all_rounds(
    decoder: core.Decoder, weights: core.Weights, state: core.State, max_new_tokens: int
) -> tuple[core.State, Outcome]:
    batch = state.done.shape[0]
    # a round commits at least one token of some row
    history = empty_history(decoder, (max_new_tokens, batch))

    def unfinished(carry) -> Bool[Array, ""]:
        return ~jnp.all(carry[1].done)

    def one_round(carry):
        index, state, history = carry
        state, info = decoder.step(weights, state)
        history = jax.tree.map(
            lambda h, i: jax.lax.dynamic_update_index_in_dim(h, i, index, 0), history, info
        )
        return index + 1, state, history

    _, state, history = jax.lax.while_loop(
        unfinished, one_round, (jnp.zeros((), jnp.int32), state, history)
    )
    trace = Trace(*jax.tree.map(lambda h: jnp.moveaxis(h, 0, 1), history))
    return state, outcome(state, trace, max_new_tokens)


def empty_history(decoder: core.Decoder, shape: tuple[int, int]) -> core.RoundInfo:
    """Makes the reports of rounds that are still to be run: zeros, with these axes in front."""
    count = jnp.zeros(shape, jnp.int32)
    nodes = jnp.zeros((*shape, decoder.nodes), jnp.int32)
    history = core.RoundInfo(nodes, count, count, count, count)
    if decoder.trees:
        history = history._replace(parent=nodes, path=nodes)
    if decoder.numbers:
        history = history._replace(
            numbers=core.TraceNumbers(
                *(jnp.zeros(nodes.shape, jnp.float32) for _ in core.TraceNumbers._fields)
            )
        )
    return history


def outcome(state: core.State, trace: Trace, max_new_tokens: int) -> Outcome:
    """Returns the tokens, counts and reasons of a finished state."""
    new = token_rows.window(state.tokens, state.start, max_new_tokens)
    length = state.length - state.start
    log_probs = state.memory.log_probs
    reported = None
    if log_probs is not None:
        reported = log_probs.window(0, max_new_tokens)
    return Outcome(new, length, state.failed, state.stats, trace, states.finish(state), reported)


@programs.jit(static_argnames=("decoder", "max_new_tokens"))
def start(
    decoder: core.Decoder,
    weights: core.Weights,
    prompt: core.Prompt,
    request: core.Request,
    max_new_tokens: int,
    before: core.Before | None = None,
) -> core.State:
    """`prefill`, as a jitted function of arrays."""
    return decoder.init(
        weights, prompt, request, token_rows.headroom(max_new_tokens, decoder.nodes), before
    )


# The caches given are consumed: their buffers become those of the state.
go_on = programs.jit(static_argnames=("decoder", "max_new_tokens"), donate_argnames=("before",))(
    start.function
)


@programs.jit(static_argnames=("decoder",), donate_argnames=("state",))
def advance(
    decoder: core.Decoder, weights: core.Weights, state: core.State
) -> tuple[core.State, core.RoundInfo]:
    """Runs one round. The state given is consumed: its buffers become the new state's."""
    return decoder.step(weights, state)
