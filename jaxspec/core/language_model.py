"""The language model: pure functions over a prompt and an opaque cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, Float, Int, Key

Params = Any
"""Any pytree of arrays."""

Cache = Any
"""A pytree whose every leaf has the batch as its first axis; opaque outside the LanguageModel that
made it.
"""

Keys = Key[Array, " batch"]
"""One PRNG key per row."""


class Prompt(NamedTuple):
    """Right-padded rows of token ids: a model's prompt, or the tokens committed so far.

    Attributes:
        tokens: ids; entries at or past a row's length are padding and are never read.
        length: number of real tokens of each row, at least 1.
        encoder: the input of an encoder-decoder's encoder: another `Prompt` of ids, or features of
            speech. Every leaf has the batch as its first axis. `tokens` then begin the decoder's
            row, from its start token on. With None, `tokens` go to the encoder, and the row begins
            with `Limits.start_token` and `Limits.begin`.
    """

    tokens: Int[Array, "batch prompt"]
    length: Int[Array, " batch"]
    encoder: Any = None

    @property
    def text(self) -> Prompt:
        """The ids that were given as text: an encoder's, where it reads ids."""
        if isinstance(self.encoder, Prompt):
            return self.encoder
        return Prompt(self.tokens, self.length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Before:
    """The caches of a party that has read the beginning of some rows, which are to be read further.

    The caches also know the first token that was not read. A drafter on hidden states keeps an
    entry for each position, made from the token after it, so it has all `start` entries.

    Attributes:
        state: the target's cache, or a drafter's state, after rows that agree with these in their
            first `start` + 1 tokens. What it holds of later tokens is not read. Every leaf has the
            batch as its first axis.
        start: how many tokens of each row need not be read again.
        width: most tokens that follow them in a row (static).
    """

    state: Any
    start: Int[Array, " batch"]
    width: int = dataclasses.field(metadata={"static": True})

    def of(self, state: Any) -> Before:
        """Returns the same start and width with another state: the draft model's, or a part of this
        one.
        """
        return dataclasses.replace(self, state=state)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Room:
    """The room that a cache is made with. Static: a pytree without leaves.

    Attributes:
        tokens: how many tokens a row holds, in all.
        rewind: the most tokens that are ever taken back, counted from the longest that a row has
            been since it was empty. None: any number; recurrent layers then remember every token's
            update. 0 makes caches smallest, for rows that are only read.

    >>> Room(tokens=40, rewind=6).larger(3)
    Room(tokens=43, rewind=9)
    """

    tokens: int
    rewind: int | None = None

    def larger(self, count: int) -> Room:
        """Adds room for `count` tokens that are fed to a row, and taken back."""
        return Room(self.tokens + count, None if self.rewind is None else self.rewind + count)


class Forward(NamedTuple):
    """The outputs of one pass of a model at each position it was fed.

    A compiled program does not compute those that are not read.

    Attributes:
        logits: unnormalised log probabilities of the next token, always float32. After prefill step
            = 1: each row's last token.
        features: the final hidden states, which the language-model head reads. After prefill: of
            every position of the row that was read. None where nothing reads them
            (`LanguageModel.inside` is None).
        taps: hidden states between layers, of those layers that the network was asked to tap, one
            after the other on the last axis (EAGLE-3, DFlash); None where it was asked for none.
            Positions as `features`.
        encoded: the encoder's output after an encoder-decoder's prefill, for a drafter with the
            same encoder; otherwise None.
    """

    logits: Float[Array, "batch step vocab"]
    features: Float[Array, "batch step dim"] = None  # type: ignore[assignment]
    taps: Float[Array, "batch step taps"] | None = None
    encoded: Float[Array, "batch prompt dim"] | None = None


class Prefill(Protocol):
    def __call__(self, params: Params, prompt: Prompt, room: Room) -> tuple[Forward, Cache]:
        """Reads the prompt (an encoder-decoder: encodes it and feeds the row's beginning) into an
        empty cache.

        Returns the logits of each row's last token (step = 1) and the features of all, and a cache
        that holds the whole row and has the `room`.
        """
        ...


class Extend(Protocol):
    def __call__(
        self,
        params: Params,
        cache: Cache,
        tokens: Int[Array, "batch step"],
        parent: Int[Array, "batch nodes"] | None = None,
        real: Int[Array, " batch"] | None = None,
    ) -> tuple[Forward, Cache]:
        """Feeds `step` tokens at each row's own length; the cache grows by `step`.

        With `real` the first `real` of each row's tokens are remembered, and the others are
        padding, whose outputs are garbage. A model that can take back any number of tokens may
        ignore it: a caller that gives `real` rewinds to the real tokens afterwards. There is no
        `real` with a tree.

        With `parent` the last `nodes` tokens are a token tree: these `step` ones, after nodes -
        step that earlier calls have fed and that lie at the end of the cache. `parent[b, i] < i` is
        the node that node i follows; -1: it follows the tokens before the tree. A node attends to
        those tokens, to its ancestors and to itself, and its position is the tree's start plus its
        depth (`jaxspec.core.tree`). None: each token follows the one before it.
        """
        ...


class Rewind(Protocol):
    def __call__(self, cache: Cache, length: Int[Array, " batch"]) -> Cache:
        """Forgets all but the first `length` tokens of each row: an assignment of lengths, no data
        moves.

        At most as many tokens are forgotten as the cache was made to take back (`Room.rewind`),
        counted from the most that the row ever had: see `kv_cache.can_rewind`. A round, a prefix
        and a chunk of a prompt stay within that.
        """
        ...


class Select(Protocol):
    def __call__(
        self, cache: Cache, start: Int[Array, " batch"], path: Int[Array, "batch depth"]
    ) -> Cache:
        """Moves the cache's entry `start + path[:, i]` to `start + i`, for every i: the accepted
        path of a tree.

        `path` increases along its real entries; what lies at the others is garbage, which a rewind
        then forgets. The lengths stay as they are.
        """
        ...


class Head(Protocol):
    def __call__(
        self, params: Params, features: Float[Array, "batch step dim"], raw: bool = False
    ) -> Float[Array, "batch step vocab"]:
        """The logits that belong to features: for callers that want some positions only, or compute
        features themselves. Equal to what `extend` gives at a position, up to rounding; `raw`
        leaves out the network's scale and soft cap of logits, for drafters with other ones.
        """
        ...


class Embed(Protocol):
    def __call__(
        self, params: Params, tokens: Int[Array, "batch step"]
    ) -> Float[Array, "batch step dim"]:
        """Rows of the embedding matrix, as they are stored: a network may scale them, or add
        positions, afterwards.
        """
        ...


class Parts(NamedTuple):
    """The parts of a stack of layers to run; static. A part that is skipped adds nothing to the
    residual stream.

    Attributes:
        attention: layers whose attention runs (of an encoder-decoder, that to the encoder's output,
            too), ascending.
        mlp: layers whose feed-forward block runs, ascending.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]


class Layers(NamedTuple):
    """A model's decoder layers, to be run in part: `extend` is embed, run all of them, features,
    and the head.

    Attributes:
        count: how many there are.
        embed: (params, cache, tokens, parent=None) -> what the first layer reads of tokens that
            `Extend` would feed.
        run: (params, cache, residual stream, `Parts`, parent=None) -> the stream after these, and
            the cache. Tokens lie where `Extend` would put them, and the cache grows as it does
            there; but only layers whose attention runs write keys and values.
        features: (params, residual stream) -> what the head reads: the final norm.
        sources: (layer, earlier layer) for each layer that attends to the keys of an earlier one.
    """

    count: int
    embed: Callable[..., Float[Array, "batch step dim"]]
    run: Callable[..., tuple[Float[Array, "batch step dim"], Cache]]
    features: Callable[[Params, Float[Array, "batch step dim"]], Float[Array, "batch step dim"]]
    sources: tuple[tuple[int, int], ...] = ()


class Encoder(NamedTuple):
    """The functions with which two encoder-decoders share an encoder (`drafters.share_encoder`).

    Attributes:
        params: a model's parameters -> those that `Forward.encoded` is made with.
        with_params: (a model's parameters, another model's encoder) -> the model's parameters with
            that encoder.
        prefill: (parameters, prompt, room, `Forward.encoded` of an encoder with the same
            parameters) -> as `Prefill`.
        is_shared: whether the model, as a drafter, reads the output of the target's encoder.
    """

    params: Callable[[Params], Params]
    with_params: Callable[[Params, Params], Params]
    prefill: Callable[
        [Params, Prompt, Room, Float[Array, "batch prompt dim"] | None], tuple[Forward, Cache]
    ]
    is_shared: bool = False


class Limits(NamedTuple):
    """The ends of a model's rows.

    Attributes:
        start_token: None for a decoder-only model, whose row begins with the prompt; an
            encoder-decoder's row begins with this token, and the prompt goes to the encoder.
        max_positions: longest row the model can hold, None if nothing limits it.
        max_prompt: longest prompt an encoder accepts, None if nothing (but max_positions) limits
            it.
        end_tokens: ids that end a row; empty for the tokenizer's end-of-sequence token.
        begin: ids that an encoder-decoder's row has after its start token, such as a language's.
        source_vocab: number of token ids that an encoder reads; None: the same as the decoder.
    """

    start_token: int | None = None
    max_positions: int | None = None
    max_prompt: int | None = None
    end_tokens: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    source_vocab: int | None = None

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """The ids that the row of an encoder-decoder begins with, unless a prompt has others; none
        of a decoder.
        """
        if self.start_token is None:
            return ()
        return (self.start_token, *self.begin)


class Inside(NamedTuple):
    """The inside of a network, for drafters that read it, run a part of it or take its embedding
    and its head.

    Attributes:
        width: width of `Forward.features`, and of each tap.
        taps: layers whose outputs `Forward.taps` holds, as `language_model(config, taps)` was given
            them.
        layers: its decoder layers, to be run in part; None if they cannot be.
        encoder: an encoder-decoder's encoder; None: it gives no `Forward.encoded`.
        keys_values: (cache, layer) -> the layer's cached keys and values [B, K, S, D] each, and
            their positions [B, S], -1 at slots that the row's next token does not read. Drafters
            that attend to their target's cache call it. A layer with a state in place of keys
            raises a ValueError. None: the network has no such keys.
        has_slot_biases: whether attention has biases by the distance of two slots of the whole
            cache, so that a part of the cache cannot stand for it.
    """

    width: int
    head: Head
    embed: Embed
    taps: tuple[int, ...] = ()
    layers: Layers | None = None
    encoder: Encoder | None = None
    keys_values: Callable[[Cache, int], tuple[Array, Array, Int[Array, "batch slot"]]] | None = None
    has_slot_biases: bool = False


class LanguageModel(NamedTuple):
    """An autoregressive model as pure functions; the cache is opaque outside them.

    Attributes:
        select: the function of the protocol; None: the model takes chains, no token trees.
        vocab_size: number of token ids (the width of the logits).
        limits: how its rows begin and end.
        inside: the parts that drafters may read and run; None: no parts. jaxspec's networks have
            it.
        is_causal: whether its logits are known to ignore later tokens and padding, as in jaxspec's
            networks. `prepare` tries other models once (`decode.causality`).
    """

    prefill: Prefill
    extend: Extend
    rewind: Rewind
    vocab_size: int
    select: Select | None = None
    limits: Limits = Limits()
    inside: Inside | None = None
    is_causal: bool = False

    @property
    def prompt_vocab(self) -> int:
        """Number of token ids that prompts may have."""
        if self.limits.source_vocab is None:
            return self.vocab_size
        return self.limits.source_vocab

    @property
    def encoder(self) -> Encoder | None:
        """The encoder that another model may share; None for decoder-only models."""
        if self.inside is None:
            return None
        return self.inside.encoder


class Model(NamedTuple):
    """A language model with its parameters and its tokenizer, as `jaxspec.load` returns it.

    Attributes:
        lm, params: its functions, and the parameters that they take.
        tokenizer: one of transformers'; None for a model that is prompted with ids.
        config: the configuration of a network of `jaxspec.nets`; None for other functions.
        name: for people.
        source: the JSON files that the configuration was read from, as tables by their names:
            config.json, and generation_config.json if there is one. None: it was made otherwise.
    """

    lm: LanguageModel
    params: Params
    tokenizer: Any = None
    config: Any = None
    name: str = ""
    source: Mapping[str, Mapping[str, Any]] | None = None
