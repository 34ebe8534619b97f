"""Grow after full acceptance, shrink after a rejection."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import BoundPolicy, Draft, Policy, Prompt, Verdict
from jaxspec.policies.common import Counts, PerRow, as_length, checked, draft_depth


class HeuristicParams(NamedTuple):
    start: Any
    grow: Any
    shrink: Any


def heuristic(start: Any = 5, grow: Any = 2, shrink: Any = 1) -> BoundPolicy:
    """`grow` draft tokens more after a round whose draft tokens were all accepted, `shrink` fewer
    after any other; 1 to gamma.

    The schedule of transformers' assisted generation ("heuristic"). It knows neither costs nor
    probabilities, so it never stops drafting altogether.

    Args:
        start: draft tokens of the first round.
        grow, shrink: steps; fractions count.

    Raises:
        ValueError: a start below 1, a negative step.

    Example:
        >>> policy = heuristic(start=2)
        >>> memory = policy.functions.init(
        ...     policy.params, Prompt(jnp.zeros((2, 1), jnp.int32), jnp.array([1, 1]))
        ... )
        >>> draft = Draft(jnp.zeros((2, 8), jnp.int32), jnp.array([2, 2]))
        >>> verdict = Verdict(*[jnp.array([2, 1])] * 3)
        >>> memory = policy.functions.update(
        ...     policy.params, memory, draft, verdict, jnp.array([3, 2])
        ... )
        >>> policy.functions.max_draft(policy.params, memory, 8, jnp.array([9, 9])).tolist()
        [4, 1]
    """
    infinity = float("inf")
    values = HeuristicParams(
        checked(start, "start", 1, infinity),
        checked(grow, "grow", 0, infinity),
        checked(shrink, "shrink", 0, infinity),
    )
    return BoundPolicy(_heuristic(), values, name="heuristic")


@functools.lru_cache
def _heuristic() -> Policy:
    def init(params: HeuristicParams, prompt: Prompt) -> Float[Array, " B"]:
        return jnp.broadcast_to(params.start, prompt.length.shape)

    def max_draft(params: HeuristicParams, state: PerRow, gamma: int, remaining: Counts) -> Counts:
        return as_length(jnp.minimum(state, gamma))

    def update(
        params: HeuristicParams,
        state: PerRow,
        draft: Draft,
        verdict: Verdict,
        num_committed: Counts,
    ) -> PerRow:
        depth = draft_depth(draft)
        before = state
        # a tree is no deeper than it was, however far the state has grown
        if draft.parent is not None:
            deepest = depth.astype(state.dtype)
            before = jnp.where(state >= deepest + 1, deepest, state)
        moved = jnp.where(
            verdict.num_accepted == depth, before + params.grow, before - params.shrink
        )
        return jnp.where(depth > 0, jnp.clip(moved, 1.0, draft.tokens.shape[1]), state)

    return Policy(init, max_draft, update)
