"""Followers of a generation: they are told of every round, and remember what they need of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jaxtyping import Array, Int

if TYPE_CHECKING:
    from jaxspec.core.decoder import State
    from jaxspec.core.round import RoundResult


class FollowerInit(Protocol):
    def __call__(self, state: State, headroom: int) -> Any:
        """Makes the memory of rows without new tokens, every leaf batch-first.

        `headroom`: tokens that a row may grow by.
        """
        ...


class FollowerUpdate(Protocol):
    def __call__(self, state: State, memory: Any, result: RoundResult, committed: Int[Array, " batch"]) -> Any:
        """Takes in a round: the state after it, its result, and how many of its tokens were committed."""
        ...


class Follower(NamedTuple):
    """Remembers something of the rounds of each row: a policy, log probabilities, the processors of a sampler.

    Its memory lies in `State.memory`. So it is batch-first, and rows are reordered, refilled and resumed with theirs.
    """

    init: FollowerInit
    update: FollowerUpdate
