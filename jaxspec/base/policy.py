"""What decides how many tokens are guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.base.draft import Draft, Verdict
from jaxspec.base.language_model import Params, Prompt
from jaxspec.base.law import Law


class PolicyInit(Protocol):
    def __call__(self, params: Params, prompt: Prompt) -> Any:
        """Makes the policy's state, one entry a row."""
        ...


class PolicyLimit(Protocol):
    def __call__(self, params: Params, state: Any, gamma: int) -> Int[Array, " batch"]:
        """Most guesses of each row in the round that begins; the decoder cuts it to 0..gamma."""
        ...


class PolicyGoOn(Protocol):
    def __call__(
        self, params: Params, state: Any, index: int | Int[Array, ""], signals: Float[Array, "batch draft"]
    ) -> Bool[Array, " batch"]:
        """Whether each row makes another guess after guess number `index`; `signals` behind that are 0."""
        ...


class PolicyUpdate(Protocol):
    def __call__(self, params: Params, state: Any, draft: Draft, verdict: Verdict, kept: Int[Array, " batch"]) -> Any:
        """Told what came of a round: the draft as it was judged, the verdict, and how many tokens were committed."""
        ...


class Policy(NamedTuple):
    """Decides how many tokens to guess, row by row, from what a row has seen so far; text stays exact.

    What a guess was drawn from may end the draft behind it, and so might what was drawn; but a guess that was drawn is
    always judged. Leaving one out for its own value would bias the text.

    Attributes:
        init, limit, update: see the protocols.
        signal: read off the law of each guess; None if only `limit` decides.
        go_on: see its protocol; None with `signal`.
        params: traced values: numbers, or arrays with a row for each prompt or one row for all (`Request.policy` has a
            row for each).
            Decoders are made from a policy without them, so that another threshold compiles nothing.
        reads_soft: whether `signal` reads `Law.soft`, and so must be given it.
    """

    init: PolicyInit
    limit: PolicyLimit
    update: PolicyUpdate
    signal: Callable[[Law], Float[Array, " batch"]] | None = None
    go_on: PolicyGoOn | None = None
    params: Params = None
    reads_soft: bool = False
