"""The work of every decoder around its passes: start rows, commit tokens, end rows, count, tell
followers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core, sampling
from jaxspec.core import chunks, noise, token_rows, tree
from jaxspec.core.round import fed_on_path, unusable
from jaxspec.decode import log_probs
from jaxspec.sampling import samplers


def read_prompt(
    lm: core.LanguageModel,
    params: core.Params,
    prompt: core.Prompt,
    room: core.Room,
    before: core.Before | None,
) -> tuple[core.Forward, core.Cache]:
    """Reads the prompts, or their tokens after those that were read `before`; see
    `core.Prefill`.
    """
    if before is None:
        return lm.prefill(params, prompt, room)
    return chunks.resume(lm, params, before.of(before.state.target), prompt, room)


def of_each(before: core.Before | None, prompt: core.Prompt) -> core.Before | None:
    """Repeats the caches of a shared beginning for each row."""
    if before is None or before.start.shape == prompt.length.shape:
        return before
    state, start = token_rows.repeat_rows((before.state, before.start), prompt.length.shape[0])
    return core.Before(state, start, before.width)


def init_state(
    lm: core.LanguageModel,
    prompt: core.Prompt,
    request: core.Request,
    headroom: int,
    prefilled: tuple[core.Forward, core.Cache],
    sampler: core.Sampler,
    followers: Followers,
) -> core.State:
    """The state after prefill: every row with its first new token, drawn from prefill's own logits.

    Row of a decoder-only model: before [p1 p2 p3 . . .], after [p1 p2 p3 t1 . .]; of an
    encoder-decoder: [start t1].
    """
    forward, cache = prefilled
    row = token_rows.decoder_prompt(lm, prompt)
    zero = jnp.zeros_like(row.length)
    state = core.State(
        tokens=jnp.pad(row.tokens, ((0, 0), (0, headroom))),
        length=row.length,
        caches=core.Caches(cache),
        memory=core.Memory(),
        start=row.length,
        request=request,
        done=zero > 0,
        failed=jnp.zeros_like(zero, jnp.int32),
        stats=core.Stats(zero, zero, zero, zero),
    )
    state = followers.init(state, headroom)
    # Nothing was drafted for this token, and so a policy has nothing to learn from it.
    result = own_token(state, forward, cache, sampler)
    return commit_round(state, result, followers._replace(policy=None), lm.vocab_size)[0]


def own_token(
    state: core.State, forward: core.Forward, cache: core.Cache, sampler: core.Sampler
) -> core.RoundResult:
    """Makes the result of a pass without a draft: one token of each row, drawn from the target's
    distribution.
    """
    distribution = sampler(state.request.sampling_params, forward.logits, preceding(state))
    token = sample(state, distribution)
    none = empty_draft(state.length)
    target_pass = core.TargetPass(forward, distribution, unusable(forward, distribution))
    verdict = core.Verdict(none.length, token, none.length)
    return core.RoundResult(
        none, verdict, token[:, None], target_pass, state.caches._replace(target=cache)
    )


def samples(prompt: core.Prompt, request: core.Request) -> int:
    """Counts the rows of a request that continue each prompt: they lie one after the other, and
    share its prefill.
    """
    return request.max_new_tokens.shape[0] // prompt.length.shape[0]


def preceding(state: core.State) -> core.Preceding:
    """Returns the tokens before the next one: the committed row."""
    return core.Preceding(
        core.Prompt(state.tokens, state.length), state.start, memory=state.memory.sampler
    )


def distributions(
    state: core.State, sampler: core.Sampler, vocab: int
) -> tuple[core.ToDistribution, core.ToDistribution]:
    """Makes the distributions of a round, after the committed row and draft tokens: the target's
    and the drafter's.
    """

    def to_distribution(
        sampling_params: Any,
        logits: Float[Array, "B T W"],
        draft_tokens: Int[Array, "B N"] | None = None,
        seen: Bool[Array, "#B T N"] | None = None,
    ) -> core.Distribution:
        after = preceding(state)._replace(draft_tokens=draft_tokens, seen=seen)
        return sampler(sampling_params, sampling.match_vocab(logits, vocab), after)

    params = state.request.sampling_params
    draft_params = state.request.draft_sampling_params
    if draft_params is None:
        draft_params = params
    return functools.partial(to_distribution, params), functools.partial(
        to_distribution, draft_params
    )


def sample(state: core.State, distribution: core.Distribution) -> Int[Array, " B"]:
    """The token that plain sampling puts at each row's end."""
    if distribution.tokens is not None:
        return distribution.tokens[:, 0]
    assert distribution.log_probs is not None
    keys = noise.at(state.request.keys, state.length, noise.Purpose.TOKEN)
    return noise.categorical(keys, distribution.log_probs[:, 0])


