"""What a model is: three pure functions over a prompt and a cache that nobody else looks into."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int, Key

Params = Any
"""Any pytree of arrays."""

Cache = Any
"""A pytree; opaque outside the LanguageModel that made it."""

Keys = Key[Array, " batch"]
"""One PRNG key per row."""


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


class Head(Protocol):
    def __call__(self, params: Params, features: Float[Array, "batch step dim"]) -> Float[Array, "batch step vocab"]:
        """The logits that belong to features: for who wants those of some positions only, or has features of its own.

        What `extend` says of a position, up to rounding. (Compiled programs do not compute logits that nobody reads.)
        """
        ...


class LanguageModel(NamedTuple):
    """An autoregressive model as three pure functions, and perhaps `head`; the cache is opaque outside them.

    Attributes:
        prefill, extend, rewind: see the protocols.
        vocab_size: number of token ids (the width of the logits).
        start_token: None for a decoder-only model, whose row begins with the prompt; an encoder-decoder's row begins
            with this one token, and the prompt goes to the encoder.
        max_positions: longest row the model can hold, None if nothing limits it.
        max_prompt: longest prompt an encoder accepts, None if nothing (but max_positions) limits it.
        head: see the protocol; None if logits cannot be had from features, or none need be spared.
    """

    prefill: Prefill
    extend: Extend
    rewind: Rewind
    vocab_size: int
    start_token: int | None = None
    max_positions: int | None = None
    max_prompt: int | None = None
    head: Head | None = None


class Model(NamedTuple):
    """A language model with its parameters and its tokenizer, as `jaxspec.load` returns it."""

    lm: LanguageModel
    params: Params
    tokenizer: Any = None
    config: Any = None
    name: str = ""
