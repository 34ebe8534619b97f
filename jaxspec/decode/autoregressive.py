"""Plain decoding: one pass of the target per token. The baseline, and what gamma = 0 means."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.core.round import unusable
from jaxspec.decode import log_probs
from jaxspec.decode import state as states


def autoregressive(target: core.LanguageModel, sampler: core.Sampler, top_log_probs: int | None = None) -> core.Decoder:
    """A decoder that draws each token from the target's own distribution.

    The token at a position is drawn with that position's key, so it depends on the key, the row and the position alone.
    `top_log_probs` is that of `speculative`.
    """
    return _autoregressive(target, sampler, top_log_probs)


@functools.lru_cache  # of all arguments, given or not: programs are shared by decoders that are the same object
def _autoregressive(target: core.LanguageModel, sampler: core.Sampler, top_log_probs: int | None) -> core.Decoder:
    def init(
        weights: core.Weights,
        prompt: core.Prompt,
        request: core.Request,
        headroom: int,
        before: core.Before | None = None,
    ) -> core.State:
        with jax.named_scope("prefill"):
            prefilled = states.read_prompt(target, weights.target, prompt, headroom, states.of_each(before, prompt))
        prompt, prefilled = token_rows.repeat_rows((prompt, prefilled), states.samples(prompt, request))
        return states.init_state(target, prompt, request, headroom, prefilled, sampler, top_log_probs)

    def step(weights: core.Weights, state: core.State) -> tuple[core.State, core.RoundInfo]:
        live, empty = jnp.logical_not(state.done), states.empty_draft(state.length)
        with jax.named_scope("target"):
            forward, cache = target.extend(weights.target, state.caches.target, states.last_token(state))
        distribution = sampler(state.request.sampling_params, forward.logits, states.prefix(state))
        verdict = core.Verdict(empty.length, states.sample(state, distribution), empty.length)
        bad = unusable(forward, distribution)[:, 0]
        new = verdict.next_token[:, None]
        state, committed = states.commit(state, new, empty.length + 1, bad)
        state = log_probs.record(state, committed, new, forward, distribution)
        state = state._replace(caches=state.caches._replace(target=target.rewind(cache, state.length - 1)))
        return states.update_stats(state, live, empty, verdict, committed)

    return core.Decoder(init, step)
