"""What guesses tokens, and the budget that it is given for a round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.base.draft import Draft, Verdict
from jaxspec.base.language_model import Forward, Keys, LanguageModel, Model, Params, Prompt
from jaxspec.base.law import Law, ToLaw


class Budget(NamedTuple):
    """How far the drafts of a round may go: what a `Policy` has decided, and what it will be asked on the way.

    Attributes:
        limit: most guesses of each row, 0..gamma; 0 for a finished row. The decoder cuts drafts to it.
        signal: what to read off the law of each guess; None if the limit is all there is.
        go_on: (index of a guess, the signals so far) -> whether each row makes another guess after it.
    """

    limit: Int[Array, " batch"]
    signal: Callable[[Law], Float[Array, " batch"]] | None = None
    go_on: Callable[[int | Int[Array, ""], Float[Array, "batch draft"]], Bool[Array, " batch"]] | None = None


class DraftInit(Protocol):
    def __call__(self, params: Params, prompt: Prompt, room: int, forward: Forward) -> Any:
        """Makes the drafter's state. `room`: tokens a row may grow by; `forward`: the target's, on the last token."""
        ...


class Propose(Protocol):
    def __call__(
        self,
        keys: Keys,
        params: Params,
        state: Any,
        context: Prompt,
        gamma: int,
        to_law: ToLaw,
        budget: Budget | None = None,
    ) -> tuple[Draft, Any]:
        """Guesses up to `gamma` tokens that follow the committed `context`, in the target's vocabulary.

        With a `budget`, guesses that it does not allow need not be made: a drafter whose guesses cost something stops
        where no row may go on, one whose guesses are free may ignore it.
        """
        ...


class Commit(Protocol):
    def __call__(self, params: Params, state: Any, context: Prompt, verdict: Verdict, forward: Forward) -> Any:
        """Told what was decided: `context` is the row after the round, `forward` the target's pass over the draft."""
        ...


class Drafter(NamedTuple):
    """Guesses tokens.

    Attributes:
        init, propose, commit: see the protocols.
        lm: the language model that drafts, for the checks of the front door; None if there is none.
        params: what the functions take as their parameters (tables, weights); None where they take none. Decoders
            are made from a drafter without them (`params=None, models=()`), and get them as `Weights.draft`.
        models: those that it was made from, if any, to be checked against the target.
        abstains: whether it may propose nothing; where it does so for every row, the target is fed one token a row.
    """

    init: DraftInit
    propose: Propose
    commit: Commit
    lm: LanguageModel | None = None
    params: Params = None
    models: tuple[Model, ...] = ()
    abstains: bool = False
