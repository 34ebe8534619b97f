"""Counting n-grams: the tables of `lookups.ngram_model`, from texts; sorts of integers, in
numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.core import Model
from jaxspec.core.checks import at_least
from jaxspec.drafters.lookups.ngram_model import ContextLevel, NGramConfig, Tables, language_model
from jaxspec.files.corpus import token_rows

CountedTexts = Sequence[str] | Sequence[Sequence[int] | np.ndarray]


def ngram(texts: CountedTexts, target: Model, *, order: int, **options: Any) -> Model:
    """Counts n-grams for a drafter of `target`, whose vocabulary, tokenizer and start token it
    takes over.

    It is a language model: sampled from at a temperature, with its true distribution, as a smaller
    network is. With `drafters.greedy` around it, it proposes its most frequent continuation, with
    certainty. `jaxspec train` makes a checkpoint of one.

    Args:
        texts: such as the target writes: strings, or token ids (with the end-of-sequence token, if
            texts end).
        target: the model to draft for.
        order, options: the arguments of `count`.

    Returns:
        The tables as a model, for `jaxspec.generate` or another drafter; its config holds the
        numbers of contexts.

    Raises:
        TypeError: one string instead of several.
        ValueError: strings, and the target has no tokenizer; and see `count`.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> trigram = ngram([[0, 1, 2, 1, 2, 0]], target, order=3)
        >>> prompt = jaxspec.Prompt(jnp.array([[1]]), jnp.array([1]))
        >>> jaxspec.generate(
        ...     target, prompt, drafter=trigram, gamma=2, max_new_tokens=5
        ... ).lengths.tolist()
        [5]
    """
    rows = rows_of(texts, target)
    vocab = target.lm.vocab_size
    begin = target.lm.limits.first_tokens
    config, tables = count(rows, vocab_size=vocab, order=order, begin=begin, **options)
    return Model(language_model(config), tables, target.tokenizer, config, f"{order}-gram")


def rows_of(texts: CountedTexts, target: Model) -> list[Any]:
    """Returns texts as rows of token ids, as `target` would write them.

    Raises:
        TypeError: one string instead of several.
        ValueError: strings, and the target has no tokenizer.
    """
    if isinstance(texts, str):
        raise TypeError(
            f"texts is one string, {texts[:20]!r}: expected a list of strings, or of rows of token "
            "ids"
        )
    strings = [text for text in texts if isinstance(text, str)]
    rows = [text for text in texts if not isinstance(text, str)]
    if strings and target.tokenizer is None:
        raise ValueError("got texts, and the target has no tokenizer: give rows of token ids")
    if strings:
        rows += token_rows(
            strings, target.tokenizer, encoder=target.lm.limits.start_token is not None
        )
    return rows


def unigram(texts: CountedTexts, target: Model, **options: Any) -> Model:
    """Counts the most frequent tokens, wherever they stand: `ngram` of order 1.

    Example:
        >>> import jax
        >>> from jaxspec.testing import table_model
        >>> tables = unigram([[2, 0, 2, 1, 2, 0]], table_model(jax.random.key(1), vocab=3)).params
        >>> tables.levels[0].follower[0, :3].tolist(), tables.levels[0].times[0, :3].tolist()
        ([2, 0, 1], [3, 2, 1])
    """
    return ngram(texts, target, order=1, **options)


def bigram(texts: CountedTexts, target: Model, **options: Any) -> Model:
    """Counts which tokens followed each token most often: `ngram` of order 2.

    Example:
        >>> import jax
        >>> from jaxspec.testing import table_model
        >>> tables = bigram([[2, 0, 2, 1, 2, 0]], table_model(jax.random.key(1), vocab=3)).params
        >>> (
        ...     tables.levels[1].token.tolist(),
        ...     tables.levels[1].follower[:, 0].tolist(),
        ... )  # after 0, 1 and 2
        ([0, 1, 2], [2, 2, 0])
    """
    return ngram(texts, target, order=2, **options)


def count(
    rows: Sequence[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
    order: int,
    followers: int = 8,
    least: int = 1,
    begin: Sequence[int] = (),
    weights: Sequence[np.ndarray] | None = None,
    advance: Callable[[], object] = lambda: None,
) -> tuple[NGramConfig, Tables]:
    """Counts the tables of some rows of token ids; no n-gram crosses from one row into the next.

    Args:
        rows: rows as a decoder would hold them; each gets `begin` in front.
        order: 1 for unigrams, 2 for bigrams, ...: contexts have up to order - 1 tokens.
        followers: most frequent tokens stored for each context.
        least: contexts seen less often than this are left out.
        begin: the ids that a decoder's row begins with where its prompt is elsewhere
            (`Limits.first_tokens`).
        weights: how often each token of each row counts where it follows a context: whole numbers.
            By default once. `training.boosting` weighs what other drafters miss.
        advance: called when the contexts of another length have been counted, `order` times at
            most.

    Raises:
        ValueError: order, followers or least < 1, no rows, an id outside of the vocabulary, weights
            that do not match the rows' tokens, or are all 0.

    >>> config, tables = count([[0, 1, 0, 1, 0, 2]], vocab_size=3, order=2)
    >>> config.contexts, tables.levels[1].follower[:, 0].tolist()
    ((2,), [1, 0])
    >>> config, tables = count(
    ...     [[0, 1, 0, 1, 0, 2]], vocab_size=3, order=2, weights=[np.array([1, 0, 1, 0, 1, 1])]
    ... )
    >>> config.contexts, tables.levels[1].follower[:, 0].tolist()
    ((2,), [2, 0])
    """
    at_least(1, order=order, followers=followers, least=least)
    if not rows:
        raise ValueError("got no rows: expected at least one")
    begin_ids = np.array(begin, np.int64)
    parts = [np.concatenate([begin_ids, np.asarray(row, np.int64)]) for row in rows]
    # 64 bits, because keys are a context's number, below 2^31, times vocab_size
    tokens = np.concatenate(parts)
    if len(tokens) == len(begin) * len(parts):
        raise ValueError(f"got {len(rows)} rows and no tokens: expected at least one token")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"the ids range from {tokens.min()} to {tokens.max()}: expected 0 to {vocab_size - 1}"
        )
    token_weights = None
    if weights is not None:
        token_weights = _weights(rows, weights, len(begin))
    length_of = np.array(list(map(len, parts)))
    # A token's place in its row.
    column = np.arange(len(tokens)) - np.repeat(np.cumsum(length_of) - length_of, length_of)

    # the context before each token; -1 where there is none
    context = np.zeros(len(tokens), np.int64)
    parents = 1
    context[column < len(begin)] = -1  # nobody drafts what a row begins with
    root = _followers(context, tokens, 1, vocab_size, followers, token_weights)
    levels: list[tuple[np.ndarray, ...]] = [
        (np.zeros(1, np.int32), np.array([0, 1], np.int32), *root)
    ]
    advance()
    for length in range(1, order):
        # A longer context is a context of the last level and the token before it: one number for
        # both, so that sorting sorts by parents.
        if length < len(tokens):
            before = np.concatenate([np.full(length, -1), tokens[:-length]])
        else:
            before = np.full(len(tokens), -1)
        inside = np.flatnonzero((column >= length) & (context >= 0))
        keys, node, frequency = np.unique(
            context[inside] * vocab_size + before[inside], return_inverse=True, return_counts=True
        )
        frequent = frequency >= least
        # a context after which nothing counts is left to the shorter ones
        if token_weights is not None:
            frequent &= np.bincount(node, token_weights[inside], minlength=len(keys)) > 0
        rank = np.where(frequent, np.cumsum(frequent) - 1, -1)
        context = np.full(len(tokens), -1)
        context[inside] = rank[node]
        keys = keys[frequent]
        if not len(keys):
            break
        # Children are sorted by their parents: each parent's stand next to each other.
        first_child = np.searchsorted(keys // vocab_size, np.arange(parents + 1)).astype(np.int32)
        parents = len(keys)
        most_frequent = _followers(context, tokens, parents, vocab_size, followers, token_weights)
        levels.append(((keys % vocab_size).astype(np.int32), first_child, *most_frequent))
        advance()
    config = NGramConfig(
        vocab_size,
        tuple(len(token) for token, *_ in levels[1:]),
        followers,
        next(iter(begin), None),
    )
    return config, Tables(tuple(ContextLevel(*map(jnp.asarray, level)) for level in levels))


def _weights(rows: Sequence[Any], weights: Sequence[np.ndarray], begin: int) -> np.ndarray:
    """Joins the weights of rows. The first `begin` tokens of each row do not count."""
    lengths = [len(row) for row in rows]
    if lengths != [len(row) for row in weights]:
        raise ValueError(
            "weights are not those of the rows: expected a whole number for each token of each row"
        )
    joined = np.concatenate(
        [np.concatenate([np.zeros(begin, np.int64), np.asarray(row)]) for row in weights]
    )
    if not np.issubdtype(joined.dtype, np.integer) or joined.min() < 0:
        raise ValueError(
            f"weights are {joined.dtype}, at least {joined.min()}: expected whole numbers of 0 or "
            "more"
        )
    if not joined.any():
        raise ValueError("all weights are 0: expected a token that counts")
    return joined


def _followers(
    context: np.ndarray,
    tokens: np.ndarray,
    contexts: int,
    vocab: int,
    keep: int,
    weights: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the most frequent tokens after each context [contexts, keep], and how often each was
    seen there.
    """
    has_context = context >= 0
    if weights is not None:
        has_context &= weights > 0
    keys = context[has_context] * vocab + tokens[has_context]
    if weights is None:
        pairs, frequency = np.unique(keys, return_counts=True)
    else:
        pairs, index = np.unique(keys, return_inverse=True)
        frequency = np.bincount(index, weights[has_context]).astype(np.int64)
    order = np.lexsort((pairs % vocab, -frequency, pairs // vocab))
    owner = (pairs // vocab)[order]
    token = (pairs % vocab)[order]
    frequency = frequency[order]
    # A token's rank among the followers of its context.
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    top = rank < keep
    ids = np.zeros((contexts, keep), np.int32)
    times = np.zeros((contexts, keep), np.int32)
    ids[owner[top], rank[top]], times[owner[top], rank[top]] = token[top], frequency[top]
    return ids, times
