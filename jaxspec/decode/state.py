"""The work of every decoder around its passes: start rows, commit tokens, end rows, count."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.core import (
    Before,
    Cache,
    Caches,
    Distribution,
    Draft,
    DraftContext,
    Finish,
    Forward,
    LanguageModel,
    Params,
    Policy,
    Prefix,
    Prompt,
    Request,
    RoundInfo,
    Sampler,
    State,
    Stats,
    ToDistribution,
    Verdict,
    chunks,
    noise,
    token_rows,
    tree,
)
from jaxspec.core.round import unusable
from jaxspec.decode import log_probs


def read_prompt(
    lm: LanguageModel, params: Params, prompt: Prompt, headroom: int, before: Before | None
) -> tuple[Forward, Cache]:
    """Reads the prompts, or what they have after what was read `before`; see `core.Prefill`."""
    capacity = token_rows.prefill_length(lm, prompt) + headroom
    if before is None:
        return lm.prefill(params, prompt, capacity)
    return chunks.resume(lm, params, before.of(before.state.target), prompt, capacity)


def of_each(before: Before | None, prompt: Prompt) -> Before | None:
    """Returns what was read before for each row, where all of them share it."""
    if before is None or before.start.shape == prompt.length.shape:
        return before
    state, start = token_rows.repeat_rows((before.state, before.start), prompt.length.shape[0])
    return Before(state, start, before.width)


def init_state(
    lm: LanguageModel,
    prompt: Prompt,
    request: Request,
    headroom: int,
    prefilled: tuple[Forward, Cache],
    sampler: Sampler,
    top_log_probs: int | None,
) -> State:
    """The state after prefill: every row with its first new token, drawn from prefill's own logits.

    Row of a decoder-only model: before [p1 p2 p3 . . .], after [p1 p2 p3 t1 . .]; of an encoder-decoder: [start t1].
    With `top_log_probs` it has buffers for log probabilities, which `log_probs.record` fills.
    """
    forward, cache = prefilled
    row = token_rows.decoder_prompt(lm, prompt)
    zero = jnp.zeros_like(row.length)
    state = State(
        tokens=jnp.pad(row.tokens, ((0, 0), (0, headroom))),
        length=row.length,
        caches=Caches(cache),
        memory=(),
        start=row.length,
        request=request,
        done=zero > 0,
        failed=jnp.zeros_like(zero, jnp.int32),
        stats=Stats(zero, zero, zero, zero),
        log_probs=None if top_log_probs is None else log_probs.empty(len(zero), headroom, top_log_probs),
    )
    distribution = sampler(request.sampling_params, forward.logits, prefix(state))
    bad = unusable(forward, distribution)[:, 0]
    first = sample(state, distribution)[:, None]
    state, committed = commit(state, first, zero + 1, bad)
    return log_probs.record(state, committed, first, forward, distribution)


def samples(prompt: Prompt, request: Request) -> int:
    """Counts the rows of a request that continue each prompt: they lie one after the other, and share its prefill."""
    return request.max_new_tokens.shape[0] // prompt.length.shape[0]


def prefix(state: State) -> Prefix:
    """Returns what precedes the next token: the committed row."""
    return Prefix(Prompt(state.tokens, state.length), state.start)


def sample(state: State, distribution: Distribution) -> Int[Array, " B"]:
    """The token that plain sampling puts at each row's end."""
    if distribution.tokens is not None:
        return distribution.tokens[:, 0]
    assert distribution.log_probs is not None
    at = noise.at(state.request.keys, state.length, noise.Purpose.TOKEN)
    return noise.categorical(at, distribution.log_probs[:, 0])


def is_impossible(draft: Draft, verdict: Verdict, vocab: int) -> Bool[Array, " B"]:
    """Rows in which a rule accepted more tokens than were drafted, or fewer than none, or chose what is no token.

    >>> draft, one = Draft(jnp.array([[3, 4]]), jnp.array([1])), jnp.array([1])
    >>> [is_impossible(draft, Verdict(jnp.array([n]), one, one), vocab=5).tolist() for n in (0, 1, 2)]
    [[False], [False], [True]]
    """
    accepted, token = verdict.num_accepted, verdict.next_token
    count = jnp.logical_or(accepted < 0, accepted > draft.length)
    return jnp.logical_or(count, jnp.logical_or(token < 0, token >= vocab))


