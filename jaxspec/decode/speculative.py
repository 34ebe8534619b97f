"""Speculative decoding (Leviathan, Kalman, Matias, arXiv 2211.17192): draft, verify in one pass, accept, roll back."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import buffers
from jaxspec import warp as warps
from jaxspec.base import (
    AcceptRule,
    Cache,
    Decoder,
    DecodeState,
    Drafter,
    Keys,
    LanguageModel,
    Law,
    Policy,
    Prefix,
    Prompt,
    Request,
    RoundInfo,
    Warp,
    Weights,
)
from jaxspec.decode import rounds
from jaxspec.decode.autoregressive import autoregressive
from jaxspec.decode.verify import Read, verify, widths


@functools.cache
def speculative(
    target: LanguageModel,
    drafter: Drafter,
    accept: AcceptRule,
    warp: Warp,
    gamma: int,
    policy: Policy | None = None,
) -> Decoder:
    """A decoder whose every round commits between 1 and gamma + 1 tokens per row, for one pass of the target.

    A round, for a row [a b c] (the cache holds a b) and gamma = 2:
        draft   x y            from the drafter
        verify  c x y          fed to the target: laws of what follows c, x and y
        accept  1, then t      by the rule: x is kept, y is not, t replaces it
        commit  [a b c x t]    and the cache is rewound to a b c x: one token behind, as before

    The law of the output is the target's if the rule is exact, whatever the drafter does. With gamma 0 this is plain
    decoding.

    With a policy gamma is the most guesses of a round, and the policy says how many each row makes. The drafter stops
    where no row goes on, and the target reads no more than a little beyond the longest draft (`verify.widths`).

    Raises:
        ValueError: gamma is negative.
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}: expected 0 (plain decoding) or more guesses a round")
    if gamma == 0:
        return autoregressive(target, warp)
    choices = widths(gamma, policy is not None, drafter.abstains)

    def init(keys: Keys, weights: Weights, prompt: Prompt, request: Request, room: int) -> DecodeState:
        with jax.named_scope("prefill"):
            prefilled = target.prefill(weights.target, prompt, buffers.row_width(target, prompt) + room)
        state = rounds.begin(keys, target, prompt, request, room, prefilled, warp)
        if policy is not None:
            state = state._replace(policy=policy.init(request.policy, prompt))
        with jax.named_scope("draft"):
            return state._replace(drafter=drafter.init(weights.draft, prompt, room, prefilled[0]))

    def step(keys: Keys, weights: Weights, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        live, context = jnp.logical_not(state.done), Prompt(state.tokens, state.length)

        def to_law(
            controls: Any,
            logits: Float[Array, "B T W"],
            guesses: Int[Array, "B F"] | None = None,
            seen: Bool[Array, "T F"] | None = None,
        ) -> Law:
            prefix = Prefix(context, state.start, guesses, seen)
            return warp(controls, warps.fit(logits, target.vocab_size), prefix)

        controls, own = state.request.controls, state.request.draft_controls
        draft_law = functools.partial(to_law, controls if own is None else own)
        budget = None if policy is None else rounds.budget(policy, state, gamma)
        with jax.named_scope("draft"):
            draft, drafter_state = drafter.propose(
                keys, weights.draft, state.drafter, context, gamma, draft_law, budget
            )
            draft = rounds.sayable(draft, target.vocab_size)
            most = rounds.useful(state) if budget is None else budget.limit
            draft = draft._replace(length=jnp.minimum(draft.length, most))
        fed = jnp.concatenate([rounds.last_token(state), draft.tokens], axis=1)

        def read(width: int, cache: Cache) -> Read:
            forward, cache = target.extend(weights.target, cache, fed[:, :width])
            guesses = (draft.tokens[:, : width - 1], jnp.tri(width, width - 1, -1, bool)) if width > 1 else ()
            return Read(forward, cache, to_law(controls, forward.logits, *guesses))

        with jax.named_scope("target"):
            longest = jnp.max(jnp.where(live, draft.length, 0))
            forward, cache, law = verify(read, state.cache, longest, choices)
        with jax.named_scope("accept"):
            verdict = accept(keys, state.length, draft, law)
        with jax.named_scope("commit"):
            new = rounds.verdict_tokens(draft, verdict)
            bad = rounds.hopeless(forward, law, verdict.num_accepted)
            state, kept = rounds.commit(state, new, verdict.num_accepted + 1, bad)
            state = state._replace(cache=target.rewind(cache, state.length - 1))
            after = Prompt(state.tokens, state.length)
            drafter_state = drafter.commit(weights.draft, drafter_state, after, verdict, forward)
            if policy is not None:
                told = policy.update(state.request.policy, state.policy, draft, verdict, kept)
                state = state._replace(policy=told)
        return rounds.count(state._replace(drafter=drafter_state), live, draft, verdict, kept)

    return Decoder(init, step, gamma)
