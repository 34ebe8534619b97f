"""What is sampled from, and the functions that make it of logits."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.base.language_model import Prompt


class Law(NamedTuple):
    """A distribution over the next token at each of several positions, after warping.

    Exactly one of the first two is given: a point mass needs no vocabulary-sized array, so greedy decoding has none.

    Attributes:
        log_probs: log probabilities, float32, normalised; -inf where the probability is 0.
        tokens: the certain token, where the law is a point mass; -1 where no token is allowed (log_probs are then NaN).
        soft: beside either, for a rule that asks how far a guess is from the best: what is sampled from, but where
            the temperature is 0 as it was before all mass moved to the likeliest token. Log probabilities up to a
            constant, so logits will do; None unless asked for (`warp.greedy(soft=True)`, `warp.sampling(soft=True)`).
        greedy: beside log_probs and soft: the rows at temperature 0.
    """

    log_probs: Float[Array, "batch step vocab"] | None = None
    tokens: Int[Array, "batch step"] | None = None
    soft: Float[Array, "batch step vocab"] | None = None
    greedy: Bool[Array, " batch"] | None = None


class Prefix(NamedTuple):
    """What precedes each position of a pass: the committed row, then the guesses that lead to the position.

    For a row [a b | c d] (the prompt a b) and the guesses x y behind it, the positions after d, x and y have
    start 2, row.length 4, guesses [x y], seen [[0 0] [1 0] [1 1]].

    Attributes:
        row: the committed tokens; an encoder-decoder's are the decoder's, without the encoder's prompt.
        start: length of the row before its first new token.
        guesses: tokens behind the committed ones; None where there are none.
        seen: `seen[t, j]` says that guess j precedes position t (a chain: j < t; a tree: its ancestors).
    """

    row: Prompt
    start: Int[Array, " batch"]
    guesses: Int[Array, "batch guesses"] | None = None
    seen: Bool[Array, "step guesses"] | None = None


class Stage(Protocol):
    def __call__(
        self, controls: Any, logits: Float[Array, "batch step vocab"], prefix: Prefix | None
    ) -> Float[Array, "batch step vocab"]:
        """A part of a warp (`warp.chain`): logits to logits, float32; -inf for a token that may not be said."""
        ...


class Warp(Protocol):
    def __call__(self, controls: Any, logits: Float[Array, "batch step vocab"], prefix: Prefix | None = None) -> Law:
        """Turns logits into the law that is sampled from.

        `controls` holds its traced values. Decoders always give the prefix; only penalties read it.
        """
        ...


class ToLaw(Protocol):
    def __call__(
        self,
        logits: Float[Array, "batch step vocab"],
        guesses: Int[Array, "batch guesses"] | None = None,
        seen: Bool[Array, "step guesses"] | None = None,
    ) -> Law:
        """A warp with its controls and the committed row filled in.

        Logits of another width are fitted to the target's vocabulary. `guesses` follow the committed row, and position
        t is behind those that `seen[t]` marks; see `Prefix`. A drafter that does not say what it guessed so far stays
        exact, but is penalised only for what is committed.
        """
        ...
