"""The policy, which decides how many tokens are drafted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distribution import Distribution
from jaxspec.core.draft import Draft, Verdict
from jaxspec.core.language_model import Params, Prompt


class PolicyInit(Protocol):
    def __call__(self, params: Params, prompt: Prompt) -> Any:
        """Makes the policy's state, every leaf batch-first."""
        ...


class PolicyMaxDraft(Protocol):
    def __call__(
        self, params: Params, state: Any, gamma: int, remaining: Int[Array, " batch"]
    ) -> Int[Array, " batch"]:
        """Most draft tokens on a path of each row in the round that begins; the decoder cuts it to
        0..gamma.

        `remaining`: the new tokens that each row may still get; 0 for a row that has ended, which
        drafts nothing, whatever is returned for it.
        """
        ...


class PolicyShouldContinue(Protocol):
    def __call__(
        self,
        params: Params,
        state: Any,
        index: int | Int[Array, ""],
        confidences: Float[Array, "batch draft"],
    ) -> Bool[Array, " batch"]:
        """Says whether each row drafts another token after token number `index`; `confidences`
        after that are 0.
        """
        ...


class PolicyShorten(Protocol):
    def __call__(
        self, params: Params, state: Any, draft: Draft, remaining: Int[Array, " batch"]
    ) -> Int[Array, " batch"]:
        """Most draft tokens on a path of each row that the target reads, once it is known how many
        were drafted.

        `remaining` is as above. It must not depend on tokens that were drawn, nor on a length that
        does: see `Policy`.
        """
        ...


class PolicyUpdate(Protocol):
    def __call__(
        self,
        params: Params,
        state: Any,
        draft: Draft,
        verdict: Verdict,
        num_committed: Int[Array, " batch"],
    ) -> Any:
        """Takes in the outcome of a round: the draft as it was judged, the verdict, how many tokens
        were committed.
        """
        ...


class Policy(NamedTuple):
    """Decides how many tokens to draft, row by row, from the row's past rounds. Text stays exact.

    The distribution of a draft token may end the draft after it, and so might its value; but a
    token that was drawn is always judged. Leaving a token out because of its value would bias the
    text.

    Attributes:
        confidence: read off the distribution of each draft token; None if only `max_draft` decides.
        should_continue: the function that ends a draft; None with `confidence`.
        shorten: the function that cuts a whole draft; None: the target reads all of it.
    """

    init: PolicyInit
    max_draft: PolicyMaxDraft
    update: PolicyUpdate
    confidence: Callable[[Distribution], Float[Array, " batch"]] | None = None
    should_continue: PolicyShouldContinue | None = None
    shorten: PolicyShorten | None = None


class BoundPolicy(NamedTuple):
    """A policy with its numbers, as the factories of `policies` return it.

    Attributes:
        functions: static: a decoder is made from these, so that other numbers compile nothing.
        params: traced numbers, with an entry for each row or one for all; they become
            `Request.policy`.
        name: its name in tables.
    """

    functions: Policy
    params: Params = None
    name: str = ""
