"""A tokenizer's ids: their number, the ids around a text, the ids that end one, and the texts of
special ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxspec.core import Model

SPACE = "▁"  # how SentencePiece writes a space


def check_unicode(value: Any, name: str) -> None:
    r"""Raises ValueError for text that no tokenizer can read: half of a surrogate pair, as a JSON
    escape or bad bytes leave it.

    Of lists and mappings, such as a conversation, all texts are checked.

    >>> check_unicode([{"role": "user", "content": "A \ud83d cat"}], "the chat")
    Traceback (most recent call last):
    ValueError: the chat has '\ud83d' at character 2, half of a surrogate pair: expected valid Unicode
    """
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for entry in value:
            check_unicode(entry, name)
    if not isinstance(value, str):
        return
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = value[error.start]
        raise ValueError(
            f"{name} has {half!r} at character {error.start}, half of a surrogate pair: expected "
            "valid Unicode"
        ) from None


def size(tokenizer: Any) -> int:
    """Returns the largest id plus one, the least vocabulary that a model needs; `len` counts the
    tokens instead.

    >>> from jaxspec.testing import word_tokenizer
    >>> tokenizer = word_tokenizer({"<unk>": 0, "the": 1, "</s>": 9})
    >>> len(tokenizer), size(tokenizer)
    (3, 10)
    """
    return _size(tokenizer, len(tokenizer))


# a vocabulary of 256k takes a tenth of a second, and every call of `generate` asks
@functools.lru_cache(maxsize=16)
def _size(tokenizer: Any, tokens: int) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def words(tokenizer: Any) -> list[str | None]:
    """Returns the token of each id from 0 on; None where the tokenizer has none."""
    ids = sorted(set(tokenizer.get_vocab().values()))
    texts: list[str | None] = [None] * size(tokenizer)
    for index, word in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        texts[index] = word
    return texts


def spelled(
    tokenizer: Any, size: int, *, byte_level: bool | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yields the bytes of every token that is not special; ids from `size` on are left out.

    `byte_level`: whether the tokenizer writes every byte as a letter. None: its vocabulary tells.
    """
    special = set(tokenizer.all_special_ids)
    all_words = words(tokenizer)[:size]
    if byte_level is None:
        byte_level = _is_byte_level(tokenizer, len(tokenizer))
    for index, word in enumerate(all_words):
        if word and index not in special:
            yield index, _bytes_of(word, byte_level)


@functools.lru_cache(maxsize=16)
def _is_byte_level(tokenizer: Any, tokens: int) -> bool:
    """Byte-level vocabularies write a space, and every other byte, as a letter; SentencePiece's a
    space as one sign.
    """
    vocabulary = tokenizer.get_vocab()
    if any(SPACE in word for word in vocabulary):
        return False
    return any("Ġ" in word for word in vocabulary)


def _bytes_of(word: str, byte_level: bool) -> bytes:
    """Returns the bytes of a token, as its vocabulary writes it.

    >>> _bytes_of("Ġm", True), _bytes_of("▁m", False), _bytes_of("<0xC3>", False)
    (b' m', b' m', b'\xc3')
    """
    letters = _byte_letters()
    if byte_level and all(letter in letters for letter in word):
        return bytes(letters[letter] for letter in word)
    if not byte_level and len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return (word if byte_level else word.replace(SPACE, " ")).encode("utf-8", "surrogatepass")


def num_bytes_of_first(tokenizer: Any, text: str, token: int) -> int | None:
    r"""Returns how many bytes of a text its first token stands for: part of a character, perhaps.
    None: not known.

    The tokenizer's offsets tell where they are to be had. Offsets count whole characters. So where
    the next token has a part of the same character, the vocabulary says which bytes the first one
    spells.

    >>> from jaxspec.testing import word_tokenizer
    >>> num_bytes_of_first(word_tokenizer(["<unk>", "</s>", "né"]), "né né", 2)
    3
    """
    if getattr(tokenizer, "is_fast", False):
        spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        end = spans[0][1]
        # A special token that the tokenizer adds has the span (0, 0).
        if all(begin >= end for begin, after in spans[1:2] if begin < after):
            return len(text[:end].encode("utf-8", "surrogatepass"))
    elif token in tokenizer.all_special_ids:
        if token == getattr(tokenizer, "unk_token_id", None):
            return None
        return 0
    word = tokenizer.convert_ids_to_tokens(token)
    spelled_bytes = _bytes_of(word, _is_byte_level(tokenizer, len(tokenizer)))
    if not text.startswith(" "):
        # The space that a tokenizer puts in front of every text is not the text's.
        spelled_bytes = spelled_bytes.removeprefix(b" ")
    return len(spelled_bytes)