def draft_context(policy: Policy | None, state: State, gamma: int, to_distribution: ToDistribution) -> DraftContext:
    """The drafter's context of a round: limits as the policy decides, but no draft token that could not be emitted."""
    values, memory = state.request.policy, state.memory
    limit = jnp.minimum(max_useful_draft(state), gamma)
    context = DraftContext(
        state.request.keys,
        Prompt(state.tokens, state.length),
        limit.astype(state.length.dtype),
        gamma,
        adaptive=policy is not None,
        to_distribution=to_distribution,
        finished=state.done,
    )
    if policy is None:
        return context
    chosen = jnp.clip(policy.max_draft(values, memory, gamma, tokens_left(state)), 0, limit)
    context = context._replace(max_draft=chosen.astype(state.length.dtype))
    if policy.should_continue is None:
        return context
    should_continue = functools.partial(policy.should_continue, values, memory)
    return context._replace(confidence=policy.confidence, should_continue=should_continue)


def max_useful_draft(state: State) -> Int[Array, " B"]:
    """Counts the draft tokens that can save a row a pass: one fewer than it may still generate.

    A row with 6 tokens of 9 is done after 2 accepted ones. More would never be emitted, and counting them would
    describe the limit, not the drafter. A finished row has use for none.
    """
    return jnp.maximum(tokens_left(state) - 1, 0)


def tokens_left(state: State) -> Int[Array, " B"]:
    """Counts the new tokens that each row may still get; 0 for one that has ended."""
    return jnp.where(state.done, 0, state.request.max_new_tokens - (state.length - state.start))


def commit(
    state: State, new: Int[Array, "B step"], count: Int[Array, " B"], bad: Bool[Array, " B"] | Int[Array, " B"]
) -> tuple[State, Int[Array, " B"]]:
    """Appends up to `count` of the new tokens of each live row, ends rows, and counts the tokens committed.

    A row ends after its first end token or at its limit; a `bad` row (a `Failure`, or True for its first kind) ends
    with nothing and is marked as failed.
    """
    request, live = state.request, jnp.logical_not(state.done)
    new_failure = jnp.where(live, bad.astype(state.failed.dtype), 0)
    left = request.max_new_tokens - (state.length - state.start)
    committed, ended = token_rows.num_to_commit(new, count, left, request.eos)
    committed = jnp.where(jnp.logical_and(live, new_failure == 0), committed, 0)
    failed = jnp.maximum(state.failed, new_failure)
    state = state._replace(
        tokens=token_rows.append(state.tokens, state.length, new),
        length=state.length + committed,
        done=jnp.logical_or(jnp.logical_or(state.done, ended), failed > 0),
        failed=failed,
        stats=state.stats._replace(emitted=state.stats.emitted + committed),
    )
    return state, committed


def finish(state: State) -> Int[Array, " B"]:
    """Says why each row ended, a `core.Finish`; 0 for a row that has not.

    A row that ended for no reason that can be seen here was ended by a stop string (`loop.Edit`).
    """
    last = token_rows.tokens_at(state.tokens, state.length - 1)
    is_end = jnp.any(last[:, None] == state.request.eos, axis=1)
    at_limit = state.length - state.start >= state.request.max_new_tokens
    reason = jnp.where(is_end, int(Finish.EOS), jnp.where(at_limit, int(Finish.LENGTH), int(Finish.STOP)))
    return jnp.where(state.done, jnp.where(state.failed > 0, int(Finish.FAILURE), reason), 0).astype(jnp.int32)


def update_stats(
    state: State, live: Bool[Array, " B"], draft: Draft, verdict: Verdict, committed: Int[Array, " B"]
) -> tuple[State, RoundInfo]:
    """Adds one round to the statistics of the rows that were live in it, and reports it."""
    drafted = draft.length
    if draft.parent is not None:
        drafted = jnp.sum(tree.in_tree(draft.parent), axis=1, dtype=draft.length.dtype)
    drafted, accepted, tested = (jnp.where(live, x, 0) for x in (drafted, verdict.num_accepted, verdict.num_tested))
    stats = state.stats._replace(
        rounds=state.stats.rounds + live.astype(jnp.int32),
        drafted=state.stats.drafted + drafted,
        accepted=state.stats.accepted + jnp.minimum(accepted, committed),
    )
    info = RoundInfo(draft.tokens, drafted, accepted, committed, tested, draft.parent, verdict.path)
    return state._replace(stats=stats), info


def last_token(state: State) -> Int[Array, "B 1"]:
    """The last committed token of each row: the first to be fed."""
    return token_rows.window(state.tokens, state.length - 1, 1)


def empty_draft(length: Int[Array, " B"]) -> Draft:
    """A draft of no tokens."""
    return Draft(jnp.zeros((length.shape[0], 0), jnp.int32), jnp.zeros_like(length))
