"""The types of jaxspec: one NamedTuple of pure functions per concept, one Protocol per slot. No logic.

Axis letters, here and in every file:
    B batch, P prompt, T step (tokens fed in one pass), S capacity of a buffer, G gamma (draft length),
    V vocabulary, L layers, H query heads, K key-value heads, D head dimension, M model dimension.

A *row* is what the decoder side of a model reads: for a decoder-only model the prompt and everything generated
after it, for an encoder-decoder its start token and everything generated after that. `tokens[:length]` of a row are
committed; caches hold the first `length - 1` of them ("one token behind"), so the last committed token is the first
one fed in the next pass. Positions and lengths always count within the row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

Params = Any  # any pytree of arrays
Cache = Any  # a pytree; opaque outside the LanguageModel that made it
Keys = Key[Array, " batch"]  # one PRNG key per row


class Prompt(NamedTuple):
    """Right-padded rows of token ids: what a model is prompted with, and what has been committed so far.

    Attributes:
        tokens: ids; entries at or past a row's length are padding and are never read.
        length: number of real tokens of each row, at least 1.
    """

    tokens: Int[Array, "batch prompt"]
    length: Int[Array, " batch"]


class Forward(NamedTuple):
    """What a model says about each position it was fed.

    Attributes:
        logits: unnormalised log probabilities of the next token, always float32.
        features: the activations the language-model head reads (drafters that look inside the target use them).
    """

    logits: Float[Array, "batch step vocab"]
    features: Float[Array, "batch step dim"]


class Tree(NamedTuple):
    """The shape of a token tree that is fed in one pass; node 0 is its root. A chain is `tree=None`.

    Attributes:
        depth: distance of each node from the root; its position is the row's cached length plus this.
        ancestors: `ancestors[i, j]` says that node i may attend to node j (itself included).
    """

    depth: Int[Array, " step"]
    ancestors: Bool[Array, "step step"]


class Prefill(Protocol):
    def __call__(self, params: Params, prompt: Prompt, capacity: int) -> tuple[Forward, Cache]:
        """Reads the prompt (an encoder-decoder: encodes it and feeds the start token) into an empty cache.

        Returns the Forward of each row's last token (step = 1), and a cache that holds the whole row and has room
        for `capacity` tokens in all.
        """
        ...


class Extend(Protocol):
    def __call__(
        self, params: Params, cache: Cache, tokens: Int[Array, "batch step"], tree: Tree | None = None
    ) -> tuple[Forward, Cache]:
        """Feeds `step` tokens at each row's own length; the cache grows by `step`."""
        ...


class Rewind(Protocol):
    def __call__(
        self, cache: Cache, length: Int[Array, " batch"], path: Int[Array, "batch keep"] | None = None
    ) -> Cache:
        """Forgets all but the first `length` tokens of each row: an assignment of lengths, no data moves.

        With `path`, the tokens to keep were fed as a tree: `path[b, i]` is the position, in the cache, of the entry
        that belongs at position `length[b] - keep + i`; those entries are gathered there first.
        """
        ...


class LanguageModel(NamedTuple):
    """An autoregressive model as three pure functions; the cache is opaque outside them.

    Attributes:
        prefill, extend, rewind: see the protocols.
        vocab_size: number of token ids (the width of the logits).
        start_token: None for a decoder-only model, whose row begins with the prompt; an encoder-decoder's row begins
            with this one token, and the prompt goes to the encoder.
        max_positions: longest row the model can hold, None if nothing limits it.
        max_prompt: longest prompt an encoder accepts, None if nothing (but max_positions) limits it.
    """

    prefill: Prefill
    extend: Extend
    rewind: Rewind
    vocab_size: int
    start_token: int | None = None
    max_positions: int | None = None
    max_prompt: int | None = None


class Law(NamedTuple):
    """A distribution over the next token at each of several positions, after warping.

    Exactly one of the first two is given: a point mass needs no vocabulary-sized array, so greedy decoding has none.

    Attributes:
        log_probs: log probabilities, float32, normalised; -inf where the probability is 0.
        tokens: the certain token, where the law is a point mass; -1 where no token is allowed (log_probs are then NaN).
        soft: beside tokens, for a rule that asks how far a guess is from the best: the log probabilities before all
            mass moved to the certain token. Not what is sampled from.
    """

    log_probs: Float[Array, "batch step vocab"] | None = None
    tokens: Int[Array, "batch step"] | None = None
    soft: Float[Array, "batch step vocab"] | None = None


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
        reads_soft: whether `signal` reads `Law.soft` of a greedy law.
    """

    init: PolicyInit
    limit: PolicyLimit
    update: PolicyUpdate
    signal: Callable[[Law], Float[Array, " batch"]] | None = None
    go_on: PolicyGoOn | None = None
    params: Params = None
    reads_soft: bool = False


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
        drafted: guesses that were made (the real ones, not gamma times rounds).
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
        draft: the guesses, and how many were real (0 for a finished row).
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


class Model(NamedTuple):
    """A language model with its parameters and its tokenizer, as `jaxspec.load` returns it."""

    lm: LanguageModel
    params: Params
    tokenizer: Any = None
    config: Any = None
    name: str = ""
