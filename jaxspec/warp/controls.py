"""The traced values of a warp."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Controls(NamedTuple):
    """The traced values of a warp, one entry per row; None for those that no stage of the warp reads.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens (all that tie with the k-th); a value >= the vocabulary keeps all.
        top_p: keep the fewest tokens, most probable first, whose mass reaches this; 1 keeps all.
        min_p: keep the tokens that are at least this many times as probable as the most probable one; 0 keeps all.
        bias: added to the logits; -inf bans a token.
        repetition: logits of tokens in the row are divided by this if positive, multiplied if negative; 1 is none.
        presence: subtracted from the logits of tokens that were generated; 0 is none.
        frequency: subtracted from a token's logit once for each time it was generated; 0 is none.
    """

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]
    min_p: Float[Array, " batch"] | None = None
    bias: Float[Array, "batch vocab"] | None = None
    repetition: Float[Array, " batch"] | None = None
    presence: Float[Array, " batch"] | None = None
    frequency: Float[Array, " batch"] | None = None
