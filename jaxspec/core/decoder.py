"""The decoder, which runs rounds: its request, the state from round to round, its reports, and who
is told of them.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.distribution import Distribution
from jaxspec.core.draft import Draft, Verdict
from jaxspec.core.language_model import Before, Cache, Forward, Keys, Params, Prompt


class Weights(NamedTuple):
    """The parameters of target and drafter. `draft` is None for a drafter without parameters."""

    target: Params
    draft: Params = None


class Caches(NamedTuple):
    """The mirror of `Weights`: the target's cache, and the drafter's state (its cache, and whatever
    else it keeps).
    """

    target: Cache
    draft: Any = None

    def before(self, length: Int[Array, " batch"], width: int, *, drafts: bool = True) -> Before:
        """Returns what `DecoderInit` goes on from, in rows whose first `length` tokens the caches
        were made for.

        The last of these is read again. At most `width` tokens follow the others; without `drafts`
        no drafter goes on.
        """
        return Before(self if drafts else self._replace(draft=None), length - 1, width)


class TargetPass(NamedTuple):
    """The target's pass over a draft."""

    # these two: its outputs at every fed token, and the distribution there
    forward: Forward
    distribution: Distribution
    # positions after which nothing can be generated: see `round.unusable`
    unusable: Bool[Array, "B T"]


class RoundResult(NamedTuple):
    """The result of one round."""

    draft: Draft  # the draft that was judged
    verdict: Verdict  # the rule's verdict; its path is cut to the depth of the tree
    # the accepted draft tokens and the one after them, `verdict.num_accepted + 1` of them real
    tokens: Int[Array, "B depth+1"]
    target: TargetPass  # the target's pass
    # after the pass; the target's holds the accepted path right after the committed row, and is to
    # be rewound to what is committed of it
    caches: Caches


class Request(NamedTuple):
    """The request of each row; all traced, all batch-first.

    Attributes:
        keys: one PRNG key per row.
        sampling_params: the traced values of the sampler.
        max_new_tokens: the most of each row.
        eos: ids that end a row, padded with -1.
        draft_sampling_params: the values for the drafter's distributions; None for the target's
            own.
        policy: the values of the draft-length policy.
    """

    keys: Keys
    sampling_params: Any
    max_new_tokens: Int[Array, " batch"]
    eos: Int[Array, "batch ends"]
    draft_sampling_params: Any = None
    policy: Any = None


class Stats(NamedTuple):
    """Counts per row; a finished row counts no further.

    Attributes:
        rounds: passes of the target after prefill.
        drafted: draft tokens that were verified: the real ones, not gamma times rounds; for a row
            that may generate r more tokens at most r - 1 on a path, since the last comes with the
            pass.
        accepted: draft tokens that were emitted.
        emitted: new tokens, the first one (from prefill's own logits) included.
    """

    rounds: Int[Array, " batch"]
    drafted: Int[Array, " batch"]
    accepted: Int[Array, " batch"]
    emitted: Int[Array, " batch"]

    @property
    def acceptance_rate(self) -> Float[Array, " batch"]:
        """accepted / drafted, 0 where nothing was drafted: 6 of 8 is 0.75.

        Not the paper's alpha: draft tokens after a round's first rejection count as drafted but are
        never tested.
        """
        return self.accepted / jnp.maximum(self.drafted, 1)

    @property
    def tokens_per_round(self) -> Float[Array, " batch"]:
        """(emitted - 1) / rounds, or 0 without rounds: prefill's token costs no round."""
        return jnp.maximum(self.emitted - 1, 0) / jnp.maximum(self.rounds, 1)


class Failure(enum.IntEnum):
    """Why a row ended early; a row that did not has 0."""

    LOGITS = 1  # the target's logits were not finite, or the sampler allowed no token
    # the acceptance rule accepted more than was drafted, or chose a number that is not a token
    RULE = 2


class Finish(enum.IntEnum):
    """Why a row ended, in lower case the names that users see; a row that has not ended has 0."""

    # its last token is one of its end tokens, also where that is the last one that the limit allows
    EOS = 1
    LENGTH = 2  # it has as many tokens as it may have
    STOP = 3  # its text holds a stop string
    FAILURE = 4  # see `Failure`


class LogProbs(NamedTuple):
    """The target's log probabilities of each row's new tokens, every one at the position where it
    stands; float32.

    Whether a token was accepted, drawn from a residual, a bonus or prefill's makes no difference:
    these are logarithms of the target's probability of it, given what precedes it. Padding is zero.

    Attributes:
        raw: under the softmax of the model's logits, without temperature, penalties or bans.
        sampled: under the distribution that tokens are drawn from, after penalties, bans,
            temperature and truncation. At temperature 0 that is a point mass: 0 for its token. A
            rule that is not exact may accept tokens that this distribution excludes: -inf.
        top_tokens, top_raw: the most probable tokens of each position, the best first, and their
            raw log probabilities.
    """

    raw: Float[Array, "batch new"]
    sampled: Float[Array, "batch new"]
    top_tokens: Int[Array, "batch new top"]
    top_raw: Float[Array, "batch new top"]

    def window(self, start: int, end: int) -> LogProbs:
        """Takes those of the tokens from `start` to `end`."""
        return LogProbs(*(x[:, start:end] for x in self))


