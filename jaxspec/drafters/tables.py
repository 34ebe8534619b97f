"""N-gram tables as a language model: drafts whose cost is a few searches (section 3.6 of arXiv 2211.17192).

A context is looked up from its last token backwards, in a tree: the children of "c" are the contexts "b c", theirs
are "a b c". The deepest one found speaks for the row (back-off to the longest context that was seen), and says its
most frequent followers. As a `LanguageModel` it drafts through `drafters.model`, so it is sampled from, warped and
coupled as any model is, and through `drafters.argmax`; its cache is the row itself. `drafters.ngram` counts texts.

Shapes: B batch, T step, S capacity, V vocabulary, N contexts of one length, F followers kept.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import buffers
from jaxspec.base import Forward, LanguageModel, Prompt, Tree

NO_TOKEN = -1  # stands before a row's first token


@dataclasses.dataclass(frozen=True)
class NGramConfig:
    """The shape of the tables.

    Attributes:
        vocab_size: number of token ids.
        contexts: how many contexts of one token, of two tokens, ... there are: () for unigrams, one number for bigrams.
        followers: tokens kept behind each context.
        start_token: what a row begins with where the prompt is no part of it (the drafter of an encoder-decoder).
        dtype: of a model's computation, for `jaxspec.load`; tables are integers, and their logits float32 always.
    """

    vocab_size: int
    contexts: tuple[int, ...]
    followers: int
    start_token: int | None = None
    dtype: str = "float32"


class Level(NamedTuple):
    """All contexts of one length, sorted by (parent, token).

    Attributes:
        token: the context's first token; its other tokens are its parent's, one level up.
        first: where the children of each parent begin, and their end.
        follower: the most frequent tokens behind each context, the most frequent first; ties to the lowest id.
        times: how often each was seen there; 0 where there are fewer. Their law is normalised over those kept.
    """

    token: Int[Array, " N"]
    first: Int[Array, " parents"]
    follower: Int[Array, "N F"]
    times: Int[Array, "N F"]


class Tables(NamedTuple):
    """Levels by length of context, the empty context first."""

    levels: tuple[Level, ...]


class Rows(NamedTuple):
    """The cache: what was fed, and how much of it."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]


def language_model(config: NGramConfig) -> LanguageModel:
    """The tables as a language model of their followers; every other token has probability 0.

    Its features are the number of tokens of the context that spoke, 0 where none was known.

    >>> from jaxspec.drafters.ngram import count
    >>> config, tables = count([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5, order=3, followers=2)
    >>> forward, _ = language_model(config).prefill(tables, Prompt(jnp.array([[1, 2]]), jnp.array([2])), 4)
    >>> (3 * jnp.exp(forward.logits[0, 0])).round().tolist()
    [0.0, 0.0, 0.0, 2.0, 1.0]
    """
    return _language_model(config)


@functools.cache
def _language_model(config: NGramConfig) -> LanguageModel:
    def prefill(params: Tables, prompt: Prompt, capacity: int) -> tuple[Forward, Rows]:
        if config.start_token is not None:
            batch = prompt.tokens.shape[0]
            empty = Rows(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros((batch,), jnp.int32))
            return extend(params, empty, jnp.full((batch, 1), config.start_token, jnp.int32))
        width = prompt.tokens.shape[1]
        rows = Rows(jnp.pad(prompt.tokens, ((0, 0), (0, capacity - width))), prompt.length - 1)
        last = buffers.window(prompt.tokens, rows.length, 1)
        return extend(params, rows, last)

    def extend(
        params: Tables, cache: Rows, tokens: Int[Array, "B T"], tree: Tree | None = None
    ) -> tuple[Forward, Rows]:
        if tree is not None:
            raise ValueError("n-gram tables draft chains: expected tree=None")
        step = jnp.asarray(tokens.shape[1], cache.length.dtype)
        rows = buffers.append(cache.tokens, cache.length, tokens)
        at = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=cache.length.dtype)[None, :]
        follower, times, depth = _followers(
            params, config.vocab_size, _contexts(rows, at, len(config.contexts)), tokens.shape
        )
        logits = _log_probs(follower, times, config.vocab_size)
        grown = Rows(rows, cache.length + step)
        return Forward(logits, depth[..., None].astype(jnp.float32)), grown

    def rewind(cache: Rows, length: Int[Array, " B"], path: Int[Array, "B keep"] | None = None) -> Rows:
        del path
        return cache._replace(length=length)

    return LanguageModel(prefill, extend, rewind, config.vocab_size, config.start_token)


