"""A confidence threshold that moves until the acceptance rate is the one that is asked for."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import BoundPolicy, Draft, Policy, Prompt, Verdict
from jaxspec.policies.common import Counts, PerRow, checked, draft_depth, is_sure, sureness


class ExitParams(NamedTuple):
    goal: Any
    start: Any
    step: Any


def draft_exiting(goal: Any = 0.8, start: Any = 0.4, step: Any = 0.01) -> BoundPolicy:
    """The draft ends as under `confidence`, with a threshold for each row that adapts to a goal.

    After each round the threshold moves by step (goal drafted - accepted). It rises where fewer
    draft tokens are accepted than the goal says, so that drafts end sooner, and falls where more
    are. It comes to rest where the share of draft tokens that are accepted is the goal, if some
    threshold has that share.

    Draft & Verify adapts its threshold so, too. There it moves by the sign of the difference, which
    comes to rest at a median and not at the goal.

    Args:
        goal: the share of draft tokens that is to be accepted. What is fastest depends on the
            costs: see `adaptive`.
        start: the threshold of the first round.
        step: how far the threshold moves for each draft token.

    Raises:
        ValueError: a number outside [0, 1].

    Example:
        >>> policy = draft_exiting(goal=0.5, start=0.6, step=0.05)
        >>> memory = policy.functions.init(
        ...     policy.params, Prompt(jnp.zeros((2, 1), jnp.int32), jnp.array([1, 1]))
        ... )
        >>> draft = Draft(jnp.zeros((2, 4), jnp.int32), jnp.array([4, 4]))
        >>> verdict = Verdict(
        ...     *[jnp.array([4, 0])] * 3
        ... )  # all and none of 4 draft tokens are accepted
        >>> memory = policy.functions.update(
        ...     policy.params, memory, draft, verdict, jnp.array([5, 1])
        ... )
        >>> [f"{threshold:.2f}" for threshold in memory]
        ['0.50', '0.70']

    Reference: Zhang et al., "Draft & Verify", arXiv 2309.08168, section 3.4.
    """
    numbers = {"goal": goal, "start": start, "step": step}
    params = ExitParams(*(checked(value, name, 0, 1) for name, value in numbers.items()))
    return BoundPolicy(_draft_exiting(), params, name="draft_exiting")


@functools.lru_cache
def _draft_exiting() -> Policy:
    def init(params: ExitParams, prompt: Prompt) -> PerRow:
        return jnp.broadcast_to(params.start, prompt.length.shape)

    def max_draft(
        params: ExitParams, state: PerRow, gamma: int, remaining: Int[Array, " B"]
    ) -> Counts:
        return jnp.full(state.shape, gamma, jnp.int32)

    def should_continue(
        params: ExitParams,
        state: PerRow,
        index: int | Int[Array, ""],
        confidences: Float[Array, "B G"],
    ) -> Bool[Array, " B"]:
        return is_sure(confidences, index, state)

    def update(
        params: ExitParams, state: PerRow, draft: Draft, verdict: Verdict, num_committed: Counts
    ) -> PerRow:
        drafted = draft_depth(draft).astype(jnp.float32)
        accepted = verdict.num_accepted.astype(jnp.float32)
        return jnp.clip(state + params.step * (params.goal * drafted - accepted), 0.0, 1.0)

    return Policy(init, max_draft, update, sureness, should_continue)
