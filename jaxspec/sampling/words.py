"""Logits processors about words of several tokens and about a text's last token, as a folder may
ask for them.

transformers calls them `bad_words_ids` and `forced_eos_token_id`. They are given to
`jaxspec.generate` as `logits_processors`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core import BoundProcessor, Preceding, Processor, Prompt, token_rows
from jaxspec.core.checks import at_least, integers

# in place of a token before a word's last one: whatever stands there; `token_rows` has -1 for none
ANY = -2


def banned_words(words: Sequence[Sequence[int]]) -> Processor:
    """Makes a processor that rules out words: the last token of each, wherever the row ends with
    those before it.

    The prompt of a decoder-only model is part of the row, as in transformers' `bad_words_ids`.
    There, words that are an end token alone are left out: leave them out here, too. Words of one
    token are cheaper as `banned`.

    Args:
        words: ids of tokens, at least one for each word.

    Raises:
        TypeError: a word is not a list of ids.
        ValueError: the list is empty, or a word is empty or has an id that the model lacks.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> plain = jaxspec.generate(model, [[3]], max_new_tokens=4).tokens[0].tolist()
        >>> process = banned_words([plain[:2]])
        >>> text = (
        ...     jaxspec.generate(model, [[3]], max_new_tokens=4, logits_processors=process)
        ...     .tokens[0]
        ...     .tolist()
        ... )
        >>> text[0] == plain[0], text[1] == plain[1]
        (True, False)
    """
    if not len(words):
        raise ValueError("got no words: expected at least one, such as [[5], [6, 7]]")
    for index, word in enumerate(words):
        if isinstance(word, str) or not hasattr(word, "__len__"):
            raise TypeError(f"words[{index}] is {word!r}: expected a list of ids, such as [6, 7]")
    spelt = tuple(
        tuple(integers(0, **{f"words[{i}][{j}]": x for j, x in enumerate(w)}))
        for i, w in enumerate(words)
    )
    if () in spelt:
        raise ValueError(f"words[{spelt.index(())}] is empty: expected at least one id of a token")
    return _banned_words(spelt)


@functools.lru_cache
def _banned_words(words: tuple[tuple[int, ...], ...]) -> Processor:
    longest = max(map(len, words)) - 1
    # [W, L]
    before = np.array([(ANY,) * (longest + 1 - len(word)) + word[:-1] for word in words], np.int32)
    last = np.array([word[-1] for word in words])

    def init(values: Any, row: Prompt, start: Int[Array, " B"], vocab: int) -> Int[Array, "B L"]:
        largest_id = max(map(max, words))
        if largest_id >= vocab:
            raise ValueError(
                f"a banned word has the id {largest_id}: expected ids from 0 to {vocab - 1}"
            )
        return token_rows.tokens_at(row.tokens, row.length[:, None] + jnp.arange(-longest, 0)[None])

    def advance(
        values: Any, memory: Int[Array, "B L"], token: Int[Array, " B"]
    ) -> Int[Array, "B L"]:
        return jnp.concatenate([memory, token[:, None].astype(memory.dtype)], axis=1)[:, 1:]

    def apply(
        values: Any, logits: Float[Array, "B T V"], preceding: Preceding | None
    ) -> Float[Array, "B T V"]:
        assert preceding is not None
        begun = jnp.all(
            (before == ANY)[None, None] | (preceding.memory[:, :, None] == before[None, None]),
            axis=3,
        )
        banned = jnp.zeros(logits.shape, bool).at[:, :, last].max(begun)  # [B, T, W] -> [B, T, V]
        return jnp.where(banned, -jnp.inf, logits)

    return Processor(apply, init, advance)


def forced_end(
    token: int, max_new_tokens: int | Sequence[int] | Int[np.ndarray, " batch"]
) -> BoundProcessor:
    """Makes a processor that forces a token as the last new one, where a text would be cut.

    Args:
        token: the id of the end token, such as a folder's `forced_eos_token_id`.
        max_new_tokens: the limit that `jaxspec.generate` is given, for all rows or for each.

    Raises:
        ValueError: the model lacks the token's id, or a limit is below 1.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> options = dict(max_new_tokens=3, logits_processors=forced_end(4, 3), eos_ids=[4])
        >>> jaxspec.generate(model, [[3]], **options).tokens[0].tolist()[-1]
        4
    """
    (token,) = integers(0, token=token)
    at_least(1, max_new_tokens=int(np.min(max_new_tokens)))
    return BoundProcessor(_forced_end(token), jnp.asarray(max_new_tokens, jnp.int32), "forced_end")


@functools.lru_cache
def _forced_end(token: int) -> Processor:
    def init(
        limit: Int[Array, " B"], row: Prompt, start: Int[Array, " B"], vocab: int
    ) -> Int[Array, " B"]:
        if token >= vocab:
            raise ValueError(f"the forced end is {token}: expected an id from 0 to {vocab - 1}")
        return row.length - start

    def advance(
        limit: Int[Array, " B"], count: Int[Array, " B"], token: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return count + 1

    def apply(
        limit: Int[Array, " B"], logits: Float[Array, "B T V"], preceding: Preceding | None
    ) -> Float[Array, "B T V"]:
        assert preceding is not None
        is_last = preceding.memory == limit[:, None] - 1  # [B, T]
        others = (jnp.arange(logits.shape[-1]) != token)[None, None]
        return jnp.where(is_last[:, :, None] & others, -jnp.inf, logits)

    return Processor(apply, init, advance)