class Memory(NamedTuple):
    """The memories of a generation's followers (`core.Follower`), every leaf batch-first. None: the
    generation has no such follower.

    Attributes:
        policy: the state of the draft-length policy.
        sampler: the logits processors' memory of the committed row, a tuple with an entry for each.
        log_probs: the new tokens' log probabilities, [batch, headroom].
    """

    policy: Any = None
    sampler: Any = None
    log_probs: LogProbs | None = None


class State(NamedTuple):
    """Everything a decoder carries from round to round. Every leaf has the batch as its first axis.

    So rows can be reordered, dropped or replaced: `token_rows.take_rows`, `token_rows.put_rows`.
    """

    # evolving
    tokens: Int[Array, "batch capacity"]
    length: Int[Array, " batch"]
    caches: Caches
    memory: Memory
    # constant
    start: Int[Array, " batch"]  # length of the row before its first new token
    request: Request
    # outcome
    done: Bool[Array, " batch"]
    failed: Int[Array, " batch"]  # a `Failure`; 0 for none
    stats: Stats


class TraceNumbers(NamedTuple):
    """The numbers of a round's draft tokens, as its rule compared them; NaN in padding.

    p and q are probabilities in the distributions that tokens are drawn from, after temperature and
    truncation. So at temperature 0 they are 0 or 1.

    Attributes:
        q: the drafter's probability of the draft token; 1 for one that was not drawn.
        p: the target's probability of it.
        r, acceptance, residual_mass: the numbers of `core.Trials`.
        entropy: the entropy of the drafter's distribution there, over log V, from 0 to 1. At
            temperature 0 it is that of its distribution at temperature 1, as for
            `policies.entropy`. NaN where the drafter keeps none.
        layers: the target's layers that made the distribution (`drafters.saturated_exit`); NaN with
            other drafters.
    """

    q: Float[Array, "batch *rounds node"]
    p: Float[Array, "batch *rounds node"]
    r: Float[Array, "batch *rounds node"]
    acceptance: Float[Array, "batch *rounds node"]
    residual_mass: Float[Array, "batch *rounds node"]
    entropy: Float[Array, "batch *rounds node"]
    layers: Float[Array, "batch *rounds node"]


class RoundInfo(NamedTuple):
    """The report of one round; never carried. `decode.loop.Trace` has the same fields, with an axis
    for the rounds.

    Attributes:
        draft, draft_length: the draft tokens, and how many of them were verified (0 for a finished
            row; see `Stats`). Of a tree these need not be the first ones: `tree.in_tree(parent)`.
        num_accepted: draft tokens that the rule accepted.
        num_committed: tokens committed, after cutting at an end token and at the limit.
        num_tested: draft tokens that were tested.
        parent, path: a tree's parents and accepted path, as in `Draft` and `Verdict`; None for a
            chain.
        numbers: the numbers of the draft tokens; None unless they were asked for.
    """

    draft: Int[Array, "batch *rounds node"]
    draft_length: Int[Array, " batch *rounds"]
    num_accepted: Int[Array, " batch *rounds"]
    num_committed: Int[Array, " batch *rounds"]
    num_tested: Int[Array, " batch *rounds"]
    parent: Int[Array, "batch *rounds node"] | None = None
    path: Int[Array, "batch *rounds node"] | None = None
    numbers: TraceNumbers | None = None


class FollowerInit(Protocol):
    def __call__(self, state: State, headroom: int) -> Any:
        """Makes the memory of rows without new tokens, every leaf batch-first.

        `headroom`: tokens that a row may grow by.
        """
        ...


class FollowerUpdate(Protocol):
    def __call__(
        self, state: State, memory: Any, result: RoundResult, committed: Int[Array, " batch"]
    ) -> Any:
        """Takes in a round: the state after it, its result, and how many of its tokens were
        committed.
        """
        ...


class Follower(NamedTuple):
    """Remembers something of the rounds of each row: a policy, log probabilities, the processors of
    a sampler.

    Its memory lies in `State.memory`. So it is batch-first, and rows are reordered, refilled and
    resumed with theirs.
    """

    init: FollowerInit
    update: FollowerUpdate


class DecoderInit(Protocol):
    def __call__(
        self,
        weights: Weights,
        prompt: Prompt,
        request: Request,
        headroom: int,
        before: Before | None = None,
        spare: int = 0,
    ) -> State:
        """Reads the prompt and commits the first new token, drawn from prefill's own logits.

        `headroom`: tokens that a row may grow by; `token_rows.headroom` computes it. `before`:
        `Caches` of the beginning of the prompts, of one row for all of them or of each, which is
        then not read again. `spare`: tokens that may be taken back besides a round's.
        """
        ...


class DecoderStep(Protocol):
    def __call__(self, weights: Weights, state: State) -> tuple[State, RoundInfo]:
        """Runs one round: one pass of the target. Finished rows are frozen."""
        ...


class Decoder(NamedTuple):
    """A way to generate; `autoregressive` and `speculative` return one, `generate` and `stream` run
    either.

    Attributes:
        gamma: most draft tokens that a round can accept (0 for plain decoding).
        nodes: most draft tokens of a round; gamma for a chain.
        trees: whether its drafts are trees.
        exact: whether its text has the target's distribution.
        numbers: whether its rounds report `TraceNumbers`.
    """

    init: DecoderInit
    step: DecoderStep
    gamma: int = 0
    nodes: int = 0
    trees: bool = False
    exact: bool = True
    numbers: bool = False
