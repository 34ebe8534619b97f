"""N-gram tables as a language model: drafts whose cost is a few searches (section 3.6 of arXiv
2211.17192).

A context is looked up from its last token backwards, in a tree: the children of "c" are the
contexts "b c", theirs are "a b c". The deepest one found is used (back-off to the longest context
that was seen), and gives its most frequent followers. `drafters.model` and `drafters.greedy` draft
from it as from any `LanguageModel`. Its cache is the row itself. `drafters.ngram` counts texts.

Shapes: B batch, T step, S capacity, V vocabulary, N contexts of one length, F followers stored.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Forward, LanguageModel, Limits, Prompt, Room, token_rows, tree


@dataclasses.dataclass(frozen=True)
class NGramConfig:
    """The shape of the tables."""

    vocab_size: int  # number of token ids
    # how many contexts of one token, of two tokens, ... there are: () for unigrams, one number for
    # bigrams.
    contexts: tuple[int, ...]
    followers: int  # most frequent tokens stored for each context
    # the id that a row begins with, where the prompt is no part of it (an encoder-decoder's
    # drafter)
    start_token: int | None = None
    # the dtype of a computation, for `jaxspec.load`; tables are integers, and their logits float32
    # always
    dtype: str = "float32"


class ContextLevel(NamedTuple):
    """The contexts of one length, sorted by (parent, token)."""

    # the context's first token; its other tokens are its parent's, one level up
    token: Int[Array, " N"]
    first: Int[Array, " parents"]  # where the children of each parent begin, and their end
    # the most frequent tokens after each context, the most frequent first; ties to the lowest id
    follower: Int[Array, "N F"]
    # how often each was seen there; 0 where there are fewer. Their distribution is normalised over
    # those stored.
    times: Int[Array, "N F"]


class Tables(NamedTuple):
    """Levels by length of context, the empty context first."""

    levels: tuple[ContextLevel, ...]


class NGramCache(NamedTuple):
    """The cache."""

    # these two: the tokens that were fed, and their number
    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    # tokens of the longest counted context that the last pass found at its last position, 0 where
    # it found none; a rewind leaves it as it is
    context: Int[Array, " B"]


def language_model(config: NGramConfig) -> LanguageModel:
    """Makes a language model of the tables. Tokens that never followed a context have probability
    0.

    It has no features; how long a context the logits are from is in its cache
    (`NGramCache.context`).

    >>> from jaxspec.drafters.lookups.ngram import count
    >>> config, tables = count([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5, order=3, followers=2)
    >>> forward, _ = language_model(config).prefill(
    ...     tables, Prompt(jnp.array([[1, 2]]), jnp.array([2])), Room(4)
    ... )
    >>> (3 * jnp.exp(forward.logits[0, 0])).round().tolist()
    [0.0, 0.0, 0.0, 2.0, 1.0]
    """
    return _language_model(config)


@functools.lru_cache
def _language_model(config: NGramConfig) -> LanguageModel:
    def read(
        params: Tables, rows: Int[Array, "B S"], position: Int[Array, "B T longest"]
    ) -> tuple[Float[Array, "B T V"], Int[Array, " B"]]:
        """Makes logits after each of T tokens, and the length of the last one's context;
        `position`: the positions of the last tokens of each context, oldest first.
        """
        follower, times, depth = _followers(
            params, config.vocab_size, token_rows.tokens_at(rows, position)
        )
        return _log_probs(follower, times, config.vocab_size), depth[:, -1]

    def prefill(params: Tables, prompt: Prompt, room: Room) -> tuple[Forward, NGramCache]:
        if config.start_token is not None:
            _, prompt = token_rows.encoder_and_row(prompt, (config.start_token,))
        width = prompt.tokens.shape[1]
        rows = jnp.pad(prompt.tokens, ((0, 0), (0, room.tokens - width)))
        logits, context = read(params, rows, positions_up_to(prompt.length[:, None] - 1, longest))
        return Forward(logits), NGramCache(rows, prompt.length, context)

    def extend(
        params: Tables,
        cache: NGramCache,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
        real: Int[Array, " B"] | None = None,  # whoever gives it rewinds to it
    ) -> tuple[Forward, NGramCache]:
        step = tokens.shape[1]
        rows = token_rows.append(cache.tokens, cache.length, tokens)
        if parent is None:
            # B T
            last = cache.length[:, None] + jnp.arange(step, dtype=cache.length.dtype)[None, :]
            position = positions_up_to(last, longest)
        else:
            start = cache.length - jnp.asarray(parent.shape[1] - step, cache.length.dtype)
            position = start[:, None, None] + tree.last_on_path(parent, longest)[:, -step:].astype(
                start.dtype
            )
        logits, context = read(params, rows, position)
        length = cache.length + jnp.asarray(step, cache.length.dtype)
        return Forward(logits), NGramCache(rows, length, context)

    def rewind(cache: NGramCache, length: Int[Array, " B"]) -> NGramCache:
        return cache._replace(length=length)

    def select(cache: NGramCache, start: Int[Array, " B"], path: Int[Array, "B D"]) -> NGramCache:
        accepted = jnp.take_along_axis(cache.tokens, start[:, None] + path, axis=1)
        return cache._replace(tokens=token_rows.append(cache.tokens, start, accepted))

    longest = len(config.contexts)
    limits = Limits(config.start_token)
    return LanguageModel(prefill, extend, rewind, config.vocab_size, select, limits, is_causal=True)


def init(config: NGramConfig, key: Key[Array, ""]) -> Tables:
    """Makes empty tables of a configuration's shape, which a checkpoint's tables must match."""
    parents = 1
    levels = []
    for contexts in (1, *config.contexts):
        children = parents + 1 if levels else 2
        sizes = (contexts,), (children,), (contexts, config.followers), (contexts, config.followers)
        levels.append(ContextLevel(*(jnp.zeros(size, jnp.int32) for size in sizes)))
        parents = contexts
    return Tables(tuple(levels))


def first_draft_tokens(
    config: NGramConfig, tables: Tables, rows: Int[Array, "B T"]
) -> Int[Array, "B T"]:
    """Returns the most probable token after each token of some rows: the argmax of the logits,
    without making any.

    Args:
        config, tables: the result of `lookups.ngram.count`.
        rows: token ids; -1 marks padding, which no table knows.

    >>> from jaxspec.drafters.lookups.ngram import count
    >>> config, tables = count([[1, 2, 3, 1, 2, 4, 1, 2, 3]], vocab_size=5, order=3)
    >>> first_draft_tokens(config, tables, jnp.array([[1, 2, 0]])).tolist()
    [[2, 3, 1]]
    """
    position = jnp.broadcast_to(jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :], rows.shape)
    context = token_rows.tokens_at(rows, positions_up_to(position, len(config.contexts)))
    follower, _, _ = _followers(tables, config.vocab_size, context)
    return follower[..., 0]


def positions_up_to(position: Int[Array, "*places"], count: int) -> Int[Array, "*places count"]:
    """Returns the last `count` positions up to each, oldest first; those before a row's beginning
    are below 0.

    >>> positions_up_to(jnp.array([0, 5]), 2).tolist()
    [[-1, 0], [4, 5]]
    """
    back = jnp.arange(1 - count, 1, dtype=position.dtype)
    return position[..., None] + back.reshape(*[1] * position.ndim, count)


def _followers(
    tables: Tables, vocab: int, context: Int[Array, "B T longest"]
) -> tuple[Int[Array, "B T F"], Int[Array, "B T F"], Int[Array, "B T"]]:
    """Looks up the longest context that the tables hold. Returns its followers, their counts and
    its length.
    """
    (empty, *levels), shape = tables.levels, context.shape[:2]
    node = jnp.zeros(shape, jnp.int32)
    in_tables = jnp.ones(shape, bool)
    depth = jnp.zeros(shape, jnp.int32)
    follower, times = (
        jnp.broadcast_to(row[0], (*shape, row.shape[1])) for row in (empty.follower, empty.times)
    )
    # From the last token backwards, down the tree of contexts, for as long as there is a child for
    # the token.
    for level, token in zip(levels, jnp.moveaxis(context, -1, 0)[::-1], strict=True):
        node, is_child = _child(level, node, token, vocab)
        in_tables = in_tables & is_child
        depth = depth + in_tables.astype(jnp.int32)
        follower = jnp.where(in_tables[..., None], level.follower[node], follower)
        times = jnp.where(in_tables[..., None], level.times[node], times)
    return follower, times, depth


def _log_probs(
    follower: Int[Array, "B T F"], times: Int[Array, "B T F"], vocab: int
) -> Float[Array, "B T V"]:
    """Makes the distribution of the followers; every other token has probability 0."""
    batch, steps, _ = follower.shape
    weight = times.astype(jnp.float32)
    log_probs = jnp.log(weight) - jnp.log(jnp.sum(weight, axis=-1, keepdims=True))
    impossible = jnp.full((batch * steps, vocab), -jnp.inf, jnp.float32)
    flat = [entries.reshape(-1, entries.shape[-1]) for entries in (follower, log_probs)]
    # Places without a follower hold token 0 with -inf, which must not take the place of token 0
    # itself.
    rows = jax.vmap(lambda row, ids, log_probs: row.at[ids].max(log_probs))(impossible, *flat)
    return rows.reshape(batch, steps, vocab)


def _child(
    level: ContextLevel, parent: Int[Array, "B T"], token: Int[Array, "B T"], vocab: int
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Finds, by bisection, the context that puts a token before its parent's, and whether it exists
    (else any context).
    """
    end = level.first[parent + 1]

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        right = level.token[middle] < token
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    def halve_or_stay(i, bounds):
        return jax.tree.map(
            functools.partial(jnp.where, bounds[0] < bounds[1]), halve(i, bounds), bounds
        )

    low, _ = jax.lax.fori_loop(0, vocab.bit_length(), halve_or_stay, (level.first[parent], end))
    node = jnp.minimum(low, level.token.shape[0] - 1)
    return node, (low < end) & (level.token[node] == token)
