"""Plain decoding: one pass of the target per token. The baseline, and what gamma = 0 means."""

from __future__ import annotations

import functools

import jax

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.decode import state as states


def autoregressive(
    target: core.LanguageModel, sampler: core.Sampler, top_log_probs: int | None = None
) -> core.Decoder:
    """A decoder that draws each token from the target's own distribution.

    The token at a position is drawn with that position's key, so it depends on the key, the row and
    the position alone. `top_log_probs` is that of `speculative`.
    """
    return _autoregressive(target, sampler, top_log_probs)


# Decoders that are the same object share programs, so equal arguments give the same object.
@functools.lru_cache
def _autoregressive(
    target: core.LanguageModel, sampler: core.Sampler, top_log_probs: int | None
) -> core.Decoder:
    followed_by = states.followers(sampler, target.vocab_size, top_log_probs)

    def init(
        weights: core.Weights,
        prompt: core.Prompt,
        request: core.Request,
        headroom: int,
        before: core.Before | None = None,
        spare: int = 0,
    ) -> core.State:
        with jax.named_scope("prefill"):
            room = token_rows.room(target, prompt, headroom, 0, spare)
            prefilled = states.read_prompt(
                target, weights.target, prompt, room, states.of_each(before, prompt)
            )
        prompt, prefilled = token_rows.repeat_rows(
            (prompt, prefilled), states.samples(prompt, request)
        )
        return states.init_state(target, prompt, request, headroom, prefilled, sampler, followed_by)

    def step(weights: core.Weights, state: core.State) -> tuple[core.State, core.RoundInfo]:
        with jax.named_scope("target"):
            forward, cache = target.extend(
                weights.target, state.caches.target, states.last_token(state)
            )
        result = states.own_token(state, forward, cache, sampler)
        state, info = states.end_round(state, result, followed_by, target.vocab_size)
        # A finished row was fed, too: rewinding takes that back, and leaves the others one token
        # behind.
        cache = target.rewind(cache, state.length - 1)
        return state._replace(caches=result.caches._replace(target=cache)), info

    return core.Decoder(init, step)