def failures(result: core.RoundResult, vocab: int) -> Int[Array, " B"]:
    """Finds rows that cannot go on, a `core.Failure` for each: nothing can be drawn, or the verdict
    is impossible.

    A rule must not accept more tokens than were drafted, or fewer than none, or choose an
    impossible token.

    >>> draft, count = core.Draft(jnp.array([[3, 4]] * 3), jnp.array([1] * 3)), jnp.array([0, 1, 2])
    >>> usable = core.TargetPass(None, None, jnp.zeros((3, 3), bool))
    >>> failures(
    ...     core.RoundResult(draft, core.Verdict(count, count, count), None, usable, None), vocab=5
    ... ).tolist()
    [0, 0, 2]
    """
    draft = result.draft
    verdict = result.verdict
    target_pass = result.target
    on_path = fed_on_path(verdict, target_pass.unusable.shape[1])
    invalid = jnp.any(target_pass.unusable & on_path, axis=1)
    accepted = verdict.num_accepted
    token = verdict.next_token
    count = (accepted < 0) | (accepted > draft.length)
    impossible = count | (token < 0) | (token >= vocab)
    return jnp.where(
        invalid, int(core.Failure.LOGITS), jnp.where(impossible, int(core.Failure.RULE), 0)
    )


def draft_context(
    policy: core.Policy | None,
    state: core.State,
    gamma: int,
    to_distribution: core.ToDistribution,
    sampler: core.Sampler,
    entropy: Callable[[core.Distribution], Float[Array, " B"]] | None = None,
) -> core.DraftContext:
    """The drafter's context of a round: limits as the policy decides, but no draft token that could
    not be emitted.

    `entropy` is for a trace with numbers, see `core.DraftContext`.
    """
    values = state.request.policy
    memory = state.memory.policy
    limit = jnp.minimum(max_useful_draft(state), gamma)
    context = core.DraftContext(
        state.request.keys,
        core.Prompt(state.tokens, state.length),
        limit.astype(state.length.dtype),
        gamma,
        adaptive=policy is not None,
        to_distribution=to_distribution,
        entropy=entropy,
        finished=state.done,
        ahead=samplers.ahead(sampler, state.request.sampling_params, preceding(state)),
    )
    if policy is None:
        return context
    chosen = jnp.clip(policy.max_draft(values, memory, gamma, tokens_left(state)), 0, limit)
    context = context._replace(max_draft=chosen.astype(state.length.dtype))
    if policy.should_continue is None:
        return context
    should_continue = functools.partial(policy.should_continue, values, memory)
    return context._replace(confidence=policy.confidence, should_continue=should_continue)


def shorten(
    policy: core.Policy | None, state: core.State
) -> Callable[[core.Draft], Int[Array, " B"]] | None:
    """Returns the policy's limit on the draft tokens that the target reads; None: it reads all."""
    if policy is None or (shorten := policy.shorten) is None:
        return None
    return lambda draft: shorten(
        state.request.policy, state.memory.policy, draft, tokens_left(state)
    )


def max_useful_draft(state: core.State) -> Int[Array, " B"]:
    """Counts the draft tokens that can save a row a pass: one fewer than it may still generate.

    A row with 6 tokens of 9 is done after 2 accepted ones. More would never be emitted, and
    counting them would describe the limit, not the drafter. A finished row has use for none.
    """
    return jnp.maximum(tokens_left(state) - 1, 0)


def tokens_left(state: core.State) -> Int[Array, " B"]:
    """Counts the new tokens that each row may still get; 0 for one that has ended."""
    return jnp.where(state.done, 0, state.request.max_new_tokens - (state.length - state.start))


def end_round(
    state: core.State,
    result: core.RoundResult,
    followers: Followers,
    vocab: int,
    numbers_of: Callable[[core.Keys, Int[Array, " B"], core.RoundResult], core.TraceNumbers]
    | None = None,
) -> tuple[core.State, core.RoundInfo]:
    """Commits a round's tokens and reports the round; rows that had ended before it stay as they
    are.

    The caches are still those from before the round. `numbers_of` makes the report's numbers, if
    they are asked for.
    """
    after, committed = commit_round(state, result, followers, vocab)
    live = ~state.done
    after, info = update_stats(after, live, result.draft, result.verdict, committed)
    if numbers_of is None:
        return after, info
    return after, info._replace(numbers=numbers_of(state.request.keys, state.length, result))


def commit_round(
    state: core.State, result: core.RoundResult, followers: Followers, vocab: int
) -> tuple[core.State, Int[Array, " B"]]:
    """Commits a round's tokens, tells the followers, and counts the tokens committed."""
    count = result.verdict.num_accepted + 1
    state, committed = commit(state, result.tokens, count, failures(result, vocab))
    return followers.update(state, result, committed), committed


