"""The followers of a generation's rounds: the policy, the sampler's processors, log probabilities.

A follower that nobody asked for is None, and no part of the program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Int

from jaxspec.core import Follower, Memory, Policy, Prompt, Sampler, State
from jaxspec.core.round import RoundResult
from jaxspec.decode import log_probs
from jaxspec.sampling import samplers


class Followers(NamedTuple):
    """The followers whose memories are the entries of `core.Memory`; None: there is no such one."""

    policy: Follower | None = None
    sampler: Follower | None = None
    log_probs: Follower | None = None

    def init(self, state: State, headroom: int) -> State:
        """Returns the state with the memories of all followers, before the first new token."""
        # Every leaf is batch-first, so rows refill, permute and resume with the state.
        memories = (None if follower is None else follower.init(state, headroom) for follower in self)
        return state._replace(memory=Memory(*memories))

    def update(self, state: State, result: RoundResult, committed: Int[Array, " B"]) -> State:
        """Tells all followers of a round, whose first `committed` tokens were committed."""
        pairs = zip(self, state.memory, strict=True)
        memories = (
            old if follower is None else follower.update(state, old, result, committed) for follower, old in pairs
        )
        return state._replace(memory=Memory(*memories))


def followers(
    sampler: Sampler, vocab: int, top_log_probs: int | None = None, policy: Policy | None = None
) -> Followers:
    """Makes the followers of a decoder; the arguments are those of `speculative`."""
    return Followers(
        None if policy is None else _of_policy(policy),
        samplers.follower(sampler, vocab),
        None if top_log_probs is None else log_probs.follower(top_log_probs),
    )


def _of_policy(policy: Policy) -> Follower:
    def init(state: State, headroom: int) -> Any:
        return policy.init(state.request.policy, Prompt(state.tokens, state.length))

    def update(state: State, memory: Any, result: RoundResult, committed: Int[Array, " B"]) -> Any:
        return policy.update(state.request.policy, memory, result.draft, result.verdict, committed)

    return Follower(init, update)
