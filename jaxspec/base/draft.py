"""A draft, and what an acceptance rule says of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, Int

from jaxspec.base.language_model import Keys
from jaxspec.base.law import Law


class Draft(NamedTuple):
    """A drafter's guess of the next tokens of each row.

    Attributes:
        tokens: the guesses x1..xG.
        log_probs: what each was drawn from, after the drafter's own warping; None for a deterministic proposal,
            which is a point mass (an argmax or a look-up is *not* a sample of its softmax).
        length: how many guesses of each row are real; the rest is padding.
        signals: what the draft-length policy read off the law of each guess (`Policy.signal`); None where nobody
            asked, or the drafter has no laws.
        gumbel: plain sampling's own noise at the guesses, from a drafter that has drawn it (`drafters.model(lm,
            coupled=True)`), so that `accept.coupled` need not draw it again.
    """

    tokens: Int[Array, "batch draft"]
    log_probs: Float[Array, "batch draft vocab"] | None
    length: Int[Array, " batch"]
    signals: Float[Array, "batch draft"] | None = None
    gumbel: Float[Array, "batch draft vocab"] | None = None


class Verdict(NamedTuple):
    """What an acceptance rule decided.

    Attributes:
        num_accepted: how many guesses of each row are kept, 0..draft.length.
        next_token: the token after them: the residual sample at the first rejection, or the bonus token.
    """

    num_accepted: Int[Array, " batch"]
    next_token: Int[Array, " batch"]


class AcceptRule(Protocol):
    def __call__(self, keys: Keys, position: Int[Array, " batch"], draft: Draft, target: Law) -> Verdict:
        """Judges a draft. `target` has one position more than the draft; `position` is each row's length."""
        ...
