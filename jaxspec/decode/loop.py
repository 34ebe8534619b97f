"""Running a decoder: whole generations as one jitted program, or round by round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core import (
    Before,
    Decoder,
    LogProbs,
    Prompt,
    Request,
    RoundInfo,
    State,
    Stats,
    Weights,
    programs,
    token_rows,
)
from jaxspec.decode import log_probs
from jaxspec.decode import state as states
from jaxspec.decode.request import Prepared


class Trace(NamedTuple):
    """The draft and the committed tokens of every round.

    Rows are padded with rounds in which they were finished: all counts are 0 there.

    The fields are `core.RoundInfo`'s, with an axis for the rounds; parent and path are None for chains.
    """

    draft: Int[Array, "batch rounds node"]
    draft_length: Int[Array, "batch rounds"]
    num_accepted: Int[Array, "batch rounds"]
    num_committed: Int[Array, "batch rounds"]
    num_tested: Int[Array, "batch rounds"]
    parent: Int[Array, "batch rounds node"] | None = None
    path: Int[Array, "batch rounds node"] | None = None


class Outcome(NamedTuple):
    """The result of a whole generation, as it leaves the device.

    Attributes:
        tokens, length: the new tokens of each row, padded, and how many are real.
        failed: why a row ended early, a `core.Failure`; 0 for none.
        stats, trace: counts, and the rounds they are of.
        finish: why each row ended, a `core.Finish`.
        log_probs: of the new tokens; None unless they were asked for.
    """

    tokens: Int[Array, "batch new"]
    length: Int[Array, " batch"]
    failed: Int[Array, " batch"]
    stats: Stats
    trace: Trace
    finish: Int[Array, " batch"]
    log_probs: LogProbs | None = None


Edit = Callable[[State, RoundInfo | None], tuple[State, RoundInfo | None]]


def run(prepared: Prepared) -> Outcome:
    """Prefill to the last token of the longest row, in one dispatch."""
    p = prepared
    return generation(p.decoder, p.weights, p.prompt, p.request, p.max_new_tokens, p.before)


def iterate_rounds(prepared: Prepared, edit: Edit | None = None) -> Iterator[tuple[State, RoundInfo | None]]:
    """The state after prefill (with None) and after each round, until all rows are done: the host's own loop.

    Args:
        prepared: what to run.
        edit: changes what a round has made, before it is yielded and gone on with (stop strings do).

    Yields:
        The state and what happened in the round. The next round consumes the state: its buffers become the new one's,
        so read what you need before you ask for more.
    """
    p, info = prepared, None
    state = start(p.decoder, p.weights, p.prompt, p.request, p.max_new_tokens, p.before)
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
    decoder: Decoder,
    weights: Weights,
    prompt: Prompt,
    request: Request,
    max_new_tokens: int,
    before: Before | None = None,
) -> Outcome:
    """`run`, as a jitted function of arrays; decoder and max_new_tokens, the size of the output, are static."""
    state = decoder.init(weights, prompt, request, token_rows.headroom(max_new_tokens, decoder.nodes), before)
    batch = request.max_new_tokens.shape[0]
    count = jnp.zeros((max_new_tokens, batch), jnp.int32)  # a round commits at least one token of some row
    nodes = jnp.zeros((max_new_tokens, batch, decoder.nodes), jnp.int32)
    history = RoundInfo(nodes, count, count, count, count, *((nodes, nodes) if decoder.trees else ()))

    def unfinished(carry) -> Bool[Array, ""]:
        return jnp.logical_not(jnp.all(carry[1].done))

    def one_round(carry):
        index, state, history = carry
        state, info = decoder.step(weights, state)
        history = jax.tree.map(lambda h, i: jax.lax.dynamic_update_index_in_dim(h, i, index, 0), history, info)
        return index + 1, state, history

    _, state, history = jax.lax.while_loop(unfinished, one_round, (jnp.zeros((), jnp.int32), state, history))
    trace = Trace(*jax.tree.map(lambda h: jnp.moveaxis(h, 0, 1), history))
    return outcome(state, trace, max_new_tokens)


def outcome(state: State, trace: Trace, max_new_tokens: int) -> Outcome:
    """Returns the tokens, counts and reasons of a finished state."""
    new = token_rows.window(state.tokens, state.start, max_new_tokens)
    reported = log_probs.window(state.log_probs, 0, max_new_tokens)
    length = state.length - state.start
    return Outcome(new, length, state.failed, state.stats, trace, states.finish(state), reported)


@programs.jit(static_argnames=("decoder", "max_new_tokens"))
def start(
    decoder: Decoder,
    weights: Weights,
    prompt: Prompt,
    request: Request,
    max_new_tokens: int,
    before: Before | None = None,
) -> State:
    """The state after prefill."""
    return decoder.init(weights, prompt, request, token_rows.headroom(max_new_tokens, decoder.nodes), before)


@programs.jit(static_argnames=("decoder",), donate_argnames=("state",))
def advance(decoder: Decoder, weights: Weights, state: State) -> tuple[State, RoundInfo]:
    """Runs one round. The state given is consumed: its buffers become the new state's."""
    return decoder.step(weights, state)
