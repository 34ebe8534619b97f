"""What every decoder does around its passes: starts rows, commits tokens, ends rows, counts."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec import buffers, noise
from jaxspec.base import (
    Budget,
    Cache,
    DecodeState,
    Draft,
    Forward,
    Keys,
    LanguageModel,
    Law,
    Policy,
    Prefix,
    Prompt,
    Request,
    RoundInfo,
    Stats,
    Verdict,
    Warp,
)


def begin(
    keys: Keys,
    lm: LanguageModel,
    prompt: Prompt,
    request: Request,
    room: int,
    prefilled: tuple[Forward, Cache],
    warp: Warp,
) -> DecodeState:
    """The state after prefill: every row with its first new token, drawn from prefill's own logits.

    Row of a decoder-only model: before [p1 p2 p3 . . .], after [p1 p2 p3 t1 . .]; of an encoder-decoder: [start t1].
    """
    forward, cache = prefilled
    row, start = first_row(lm, prompt)
    zero = jnp.zeros_like(start)
    state = DecodeState(
        tokens=jnp.pad(row, ((0, 0), (0, room))),
        length=start,
        cache=cache,
        drafter=None,
        policy=None,
        start=start,
        request=request,
        done=zero > 0,
        failed=zero > 0,
        stats=Stats(zero, zero, zero, zero),
    )
    law = warp(request.controls, forward.logits, prefix(state))
    return commit(state, sample(keys, start, law)[:, None], zero + 1, hopeless(forward, law, zero))[0]


def first_row(lm: LanguageModel, prompt: Prompt) -> Prompt:
    """What the decoder side has read after prefill: the prompt, or an encoder-decoder's start token."""
    if lm.start_token is None:
        return prompt
    return Prompt(jnp.full((prompt.tokens.shape[0], 1), lm.start_token, jnp.int32), jnp.ones_like(prompt.length))


def prefix(state: DecodeState) -> Prefix:
    """What precedes the next token: the committed row."""
    return Prefix(Prompt(state.tokens, state.length), state.start)


def sample(keys: Keys, position: Int[Array, " B"], law: Law) -> Int[Array, " B"]:
    """The token that plain sampling puts at a position."""
    if law.tokens is not None:
        return law.tokens[:, 0]
    assert law.log_probs is not None
    return noise.categorical(noise.at(keys, position, noise.Purpose.TOKEN), law.log_probs[:, 0])