def init(config: NGramConfig, key: Key[Array, ""]) -> Tables:
    """Tables of a configuration's shape in which nothing was counted: what a checkpoint's are compared with."""
    del key
    parents, levels = 1, []
    for contexts in (1, *config.contexts):
        children = parents + 1 if levels else 2
        sizes = (contexts,), (children,), (contexts, config.followers), (contexts, config.followers)
        levels.append(Level(*(jnp.zeros(size, jnp.int32) for size in sizes)))
        parents = contexts
    return Tables(tuple(levels))


def first_guesses(config: NGramConfig, tables: Tables, rows: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The most probable token behind each token of some rows: the argmax of the logits, without making any.

    Args:
        config, tables: of `drafters.ngram.count`.
        rows: token ids; -1 is no token, and known to no table.

    >>> from jaxspec.drafters.ngram import count
    >>> config, tables = count([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5, order=3)
    >>> first_guesses(config, tables, jnp.array([[1, 2, 0]])).tolist()
    [[2, 3, 1]]
    """
    at = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :], rows.shape)
    follower, _, _ = _followers(tables, config.vocab_size, _contexts(rows, at, len(config.contexts)), rows.shape)
    return follower[..., 0]


def _contexts(rows: Int[Array, "B S"], at: Int[Array, "B T"], depth: int) -> list[Int[Array, "B T"]]:
    """The tokens that end at each position, the last one first; NO_TOKEN before the row's beginning."""
    found = []
    for back in range(depth):
        index = at - back
        token = jnp.take_along_axis(rows, jnp.maximum(index, 0), axis=1)
        found.append(jnp.where(index >= 0, token, NO_TOKEN))
    return found


def _followers(
    tables: Tables, vocab: int, context: list[Int[Array, "B T"]], shape: tuple[int, ...]
) -> tuple[Int[Array, "B T F"], Int[Array, "B T F"], Int[Array, "B T"]]:
    """What followed the longest context that the tables hold, how often, and how many tokens that context has."""
    empty, *levels = tables.levels
    node, known, depth = jnp.zeros(shape, jnp.int32), jnp.ones(shape, bool), jnp.zeros(shape, jnp.int32)
    follower, times = (jnp.broadcast_to(x[0], (*shape, x.shape[1])) for x in (empty.follower, empty.times))
    for level, token in zip(levels, context, strict=True):
        node, found = _child(level, node, token, vocab)
        known = jnp.logical_and(known, found)
        depth = depth + known.astype(jnp.int32)
        follower = jnp.where(known[..., None], level.follower[node], follower)
        times = jnp.where(known[..., None], level.times[node], times)
    return follower, times, depth


def _log_probs(follower: Int[Array, "B T F"], times: Int[Array, "B T F"], vocab: int) -> Float[Array, "B T V"]:
    """The law of the followers; every other token has probability 0."""
    batch, steps, _ = follower.shape
    weight = times.astype(jnp.float32)
    log_probs = jnp.log(weight) - jnp.log(jnp.sum(weight, axis=-1, keepdims=True))
    nothing = jnp.full((batch * steps, vocab), -jnp.inf)
    flat = [x.reshape(-1, x.shape[-1]) for x in (follower, log_probs)]
    rows = jax.vmap(lambda row, ids, p: row.at[ids].max(p))(nothing, *flat)
    return rows.reshape(batch, steps, vocab)


def _child(
    level: Level, parent: Int[Array, "B T"], token: Int[Array, "B T"], vocab: int
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The context that puts a token before its parent's, by bisection, and whether there is one (else it is any)."""
    end = level.first[parent + 1]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        right = level.token[middle] < token
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    def halve_or_stay(i, bounds):
        return jax.tree.map(functools.partial(jnp.where, bounds[0] < bounds[1]), halve(i, bounds), bounds)

    low, _ = jax.lax.fori_loop(0, vocab.bit_length(), halve_or_stay, (level.first[parent], end))
    node = jnp.minimum(low, level.token.shape[0] - 1)
    return node, jnp.logical_and(low < end, level.token[node] == token)
