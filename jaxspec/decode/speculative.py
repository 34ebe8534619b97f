"""Speculative decoding (Leviathan, Kalman, Matias, arXiv 2211.17192): draft, verify in one pass, accept, roll back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import buffers
from jaxspec import warp as warps
from jaxspec.base import (
    AcceptRule,
    Decoder,
    DecodeState,
    Drafter,
    Keys,
    LanguageModel,
    Law,
    Prompt,
    Request,
    RoundInfo,
    Warp,
    Weights,
)
from jaxspec.decode import rounds
from jaxspec.decode.autoregressive import autoregressive


@functools.cache
def speculative(target: LanguageModel, drafter: Drafter, accept: AcceptRule, warp: Warp, gamma: int) -> Decoder:
    """A decoder whose every round commits between 1 and gamma + 1 tokens per row, for one pass of the target.

    A round, for a row [a b c] (the cache holds a b) and gamma = 2:
        draft   x y            from the drafter
        verify  c x y          fed to the target: laws of what follows c, x and y
        accept  1, then t      by the rule: x is kept, y is not, t replaces it
        commit  [a b c x t]    and the cache is rewound to a b c x: one token behind, as before

    The law of the output is the target's if the rule is exact, whatever the drafter does. With gamma 0 this is plain
    decoding.

    Raises:
        ValueError: gamma is negative.
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}: expected 0 (plain decoding) or more guesses a round")
    if gamma == 0:
        return autoregressive(target, warp)

    def init(keys: Keys, weights: Weights, prompt: Prompt, request: Request, room: int) -> DecodeState:
        with jax.named_scope("prefill"):
            prefilled = target.prefill(weights.target, prompt, buffers.row_width(target, prompt) + room)
        law = warp(request.controls, prefilled[0].logits)
        state = rounds.begin(keys, target, prompt, request, room, prefilled, law)
        with jax.named_scope("draft"):
            return state._replace(drafter=drafter.init(weights.draft, prompt, room, prefilled[0]))

    def step(keys: Keys, weights: Weights, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        live, context = jnp.logical_not(state.done), Prompt(state.tokens, state.length)

        def to_law(logits: Float[Array, "B T W"]) -> Law:
            return warp(state.request.controls, warps.fit(logits, target.vocab_size))

        with jax.named_scope("draft"):
            draft, drafter_state = drafter.propose(keys, weights.draft, state.drafter, context, gamma, to_law)
        with jax.named_scope("target"):
            fed = jnp.concatenate([rounds.last_token(state), draft.tokens], axis=1)
            forward, cache = target.extend(weights.target, state.cache, fed)
        with jax.named_scope("accept"):
            verdict = accept(keys, state.length, draft, to_law(forward.logits))
        with jax.named_scope("commit"):
            new = rounds.verdict_tokens(draft, verdict)
            bad = rounds.not_finite(forward, verdict.num_accepted)
            state, kept = rounds.commit(state, new, verdict.num_accepted + 1, bad)
            state = state._replace(cache=target.rewind(cache, state.length - 1))
            after = Prompt(state.tokens, state.length)
            drafter_state = drafter.commit(weights.draft, drafter_state, after, verdict, forward)
        return rounds.count(state._replace(drafter=drafter_state), live, draft, verdict, kept)

    return Decoder(init, step, gamma)
