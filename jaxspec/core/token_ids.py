"""The ids of a tokenizer, which need not be 0, 1, 2, ... without gaps; those that end a text; text that has ids."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxspec.core import Model


def check_unicode(value: Any, name: str) -> None:
    r"""Refuses text that no tokenizer can read: half of a surrogate pair, as a JSON escape or bad bytes leave it.

    Args:
        value: a text; or lists and mappings, all of whose texts are checked, such as a conversation.
        name: the value's name in messages.

    Raises:
        ValueError: a text is not valid Unicode.

    >>> check_unicode([{"role": "user", "content": "A \ud83d cat"}], "the chat")
    Traceback (most recent call last):
    ValueError: the chat has '\ud83d' at character 2, half of a surrogate pair: expected valid Unicode
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            check_unicode(part, name)
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise ValueError(
            f"{name} has {half!r} at character {error.start}, half of a surrogate pair: expected valid Unicode"
        ) from None


def size(tokenizer: Any) -> int:
    """Returns the largest id plus one, the least vocabulary that a model needs; `len` counts the tokens instead.

    >>> from jaxspec.testing import word_tokenizer
    >>> tokenizer = word_tokenizer({"<unk>": 0, "the": 1, "</s>": 9})
    >>> len(tokenizer), size(tokenizer)
    (3, 10)
    """
    return _size(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=16)  # a vocabulary of 256k takes a tenth of a second, and every call of `generate` asks
def _size(tokenizer: Any, tokens: int) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def words(tokenizer: Any) -> list[str | None]:
    """Returns the token of each id from 0 on; None where the tokenizer has none."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts: list[str | None] = [None] * size(tokenizer)
    for index, word in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        texts[index] = word
    return texts


def ends(model: Model) -> list[int]:
    """Returns what ends a model's texts: the ids that its files name, else the tokenizer's, without any that it lacks.

    A model that has none of these ids goes on to `max_new_tokens`, as transformers does.
    """
    named = getattr(model.config, "end_tokens", ())
    if not named and model.tokenizer is not None and model.tokenizer.eos_token_id is not None:
        named = (model.tokenizer.eos_token_id,)
    return [token for token in named if 0 <= token < model.lm.vocab_size]
