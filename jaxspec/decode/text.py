"""Tokens to text while they arrive: whole words and whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a tokenizer decodes half of a multi-byte character to


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of token ids, without special tokens."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, None if none occurs.

    >>> find_stop("one. two", [".", "two"])
    3
    """
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return min(found) if found else None


def settled(text: str, stop: Sequence[str] = ()) -> str:
    """The part of a growing text that later tokens can no longer change, nor turn into a stop string.

    A word is held back until a space or line break follows it (its next piece may still come, and some tokenizers
    change what stands before a piece); ideographs count as words of their own. Half a character is held back too.

    >>> settled("ein Beisp"), settled("ein Beispiel "), settled("a st", stop=["a stop"])
    ('ein ', 'ein Beispiel ', '')
    """
    text = text.rstrip(REPLACEMENT)
    end = len(text)
    while end > 0 and not (text[end - 1].isspace() or _ideograph(text[end - 1])):
        end -= 1
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), 0, -1):
            if text.endswith(string[:size]):
                end = min(end, len(text) - size)
                break
    return text[:end]


def tokens_needed(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str]) -> int:
    """How many of the tokens it takes until their text holds a stop string."""
    low, high = 0, len(tokens)
    while low < high:  # the text of a prefix grows with the prefix
        middle = (low + high) // 2
        if find_stop(decode(tokenizer, tokens[:middle]), stop) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _ideograph(character: str) -> bool:
    """Scripts written without spaces: kana, CJK ideographs, Hangul and full-width forms."""
    code = ord(character)
    return 0x3040 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7A3 or 0xF900 <= code <= 0xFAFF or code >= 0x20000
