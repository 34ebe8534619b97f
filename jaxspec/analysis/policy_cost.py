"""The costs of whole rounds by the number of their draft tokens, for `policies.adaptive`.

Whole rounds of the policy's own program are timed, not passes one by one: drafting, the pass of the width that so many
tokens need, the verdict and the commit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import policies
from jaxspec.analysis import cost
from jaxspec.core import BoundPolicy, Caches, Decoder, Draft, DraftContext, Drafter, Rule, State, Weights, programs
from jaxspec.decode import loop
from jaxspec.decode import state as states
from jaxspec.decode.request import Prepared
from jaxspec.drafters.common import as_drafter
from jaxspec.policies.adaptive import Together

MIN_SECONDS = 0.15  # of each timed loop: a call of a program with many arguments takes some of a millisecond itself
FAR = 1e6  # a cost, or a weight of a belief, that nothing outweighs


class PolicyCosts(NamedTuple):
    """The first two arguments of `policies.adaptive`, in rounds without a draft.

    Attributes:
        c: the cost of one draft token.
        v: the costs of rounds that judge 0, 1, .. gamma draft tokens, without their c [gamma + 1].
    """

    c: float
    v: np.ndarray


def policy_costs(
    prepared: Prepared, *, repeats: int = cost.REPEATS, inner: int | None = None, begin: loop.Begin = loop.begin
) -> PolicyCosts:
    """Measures c and v of `policies.adaptive` for a generation.

    It times whole rounds over all rows, one after the other, with as many draft tokens as each width of the verify pass
    can judge. Look-ups count as successful, since their cost matters where they are. A search is a part of v, from one
    draft token on. c is the cost of drafting one token more at the same width. A tree's pass does not widen with its
    levels, so for trees c is 0 and v has everything.

    Args:
        prepared: with the drafter, and the most draft tokens as its gamma; `max_new_tokens` sizes the caches, all of
            which a pass reads. Drafts that it leaves no room for are not timed, and count as 10^6 rounds.
        repeats, inner: the arguments of `cost.measure`.
        begin: makes the state of the rows after prefill, each with a limit of `max_new_tokens`, by default from the
            generation's own prompts. For a job's slots it is `jobs.slots.Slots.fill`.

    Raises:
        ValueError: a generation without a drafter, or of 0 draft tokens.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> costs = policy_costs(prepared_table(gamma=4), repeats=2, inner=3)
        >>> costs.c >= 0, costs.v.shape, float(costs.v[0]), bool(costs.v[2] == costs.v[3])
        (True, (5,), 1.0, True)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192: c of Definition 3.7, and the verify pass of
    Theorem 3.8 at its real cost, both with the rest of a round.
    """
    gamma = prepared.decoder.gamma
    if prepared.options["drafter"] is None or not gamma:
        raise ValueError(
            "there is nothing to measure: expected a generation with a drafter, and at least 1 draft token"
        )
    possible = prepared.max_new_tokens - 2  # prefill makes a token, and the last one is never drafted
    ends = [n for n in _ends(prepared) if n <= possible]
    if not ends:
        return PolicyCosts(0.0, np.array([1.0] + [FAR] * gamma))
    begins = [before + 1 for before in (0, *ends[:-1])]
    timed = sorted({0, *begins, *ends})
    loop_of = _round_loops(prepared, inner, begin)
    plain, *drafted = cost.seconds_per_pass([loop_of(n) for n in timed], repeats)
    # What else the machine does makes a round longer, never shorter: the shortest is the one that is compared.
    ratio = dict(zip(timed[1:], (float(seconds.min() / plain.min()) for seconds in drafted), strict=True))
    slopes = [
        (ratio[end] - ratio[begin]) / (end - begin) for begin, end in zip(begins, ends, strict=True) if end > begin
    ]
    c = max(0.0, float(np.median(slopes))) if slopes else 0.0
    v = np.maximum.accumulate([1.0, *(ratio[end] - c * end for end in ends)])  # noise makes some round cheaper
    return PolicyCosts(c, np.append(v, FAR)[np.searchsorted((0, *ends), np.arange(gamma + 1))])


def agreement(kind: Together, rows: int, is_sampled: bool, rule: Rule | None) -> Together | None:
    """Says how rows agree on drafts in `policies.adaptive`: several of them, whose texts do not depend on drafts.

    Args:
        kind: "batch" or "slots".
        rows: how many rows are decoded together.
        is_sampled, rule: whether the generation samples, and its rule.

    >>> agreement("batch", 8, False, None), agreement("batch", 8, True, None), agreement("batch", 1, False, None)
    ('batch', None, None)
    """
    return kind if rows > 1 and (not is_sampled or (rule is not None and rule.shares_noise)) else None


def _ends(prepared: Prepared) -> tuple[int, ...]:
    """Lists the most draft tokens that each width of the verify pass can judge; of a tree, all depths."""
    gamma = prepared.decoder.gamma
    return tuple(range(1, gamma + 1)) if prepared.decoder.trees else cost.measured_drafts(gamma)


def _round_loops(prepared: Prepared, inner: int | None, begin: loop.Begin) -> Callable[[int], cost.TimedLoop]:
    """Returns a function from a number of draft tokens to a warm loop of rounds; all loops share a state."""
    bound = as_drafter(prepared.options["drafter"], "drafter")
    full = bound._replace(functions=_full(bound.functions))
    gamma = prepared.decoder.gamma

    def forced(count: int) -> Prepared:
        return prepared.replace(drafter=full, policy=_always(count, gamma), eos_ids=())

    first = forced(0)
    limit = jnp.full_like(first.request.max_new_tokens, first.max_new_tokens)
    state = begin(first._replace(request=first.request._replace(max_new_tokens=limit)))
    place = jnp.copy(state.tokens), jnp.copy(state.length)

    def loop_of(count: int) -> cost.TimedLoop:
        values = forced(count).request.policy

        def call(times: int) -> None:
            nonlocal state
            state = rounds(first.decoder, first.weights, state, place, values, jnp.asarray(times, jnp.int32))
            state.length.block_until_ready()

        return cost.counted(call, inner, MIN_SECONDS)

    return loop_of


def _always(count: int, gamma: int) -> BoundPolicy:
    """Makes a policy that drafts `count` tokens a round: they are sure to be accepted, and more would cost too much."""
    v = [1.0] * (count + 1) + [FAR] * (gamma - count)
    return policies.adaptive(0.0, v, alpha=1.0, weight=FAR, pause=int(FAR))


@functools.lru_cache
def _full(drafter: Drafter) -> Drafter:
    """Makes a drafter that may find nothing find as many tokens as it may draft, whatever they are."""
    if not drafter.may_be_empty:
        return drafter

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        draft, caches = drafter.propose(weights, caches, context)
        if draft.parent is None:
            return draft._replace(length=jnp.broadcast_to(context.max_draft, draft.length.shape)), caches
        # All nodes of a tree are read as soon as there is a draft: here they all follow the last committed token.
        drafts = (context.max_draft > 0)[:, None]
        parent = jnp.where(drafts, jnp.zeros_like(draft.parent), -1)
        return draft._replace(length=jnp.where(drafts[:, 0], draft.tokens.shape[1], 0), parent=parent), caches

    return drafter._replace(propose=propose)


@programs.jit(static_argnames=("decoder",), donate_argnames=("state",))
def rounds(
    decoder: Decoder,
    weights: Weights,
    state: State,
    place: tuple[Int[Array, "B S"], Int[Array, " B"]],
    policy: Any,
    count: Int[Array, ""],
) -> State:
    """Runs a number of rounds, as many as are asked for: where rows are full, what they have got is taken back.

    Args:
        decoder, weights, state: the decoder, its weights and its state. The state is consumed.
        place: the tokens and lengths of all rows at which they begin again.
        policy: values of the decoder's policy.
        count: how many rounds to run.
    """
    tokens, length = place
    nothing = jnp.zeros_like(state.failed)
    state = state._replace(request=state.request._replace(policy=policy))

    def one_round(_: Int[Array, ""], state: State) -> State:
        # A round of all draft tokens has to fit, and one more token.
        is_full = jnp.any(states.tokens_left(state) < decoder.gamma + 2)
        tokens_now, length_now = (
            jnp.where(is_full, before, now) for before, now in ((tokens, state.tokens), (length, state.length))
        )
        live = state._replace(tokens=tokens_now, length=length_now, done=nothing > 0, failed=nothing)
        return decoder.step(weights, live)[0]

    return jax.lax.fori_loop(0, count, one_round, state)