def not_finite(forward: Forward, last: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows whose logits hold NaN or +inf, or nothing but -inf, at any position up to `last`.

    What the target says behind a rejected guess is nobody's business.
    """
    slot = jnp.arange(forward.logits.shape[1], dtype=last.dtype)[None, :]
    bad = jnp.logical_not(jnp.isfinite(jnp.max(forward.logits, axis=-1)))
    return jnp.any(jnp.logical_and(bad, slot <= last[:, None]), axis=-1)


def no_token(law: Law, last: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows whose law allows no token at all at some position up to `last`: bans, and what the model rules out.

    >>> no_token(Law(tokens=jnp.array([[3, -1], [3, -1]])), jnp.array([0, 1])).tolist()
    [False, True]
    """
    if law.tokens is not None:
        bad = law.tokens < 0
    else:
        assert law.log_probs is not None
        bad = jnp.isnan(law.log_probs[..., 0])  # normalising nothing makes every entry NaN
    slot = jnp.arange(bad.shape[1], dtype=last.dtype)[None, :]
    return jnp.any(jnp.logical_and(bad, slot <= last[:, None]), axis=-1)


def hopeless(forward: Forward, law: Law, last: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Rows that cannot go on: what the target says, or what the warp leaves of it, is no law."""
    return jnp.logical_or(not_finite(forward, last), no_token(law, last))


def budget(policy: Policy, state: DecodeState, gamma: int) -> Budget:
    """How many guesses each row may make: as its policy says, but none in vain."""
    values, memory = state.request.policy, state.policy
    limit = jnp.clip(policy.limit(values, memory, gamma), 0, jnp.minimum(useful(state), gamma))
    limit = limit.astype(state.length.dtype)
    if policy.go_on is None:
        return Budget(limit)
    return Budget(limit, policy.signal, functools.partial(policy.go_on, values, memory))


def useful(state: DecodeState) -> Int[Array, " B"]:
    """How many guesses can save a row a pass: as many as it may still say, but for the token that any pass yields.

    A row that has said 6 tokens of 9 is done after 2 kept guesses. More would never be emitted, and to count them
    would say something about the limit, not about the drafter. A finished row has use for none.
    """
    left = state.request.limit - (state.length - state.start)
    return jnp.where(state.done, 0, jnp.maximum(left - 1, 0))


def sayable(draft: Draft, vocab: int) -> Draft:
    """The draft up to its first guess that is no token of the target; what is fed is one in any case.

    Such a guess (of a datastore or a tokenizer with more ids) has probability 0, so it could not have been kept.

    >>> cut = sayable(Draft(jnp.array([[3, 9, 4]]), None, jnp.array([3])), vocab=5)
    >>> cut.tokens.tolist(), cut.length.tolist()
    ([[3, 4, 4]], [1])
    """
    known = jnp.logical_and(draft.tokens >= 0, draft.tokens < vocab)
    run = jnp.sum(jnp.cumprod(known.astype(draft.length.dtype), axis=1), axis=1).astype(draft.length.dtype)
    return draft._replace(tokens=jnp.clip(draft.tokens, 0, vocab - 1), length=jnp.minimum(draft.length, run))


def verdict_tokens(draft: Draft, verdict: Verdict) -> Int[Array, "B step"]:
    """The kept guesses and the token after them: guesses [x y z], 1 kept, next t: [x t . .]."""
    slot = jnp.arange(draft.tokens.shape[1] + 1, dtype=verdict.num_accepted.dtype)[None, :]
    guesses = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    return jnp.where(slot < verdict.num_accepted[:, None], guesses, verdict.next_token[:, None])


def commit(
    state: DecodeState, new: Int[Array, "B step"], count: Int[Array, " B"], bad: Bool[Array, " B"]
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Appends up to `count` of the new tokens of each live row, ends rows, and says how many tokens were kept.

    A row ends behind its first end token or at its limit; a `bad` row ends with nothing and is marked as failed.
    """
    request, live = state.request, jnp.logical_not(state.done)
    room = request.limit - (state.length - state.start)
    kept, ended = buffers.count_kept(new, count, room, request.eos)
    kept = jnp.where(jnp.logical_and(live, jnp.logical_not(bad)), kept, 0)
    failed = jnp.logical_or(state.failed, jnp.logical_and(live, bad))
    state = state._replace(
        tokens=buffers.append(state.tokens, state.length, new),
        length=state.length + kept,
        done=jnp.logical_or(jnp.logical_or(state.done, ended), failed),
        failed=failed,
        stats=state.stats._replace(emitted=state.stats.emitted + kept),
    )
    return state, kept


def count(state: DecodeState, live: Bool[Array, " B"], draft: Draft, verdict: Verdict, kept: Int[Array, " B"]):
    """Adds one round to the statistics of the rows that were live in it, and reports it."""
    drafted = jnp.where(live, draft.length, 0)
    accepted = jnp.where(live, verdict.num_accepted, 0)
    stats = state.stats._replace(
        rounds=state.stats.rounds + live.astype(jnp.int32),
        drafted=state.stats.drafted + drafted,
        accepted=state.stats.accepted + jnp.minimum(accepted, kept),
    )
    return state._replace(stats=stats), RoundInfo(draft.tokens, drafted, accepted, kept)


def last_token(state: DecodeState) -> Int[Array, "B 1"]:
    """The last committed token of each row: the first to be fed."""
    return buffers.window(state.tokens, state.length - 1, 1)


def no_draft(length: Int[Array, " B"]) -> Draft:
    """A draft of no tokens."""
    return Draft(jnp.zeros((length.shape[0], 0), jnp.int32), None, jnp.zeros_like(length))
