"""Plain decoding: one pass of the target per token. The baseline, and what gamma = 0 means."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspec import buffers
from jaxspec.base import (
    Decoder,
    DecodeState,
    Keys,
    LanguageModel,
    Prompt,
    Request,
    RoundInfo,
    Verdict,
    Warp,
    Weights,
)
from jaxspec.decode import rounds


@functools.cache
def autoregressive(target: LanguageModel, warp: Warp) -> Decoder:
    """A decoder that draws each token from the target's own law.

    The token at a position is drawn with that position's key, so it depends on the key, the row and the position alone.
    """

    def init(keys: Keys, weights: Weights, prompt: Prompt, request: Request, room: int) -> DecodeState:
        with jax.named_scope("prefill"):
            prefilled = target.prefill(weights.target, prompt, buffers.row_width(target, prompt) + room)
        return rounds.begin(keys, target, prompt, request, room, prefilled, warp)

    def step(keys: Keys, weights: Weights, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        live, empty = jnp.logical_not(state.done), rounds.no_draft(state.length)
        with jax.named_scope("target"):
            forward, cache = target.extend(weights.target, state.cache, rounds.last_token(state))
        law = warp(state.request.controls, forward.logits, rounds.prefix(state))
        token = rounds.sample(keys, state.length, law)
        verdict, bad = Verdict(empty.length, token), rounds.hopeless(forward, law, empty.length)
        state, kept = rounds.commit(state, token[:, None], empty.length + 1, bad)
        state = state._replace(cache=target.rewind(cache, state.length - 1))
        return rounds.count(state, live, empty, verdict, kept)

    return Decoder(init, step, gamma=0)