@functools.lru_cache
def _byte_letters() -> dict[str, int]:
    """Lists the letter that byte-level vocabularies (GPT-2's) write for each byte: itself if it is
    printable.

    >>> letters = _byte_letters()
    >>> len(letters), letters["Ġ"], letters["a"]
    (256, 32, 97)
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


class Frame(NamedTuple):
    """The ids that a tokenizer puts around every text: a BOS, `</s>`, a language."""

    # these two: the ids in front of the text and after it
    before: list[int]
    after: list[int]

    def cut(
        self, row: Sequence[int], limit: int, *, keeps_end: bool, shared: int = 0
    ) -> list[int] | None:
        """Cuts a row to `limit` tokens, and keeps what stands around its text, as transformers'
        truncation does.

        The text loses its beginning, as a decoder's prompt does, if it `keeps_end`, and its end
        otherwise. The first `shared` tokens stay in any case. None: no token of the text could
        stay.

        >>> frame = Frame([1], [2])
        >>> (
        ...     frame.cut([1, 5, 6, 7, 8, 2], 4, keeps_end=True),
        ...     frame.cut([1, 5, 6, 7, 8, 2], 4, keeps_end=False),
        ... )
        ([1, 7, 8, 2], [1, 5, 6, 2])
        >>> frame.cut([5, 6, 7, 8], 3, keeps_end=True), frame.cut([1, 5, 6, 2], 2, keeps_end=True)
        ([6, 7, 8], None)
        """
        row = list(row)
        head = max(shared, len(self.before) if row[: len(self.before)] == self.before else 0)
        tail = 0
        if row[len(row) - len(self.after) :] == self.after:
            tail = len(self.after)
        text = limit - head - tail
        if text < 1:
            return None
        end = len(row) - tail
        return (
            row[:head]
            + (row[end - text : end] if keeps_end else row[head : head + text])
            + row[end:]
        )


def frame_of(tokenizer: Any) -> Frame:
    """Returns the ids that a tokenizer puts before and after a text.

    A tokenizer that adds nothing leaves a row's BOS and EOS (from a chat, or from given ids) in
    place.

    >>> from jaxspec.testing import word_tokenizer
    >>> frame_of(word_tokenizer(["<unk>", "</s>", "the"]))
    Frame(before=[], after=[1])
    """
    if tokenizer is None:
        return Frame([], [])
    framed, text = (
        tokenizer("a", **options)["input_ids"] for options in ({}, {"add_special_tokens": False})
    )
    starts = [i for i in range(len(framed) - len(text) + 1) if framed[i : i + len(text)] == text]
    before, after = (framed[: starts[0]], framed[starts[0] + len(text) :]) if starts else ([], [])

    def named(name: str) -> list[int]:
        token = getattr(tokenizer, name, None)
        if token is None:
            return []
        return [token]

    return Frame(before or named("bos_token_id"), after or named("eos_token_id"))


def ends(model: Model) -> list[int]:
    """Returns the ids that end a model's texts: those that its files name, or else the tokenizer's,
    without ids that it lacks.

    A model that has none of these ids goes on to `max_new_tokens`, as transformers does.
    """
    named = model.lm.limits.end_tokens
    if not named and model.tokenizer is not None and model.tokenizer.eos_token_id is not None:
        named = (model.tokenizer.eos_token_id,)
    return [token for token in named if 0 <= token < model.lm.vocab_size]