def commit(
    state: core.State,
    new: Int[Array, "B step"],
    count: Int[Array, " B"],
    bad: Bool[Array, " B"] | Int[Array, " B"],
) -> tuple[core.State, Int[Array, " B"]]:
    """Appends up to `count` of the new tokens of each live row, ends rows, and counts the tokens
    committed.

    A row ends after its first end token or at its limit; a `bad` row (a `Failure`, or True for its
    first kind) ends with nothing and is marked as failed.
    """
    request = state.request
    live = ~state.done
    new_failure = jnp.where(live, bad.astype(state.failed.dtype), 0)
    remaining = request.max_new_tokens - (state.length - state.start)
    committed, ended = token_rows.num_to_commit(new, count, remaining, request.eos)
    committed = jnp.where(live & (new_failure == 0), committed, 0)
    failed = jnp.maximum(state.failed, new_failure)
    state = state._replace(
        tokens=token_rows.append(state.tokens, state.length, new),
        length=state.length + committed,
        done=state.done | ended | (failed > 0),
        failed=failed,
        stats=state.stats._replace(emitted=state.stats.emitted + committed),
    )
    return state, committed


def finish(state: core.State) -> Int[Array, " B"]:
    """Says why each row ended, a `core.Finish`; 0 for a row that has not.

    A row that ended for no reason that can be seen here was ended by a stop string (`loop.Edit`).
    """
    last = token_rows.tokens_at(state.tokens, state.length - 1)
    is_end = jnp.any(last[:, None] == state.request.eos, axis=1)
    at_limit = state.length - state.start >= state.request.max_new_tokens
    reason = jnp.where(
        is_end,
        int(core.Finish.EOS),
        jnp.where(at_limit, int(core.Finish.LENGTH), int(core.Finish.STOP)),
    )
    return jnp.where(
        state.done, jnp.where(state.failed > 0, int(core.Finish.FAILURE), reason), 0
    ).astype(jnp.int32)


def update_stats(
    state: core.State,
    live: Bool[Array, " B"],
    draft: core.Draft,
    verdict: core.Verdict,
    committed: Int[Array, " B"],
) -> tuple[core.State, core.RoundInfo]:
    """Adds one round to the statistics of the rows that were live in it, and reports it."""
    drafted = draft.length
    if draft.parent is not None:
        drafted = jnp.sum(tree.in_tree(draft.parent), axis=1, dtype=draft.length.dtype)
    drafted, accepted, tested = (
        jnp.where(live, x, 0) for x in (drafted, verdict.num_accepted, verdict.num_tested)
    )
    stats = state.stats._replace(
        rounds=state.stats.rounds + live.astype(jnp.int32),
        drafted=state.stats.drafted + drafted,
        accepted=state.stats.accepted + jnp.minimum(accepted, committed),
    )
    info = core.RoundInfo(
        draft.tokens, drafted, accepted, committed, tested, draft.parent, verdict.path
    )
    return state._replace(stats=stats), info


def last_token(state: core.State) -> Int[Array, "B 1"]:
    """The last committed token of each row: the first to be fed."""
    return token_rows.window(state.tokens, state.length - 1, 1)


def empty_draft(length: Int[Array, " B"]) -> core.Draft:
    """A draft of no tokens."""
    return core.Draft(jnp.zeros((length.shape[0], 0), jnp.int32), jnp.zeros_like(length))


class Followers(NamedTuple):
    """The followers whose memories are the entries of `core.Memory`; None if not asked for."""

    policy: core.Follower | None = None
    sampler: core.Follower | None = None
    log_probs: core.Follower | None = None

    def init(self, state: core.State, headroom: int) -> core.State:
        """Returns the state with the memories of all followers, before the first new token."""
        # Every leaf is batch-first, so rows refill, permute and resume with the state.
        memories = (
            None if follower is None else follower.init(state, headroom) for follower in self
        )
        return state._replace(memory=core.Memory(*memories))

    def update(
        self, state: core.State, result: core.RoundResult, committed: Int[Array, " B"]
    ) -> core.State:
        """Tells all followers of a round, whose first `committed` tokens were committed."""
        pairs = zip(self, state.memory, strict=True)
        memories = (
            old if follower is None else follower.update(state, old, result, committed)
            for follower, old in pairs
        )
        return state._replace(memory=core.Memory(*memories))


def followers(
    sampler: core.Sampler,
    vocab: int,
    top_log_probs: int | None = None,
    policy: core.Policy | None = None,
) -> Followers:
    """Makes the followers of a decoder; arguments as in `speculative`."""
    return Followers(
        None if policy is None else _of_policy(policy),
        samplers.follower(sampler, vocab),
        None if top_log_probs is None else log_probs.follower(top_log_probs),
    )


def _of_policy(policy: core.Policy) -> core.Follower:
    def init(state: core.State, headroom: int) -> Any:
        return policy.init(state.request.policy, core.Prompt(state.tokens, state.length))

    def update(
        state: core.State, memory: Any, result: core.RoundResult, committed: Int[Array, " B"]
    ) -> Any:
        return policy.update(state.request.policy, memory, result.draft, result.verdict, committed)

    return core.Follower(init, update)
