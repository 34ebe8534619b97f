"""What runs rounds: what it is asked, what it carries from round to round, and what it reports."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.base.language_model import Cache, Keys, Params, Prompt


class Request(NamedTuple):
    """What is asked of each row; all traced.

    Attributes:
        controls: the traced values of the warp.
        limit: most new tokens.
        eos: ids that end a row (shared by all rows); -1 where there is none.
        draft_controls: those of the drafter's warp, whose text they do not change; None for the target's own.
        policy: the values of the draft-length policy.
    """

    controls: Any
    limit: Int[Array, " batch"]
    eos: Int[Array, " ends"]
    draft_controls: Any = None
    policy: Any = None


class Weights(NamedTuple):
    """The parameters of both parties; `draft` is None where the drafter has none."""

    target: Params
    draft: Params = None


class Stats(NamedTuple):
    """Counts per row; a finished row counts no further.

    Attributes:
        rounds: passes of the target after prefill.
        drafted: guesses that were judged: the real ones, not gamma times rounds, and none in vain: of a row that may
            say r more tokens at most r - 1, since the last comes with the pass.
        accepted: guesses that were emitted.
        emitted: new tokens, the first one (from prefill's own logits) included.
    """

    rounds: Int[Array, " batch"]
    drafted: Int[Array, " batch"]
    accepted: Int[Array, " batch"]
    emitted: Int[Array, " batch"]

    @property
    def acceptance_rate(self) -> Float[Array, " batch"]:
        """accepted / drafted, 0 where nothing was drafted: 6 of 8 is 0.75.

        Not the paper's alpha: guesses after a round's first rejection count as drafted but never get a trial.
        """
        return self.accepted / jnp.maximum(self.drafted, 1)

    @property
    def tokens_per_round(self) -> Float[Array, " batch"]:
        """(emitted - 1) / rounds, 0 where there was no round: prefill's token costs no round."""
        return (self.emitted - 1) / jnp.maximum(self.rounds, 1)


class DecodeState(NamedTuple):
    """Everything a decoder carries from round to round."""

    # evolving
    tokens: Int[Array, "batch capacity"]
    length: Int[Array, " batch"]
    cache: Cache
    drafter: Any
    policy: Any
    # constant
    start: Int[Array, " batch"]  # length of the row before its first new token
    request: Request
    # outcome
    done: Bool[Array, " batch"]
    failed: Bool[Array, " batch"]  # the target's logits were not finite, or the warp allowed no token
    stats: Stats


class RoundInfo(NamedTuple):
    """What happened in one round; reported, never carried.

    Attributes:
        draft: the guesses, and how many were judged (0 for a finished row; see `Stats`).
        num_accepted: guesses kept by the rule.
        kept: tokens committed, after cutting at an end token and at the limit.
    """

    draft: Int[Array, "batch gamma"]
    draft_length: Int[Array, " batch"]
    num_accepted: Int[Array, " batch"]
    kept: Int[Array, " batch"]


class DecoderInit(Protocol):
    def __call__(self, keys: Keys, weights: Weights, prompt: Prompt, request: Request, room: int) -> DecodeState:
        """Reads the prompt and commits the first new token, drawn from prefill's own logits."""
        ...


class DecoderStep(Protocol):
    def __call__(self, keys: Keys, weights: Weights, state: DecodeState) -> tuple[DecodeState, RoundInfo]:
        """One round: one pass of the target. Finished rows are frozen."""
        ...


class Decoder(NamedTuple):
    """A way to generate; `autoregressive` and `speculative` return one, `generate` and `stream` run either.

    Attributes:
        init, step: see the protocols.
        gamma: most guesses of a round (0 for plain decoding).
    """

    init: DecoderInit
    step: DecoderStep
    gamma: int
