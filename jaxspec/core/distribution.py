"""The distribution that tokens are drawn from, and the functions that make it of logits."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.language_model import Prompt


class Distribution(NamedTuple):
    """A distribution over the next token at each of several positions, after temperature and
    truncation.

    Exactly one of the first two is given. A point mass needs no array over the vocabulary; greedy
    decoding makes none.

    Attributes:
        log_probs: log probabilities, float32, normalised; -inf where the probability is 0.
        tokens: the certain token, where the distribution is a point mass; -1 where no token is
            allowed (log_probs are then NaN).
        logits: the logits that it was made from, after penalties and bans, before temperature and
            truncation. For rules and policies that ask, at temperature 0, how far a token is from
            the best one.
        greedy: the rows at temperature 0; None where `tokens` are given, which all rows then are.
        estimate: a drafter's own estimate of the probability that the token which it draws here is
            accepted, made before it draws; None: it makes none.
    """

    log_probs: Float[Array, "batch step vocab"] | None = None
    tokens: Int[Array, "batch step"] | None = None
    logits: Float[Array, "batch step vocab"] | None = None
    greedy: Bool[Array, " batch"] | None = None
    estimate: Float[Array, " batch"] | None = None


class Preceding(NamedTuple):
    """The tokens before each position of a pass: the committed row, then the draft tokens that lead
    to the position.

    For a row [a b | c d] (the prompt a b) and the draft tokens x y after it, the positions after d,
    x and y have start 2, row.length 4, draft_tokens [x y], seen `[[0, 0], [1, 0], [1, 1]]`.

    Attributes:
        row: the committed tokens; an encoder-decoder's are the decoder's, without the encoder's
            prompt.
        start: length of the row before its first new token.
        draft_tokens: tokens after the committed ones; None if nothing is drafted yet.
        seen: `seen[b, t, j]` says that draft token j precedes position t of row b (a chain: j < t;
            a tree: its ancestors); batch may be 1.
        memory: the processors' memory of the committed row. None: they read the row. A processor
            with a memory finds its own here, see `core.Processor`.
    """

    row: Prompt
    start: Int[Array, " batch"]
    draft_tokens: Int[Array, "batch nodes"] | None = None
    seen: Bool[Array, "#batch step nodes"] | None = None
    memory: Any = None


class LogitsProcessor(Protocol):
    def __call__(
        self, values: Any, logits: Float[Array, "batch step vocab"], preceding: Preceding | None, /
    ) -> Float[Array, "batch step vocab"]:
        """Logits to logits, float32; -inf for a token that must not be generated. A part of
        `sampling.chain`.

        `values` are the sampler's parameters; of the caller's own processors in `generate`, those
        of `BoundProcessor`.
        """
        ...


class Sampler(Protocol):
    def __call__(
        self,
        sampling_params: Any,
        logits: Float[Array, "batch step vocab"],
        preceding: Preceding | None = None,
    ) -> Distribution:
        """Turns logits into the distribution that tokens are drawn from.

        `sampling_params` holds the traced values. Decoders always give `preceding`; only penalties
        read it.
        """
        ...


class ToDistribution(Protocol):
    def __call__(
        self,
        logits: Float[Array, "batch step vocab"],
        draft_tokens: Int[Array, "batch nodes"] | None = None,
        seen: Bool[Array, "#batch step nodes"] | None = None,
    ) -> Distribution:
        """A sampler with its parameters and the committed row filled in.

        Logits of another width are fitted to the target's vocabulary. `draft_tokens` follow the
        committed row, and position t is after those that `seen[:, t]` marks; see `Preceding`. A
        drafter that does not pass its earlier draft tokens stays exact, but its penalties count
        committed tokens only.
        """
        ...
