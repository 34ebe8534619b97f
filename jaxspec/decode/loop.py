"""Running a decoder: whole generations as one jitted program, or round by round."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec import buffers
from jaxspec.base import Decoder, DecodeState, Keys, Prompt, Request, RoundInfo, Stats, Weights


class Trace(NamedTuple):
    """What every round drafted and kept; rows are padded with rounds in which they were finished (kept is 0)."""

    draft: Int[Array, "batch rounds gamma"]
    draft_length: Int[Array, "batch rounds"]
    num_accepted: Int[Array, "batch rounds"]
    kept: Int[Array, "batch rounds"]


class Outcome(NamedTuple):
    """The result of a whole generation, as it leaves the device.

    Attributes:
        tokens, length: the new tokens of each row, padded, and how many are real.
        failed: rows that ended because the target's logits were not finite, or no token was allowed.
        stats, trace: counts, and the rounds behind them.
    """

    tokens: Int[Array, "batch new"]
    length: Int[Array, " batch"]
    failed: Bool[Array, " batch"]
    stats: Stats
    trace: Trace


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def run(
    decoder: Decoder, keys: Keys, weights: Weights, prompt: Prompt, request: Request, max_new_tokens: int
) -> Outcome:
    """Prefill to the last token of the longest row, in one dispatch.

    Args:
        decoder: how to generate (static).
        keys: one key per row.
        weights: parameters of target and drafter.
        prompt: right-padded prompts [batch, prompt].
        request: limits, end tokens and the warp's controls; every limit is at most max_new_tokens.
        max_new_tokens: size of the output (static).
    """
    state = decoder.init(keys, weights, prompt, request, buffers.room(max_new_tokens, decoder.gamma))
    batch = prompt.tokens.shape[0]
    many = jnp.zeros((max_new_tokens, batch), jnp.int32)  # a round commits at least one token of some row
    history = RoundInfo(jnp.zeros((max_new_tokens, batch, decoder.gamma), jnp.int32), many, many, many)

    def unfinished(carry) -> Bool[Array, ""]:
        return jnp.logical_not(jnp.all(carry[1].done))

    def one_round(carry):
        index, state, history = carry
        state, info = decoder.step(keys, weights, state)
        history = jax.tree.map(lambda h, i: jax.lax.dynamic_update_index_in_dim(h, i, index, 0), history, info)
        return index + 1, state, history

    _, state, history = jax.lax.while_loop(unfinished, one_round, (jnp.zeros((), jnp.int32), state, history))
    trace = Trace(*jax.tree.map(lambda h: jnp.moveaxis(h, 0, 1), history))
    length = state.length - state.start
    return Outcome(buffers.window(state.tokens, state.start, max_new_tokens), length, state.failed, state.stats, trace)


@functools.partial(jax.jit, static_argnames=("decoder", "max_new_tokens"))
def start(
    decoder: Decoder, keys: Keys, weights: Weights, prompt: Prompt, request: Request, max_new_tokens: int
) -> DecodeState:
    """The state after prefill, for a loop on the host; see `run` for the arguments."""
    return decoder.init(keys, weights, prompt, request, buffers.room(max_new_tokens, decoder.gamma))


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def advance(decoder: Decoder, keys: Keys, weights: Weights, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
    """One round. The state given is consumed: its buffers become the new state's."""
    return decoder.step(keys, weights, state)
