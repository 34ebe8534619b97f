"""The gamma that Theorem 3.8 prefers, for the acceptance rate seen so far: online, per row."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import BoundPolicy, Draft, Policy, Prompt, Verdict
from jaxspec.core.checks import one_of
from jaxspec.policies.common import Counts, checked, draft_depth


class AdaptiveParams(NamedTuple):
    """The numbers of each row; `verify` [rows, n]: what each further token adds to a pass, the last
    for all beyond.
    """

    c: Any
    verify: Any
    alpha: Any
    weight: Any
    forget: Any
    pause: Any


Together = Literal["batch", "slots"]
NEVER = 10**7  # as a pause
LONGEST = 16  # the longest pause, in first ones
MARGIN = 0.03  # that drafting must be better by: costs are not known to less
WIDTH = 64  # increments of v, or a multiple: the shape is part of the program


class AcceptanceState(NamedTuple):
    """Draft tokens that were accepted and draft tokens that were tested, both discounted; rounds
    since the last draft token; the pause.
    """

    accepted: Float[Array, " B"]
    num_tested: Float[Array, " B"]
    idle: Int[Array, " B"]
    pause: Int[Array, " B"]


def adaptive(
    c: Any = 0.05,
    v: Any = 0.06,
    *,
    alpha: Any = 0.6,
    weight: Any = 3.0,
    forget: Any = None,
    pause: Any = None,
    together: Together | None = None,
) -> BoundPolicy:
    """The number of draft tokens n that maximises (1 - a^(n+1)) / (1 - a) / (n c + v_n), for an
    estimate a of alpha.

    This is Theorem 3.8 with the verify pass at its real cost. Costs are known to 3%, so n must beat
    no draft by that much. a is the share of the tested draft tokens that were accepted. (Draft
    tokens after a rejected one are not tested.) Older rounds count less. If even one draft token
    does not pay, no draft is made for `pause` rounds, and then a trial of one token. If the trial
    is rejected, the next pause is twice as long, up to 16 times the first: short pauses come first,
    and doubling bounds the cost.

    The longest draft sets the cost of a pass over a batch, so one row can slow all others. With
    `together` all rows that have not ended draft the same n. In "slots" a row that ends is replaced
    (`generate_many`). There n maximises the sum of the rows' expected tokens over the cost of the
    round. A "batch" (`generate`) ends with its slowest row. There n minimises the time until all
    rows have reached their limits: the largest ratio, over the rows, of tokens left to tokens
    expected of a round. Gains of the other rows do not shorten the batch. If many rows leave no
    arithmetic to spare, by c and v measured on as many rows, nothing is drafted until few rows with
    good drafts are left.

    A look-up finds much for some rows and nothing for others. So the rows agree once more after the
    search on the number of tokens to verify, and one row's long draft does not widen the pass for
    all. A row's draft then depends on the others. Its text keeps its distribution, and at
    temperature 0 or with `rules.coupled` it is the same text. The rows share one pause. It grows
    until drafts are made for another reason than a trial, since some row's trial is always
    accepted.

    Args:
        c: cost of one draft token, in rounds without one; 0 for a look-up, whose search is a part
            of v, from one draft token on.
        v: costs of rounds with 0, 1, 2, ... draft tokens in the same unit, without the c of these;
            `jaxspec.analysis.cost.policy_costs` measures both. Each draft token beyond these adds
            their mean cost. Or one number, what each draft token adds to 1. Either is for all rows.
        alpha, weight: the acceptance rate assumed at the start, and the number of trials it counts
            for.
        forget: share of the evidence that a round with draft tokens loses. The default 0.2 looks
            back some five rounds, since right draft tokens cluster in text. For a batch it is 0.05,
            since there all the rest of a row counts.
        pause: length of the first pause in rounds; by default 4, for a batch 24.
        together: "batch" or "slots", if all rows draft the same number of tokens; None: each
            decides for itself.

    Raises:
        ValueError: a cost is negative, v does not begin with 1 or falls, alpha or a share is
            outside [0, 1], a weight is not positive, a number is not finite, or `together` is
            unknown.

    Example:
        >>> policy = adaptive(c=0.05, v=0.05, alpha=[0.9, 0.5, 0.05], weight=1e6)
        >>> state = policy.functions.init(
        ...     policy.params, Prompt(jnp.zeros((3, 1), jnp.int32), jnp.array([1, 1, 1]))
        ... )
        >>> policy.functions.max_draft(policy.params, state, 8, jnp.full(3, 9)).tolist()
        [8, 2, 0]

    Reference: section 3.5 of arXiv 2211.17192, with alpha estimated as generation goes on.
    """
    if together is not None:
        one_of(together, "together", get_args(Together))
    unbounded = float("inf")
    is_batch = together == "batch"
    if forget is None:
        forget = 0.05 if is_batch else 0.2
    if pause is None:
        pause = 24 if is_batch else 4
    values = AdaptiveParams(
        checked(c, "c", 0, unbounded),
        _increments(v),
        checked(alpha, "alpha", 0, 1),
        checked(weight, "weight", 1e-3, unbounded),
        checked(forget, "forget", 0, 1),
        checked(pause, "pause", 0, NEVER, int),
    )
    return BoundPolicy(
        _adaptive(together),
        values,
        name="adaptive" if together is None else f"adaptive, {together}",
    )


@functools.lru_cache
def _adaptive(together: Together | None) -> Policy:
    of_all, is_trial_due = (
        functools.partial(function, together) for function in (_of_all, _is_trial_due)
    )

    def init(params: AdaptiveParams, prompt: Prompt) -> AcceptanceState:
        rows = prompt.length.shape
        accepted, num_tested = (
            jnp.broadcast_to(x, rows) for x in (params.alpha * params.weight, params.weight)
        )
        pause = jnp.broadcast_to(params.pause, rows).astype(prompt.length.dtype)
        return AcceptanceState(accepted, num_tested, jnp.zeros_like(prompt.length), pause)

    def max_draft(
        params: AdaptiveParams, state: AcceptanceState, gamma: int, remaining: Counts
    ) -> Counts:
        tokens = expected_tokens(state.accepted / state.num_tested, gamma)
        is_due = is_trial_due(state.idle, state.pause, remaining)
        if together:
            tokens = of_all(tokens, remaining)
        best = best_length(tokens.at[:, 0].multiply(1.0 + MARGIN), params.c, params.verify)
        return jnp.broadcast_to(jnp.where((best == 0) & is_due, 1, best), remaining.shape)

    def shorten(
        params: AdaptiveParams, state: AcceptanceState, draft: Draft, remaining: Counts
    ) -> Counts:
        depth = draft_depth(draft)
        if draft.log_probs is not None:  # drawn: how many there are may depend on what was drawn
            return depth
        width = draft.tokens.shape[1]
        tokens = expected_tokens(state.accepted / state.num_tested, width)
        reach = jnp.minimum(jnp.arange(width + 1, dtype=depth.dtype)[None], depth[:, None])
        # a row gains nothing beyond its own draft
        tokens = jnp.take_along_axis(tokens, reach, axis=1)
        best = best_length(
            of_all(tokens, remaining), jnp.zeros(1, jnp.float32), params.verify
        )  # what drafting cost is spent
        is_due = is_trial_due(state.idle, state.pause, remaining)
        return jnp.broadcast_to(jnp.maximum(best, is_due.astype(best.dtype)), remaining.shape)

    def update(
        params: AdaptiveParams,
        state: AcceptanceState,
        draft: Draft,
        verdict: Verdict,
        num_committed: Int[Array, " B"],
    ) -> AcceptanceState:
        drafted = draft.length > 0
        accepted = verdict.num_accepted.astype(jnp.float32)
        kept = jnp.where(drafted, 1.0 - params.forget, 1.0)
        # One trial a level: of siblings that were tried, one is accepted or none.
        trials = jnp.minimum(verdict.num_accepted + 1, draft_depth(draft)).astype(jnp.float32)
        if together is None:
            pause = state.pause
            is_trial = state.idle > 0
            pays = accepted > 0
        else:
            # Some row's trial is always accepted. Drafting pays where a draft was made before it
            # was due as a trial.
            drafted = jnp.broadcast_to(jnp.any(drafted), drafted.shape)
            pause, is_trial = jnp.max(state.pause), is_trial_due(state.idle, state.pause)
            pays = drafted & ~is_trial
        longer = jnp.minimum(2 * pause, LONGEST * params.pause)
        pause = jnp.where(drafted & is_trial, longer, pause)
        pause = jnp.broadcast_to(jnp.where(pays, params.pause, pause), drafted.shape)
        # What is forgotten makes room for the first belief, so that the estimate never rests on
        # nothing.
        return AcceptanceState(
            kept * state.accepted + (1.0 - kept) * params.alpha * params.weight + accepted,
            kept * state.num_tested + (1.0 - kept) * params.weight + trials,
            jnp.where(drafted, 0, state.idle + 1),
            pause.astype(state.pause.dtype),
        )

    return Policy(init, max_draft, update, shorten=shorten if together else None)


def _of_all(
    together: Together | None, tokens: Float[Array, "B gamma+1"], remaining: Int[Array, " B"]
) -> Float[Array, "1 gamma+1"]:
    """Returns the progress of a round with 0, 1, ..., gamma draft tokens a row; rows that have
    ended do not count.
    """
    live = (remaining > 0)[:, None]
    remaining = remaining[:, None].astype(jnp.float32)
    if together == "slots":
        return jnp.sum(jnp.where(live, tokens, 0.0), axis=0, keepdims=True)
    # Of what the slowest row has left, the part that the round does.
    return jnp.min(
        jnp.where(live, tokens / jnp.maximum(remaining, 1.0), 1e9), axis=0, keepdims=True
    )


def _is_trial_due(
    together: Together | None, idle: Int[Array, " B"], pause: Int[Array, " B"], remaining: Any = 1
) -> Bool[Array, " #B"]:
    """Says whether a pause is over: a row's pause, or the pause of all rows, since a row may have
    come later.
    """
    if together is None:
        return idle >= pause
    idle, pause = (
        jnp.max(jnp.where(remaining > 0, rounds, 0), keepdims=True) for rounds in (idle, pause)
    )
    return (idle >= pause) & jnp.any(remaining > 0)


def expected_tokens(alpha: Float[Array, " B"], gamma: int) -> Float[Array, "B gamma+1"]:
    """The expected tokens of a round with 0, 1, ..., gamma draft tokens: 1 + a + a^2 + ... + a^n.

    >>> expected_tokens(jnp.array([1.0, 0.5]), 2).tolist()
    [[1.0, 2.0, 3.0], [1.0, 1.5, 1.75]]
    """
    powers = jnp.cumprod(jnp.broadcast_to(alpha[:, None], (alpha.shape[0], gamma)), axis=1)
    return 1.0 + jnp.pad(jnp.cumsum(powers, axis=1), ((0, 0), (1, 0)))


def best_length(
    tokens: Float[Array, "B gamma+1"], c: Float[Array, " #B"], verify: Float[Array, "#B n"]
) -> Int[Array, " B"]:
    """The n of 0..gamma that yields most tokens per second; the smallest of equals.

    >>> best_length(
    ...     expected_tokens(jnp.array([1.0, 0.0]), 4), jnp.full(2, 0.1), jnp.zeros((1, 1))
    ... ).tolist()
    [4, 0]
    """
    gamma = tokens.shape[1] - 1
    verify_cost = verify[:, jnp.minimum(jnp.arange(gamma), verify.shape[1] - 1)]
    token_cost = verify_cost + jnp.atleast_1d(c)[:, None]
    cost = 1.0 + jnp.pad(jnp.cumsum(token_cost, axis=1), ((0, 0), (1, 0)))
    return jnp.argmax(tokens / cost, axis=1).astype(jnp.int32)


def _increments(v: Any) -> np.ndarray:
    """Returns the cost that each draft token adds to the verify pass, one row for all prompts.

    Its width is a multiple of `WIDTH`, so that lists of any usual length share a program, and it
    always ends with the mean: the last increment of a staircase is most often 0, which does not
    describe what lies beyond.

    >>> found = _increments([1.0, 1.25, 1.25])
    >>> found.shape, found[0, :4].tolist()
    ((1, 64), [0.25, 0.0, 0.125, 0.125])
    """
    if np.ndim(v) == 0:
        return np.full((1, WIDTH), checked(v, "v", 0, float("inf")))
    costs = np.asarray(v, np.float32)
    usable = costs.ndim == 1 and len(costs) > 1 and np.isfinite(costs).all()
    if not (usable and np.isclose(costs[0], 1) and np.all(np.diff(costs) >= 0)):
        raise ValueError(
            f"v is {v!r}: expected a number, or costs that begin with 1 and do not fall: 1.0, 1.2, "
            "1.3"
        )
    steps = np.diff(costs)
    row = np.full(WIDTH * (len(steps) // WIDTH + 1), steps.mean())
    row[: len(steps)] = steps
    return row[None, :]
