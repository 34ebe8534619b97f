"""The bytes that each token of a tokenizer adds to a text."""

from __future__ import annotations

import functools
import json
import random
from typing import Any, NamedTuple

from jaxspec.core import token_ids

# decoders of SentencePiece's vocabularies
PIECES = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
TRIALS = 50  # short texts with which a spelling is compared with the tokenizer's own decoding


class Spelling(NamedTuple):
    """The bytes of each token, by id; None for one that no text may have: special tokens, holes,
    empty texts.
    """

    inside: tuple[bytes | None, ...]  # the bytes that the token adds after others
    # the bytes that it adds as the first token of a text, which may lack a space in front
    first: tuple[bytes | None, ...]


@functools.lru_cache(maxsize=8)  # a vocabulary of 256k takes seconds
def of(tokenizer: Any, vocab: int) -> Spelling:
    """Spells the tokens of a tokenizer; ids of the model that it lacks spell nothing.

    Raises:
        ValueError: the text of several tokens is not the texts of each, joined.

    >>> from jaxspec.testing import word_tokenizer
    >>> spelling = of(word_tokenizer(["<unk>", "</s>", "the", "old"]), 5)
    >>> spelling.inside, spelling.first
    ((None, None, b' the', b' old', None), (None, None, b'the', b'old', None))
    """
    decoders = decoders_of(tokenizer)
    if "ByteLevel" in decoders or (decoders and set(decoders) <= PIECES):
        texts: dict[int, bytes] = dict(
            token_ids.spelled(tokenizer, vocab, byte_level="ByteLevel" in decoders)
        )
        inside = [texts.get(index) for index in range(vocab)]
        strips = bool(decoders.get("Strip")) or decoders.get("Metaspace") not in (None, "never")
        first = [
            text[1:] if strips and text is not None and text.startswith(b" ") else text
            for text in inside
        ]
    else:
        inside, first = _decoded(tokenizer, vocab)
    inside = [text or None for text in inside]
    special = _special(tokenizer)
    spelling = Spelling(
        *(
            tuple(
                None if n in special or inside[n] is None else text for n, text in enumerate(texts)
            )
            for texts in (inside, first)
        )
    )
    _check(tokenizer, spelling)
    return spelling


def decoders_of(tokenizer: Any) -> dict[str, Any]:
    """Returns the names of the parts that a tokenizer decodes with, and whether or when each
    removes a space.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return {}
    described = json.loads(decoder.__getstate__())
    parts = described.get("decoders", [described])
    removes = {"Strip": "start", "Metaspace": "prepend_scheme"}
    return {stage["type"]: stage.get(removes.get(stage["type"], ""), None) for stage in parts}


def _decoded(tokenizer: Any, vocab: int) -> tuple[list[bytes | None], list[bytes | None]]:
    """Spells the tokens of a tokenizer of unknown form by decoding each at the beginning of a text
    and within one.

    Slow tokenizers of SentencePiece (Marian's, M2M-100's) drop spaces at both ends of a text. A
    token that ends in a space would then be shown in two ways: it spells nothing.
    """
    ids = sorted(
        {index for index in tokenizer.get_vocab().values() if index < vocab} - _special(tokenizer)
    )
    inside: list[bytes | None] = [None] * vocab
    first: list[bytes | None] = [None] * vocab
    word = _word(tokenizer, ids)
    if word is None:
        return inside, first
    head = _decode(tokenizer, [word])
    tail = _decode(tokenizer, [word, word])[len(head) :]  # with the space that it may have in front

    def between(tokens: list[int], head: str) -> bytes | None:
        """Returns the text that tokens add to `head` if another word follows them."""
        text = _decode(tokenizer, [*tokens, word])
        is_whole = (
            text.startswith(head) and text.endswith(tail) and len(text) >= len(head) + len(tail)
        )
        added = ""
        if is_whole:
            added = text[len(head) : len(text) - len(tail)]
        # Only a space may go where nothing follows.
        if added[-1:].isspace() and _decode(tokenizer, tokens) != head + added:
            return None
        return added.encode()

    for index in ids:
        first[index] = between([index], "")
        inside[index] = between([word, index], head)
    return inside, first


def _word(tokenizer: Any, ids: list[int]) -> int | None:
    """Returns a token whose text stays the same before and after another; None if no token does.

    Low ids are not better: the first one may be a space, which decodes to nothing by itself.
    """

    def is_word(index: int, text: str) -> bool:
        twice = _decode(tokenizer, [index, index])
        return len(twice) >= 2 * len(text) and twice.startswith(text) and twice.endswith(text)

    others = []
    for index in ids:
        text = _decode(tokenizer, [index])
        if text.isascii() and text.isalpha() and is_word(index, text):
            return index
        if text and text.isprintable() and text.strip() == text:
            others.append((index, text))
    # In a vocabulary without Latin letters any other sign will do.
    return next((index for index, text in others if is_word(index, text)), None)


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    """Decodes as `decode.stopping.decode` does for a text that matches a pattern."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _special(tokenizer: Any) -> set[int]:
    """Returns the ids of tokens that decoded text does not show."""
    added = tokenizer.added_tokens_decoder.items()
    return {index for index, token in added if token.special} | set(tokenizer.all_special_ids)


def _check(tokenizer: Any, spelling: Spelling) -> None:
    """Raises ValueError for a tokenizer that decodes some short texts to something else than their
    tokens' bytes.
    """
    draw = random.Random(0)
    usable = [index for index, text in enumerate(spelling.inside) if text is not None]
    for _ in range(TRIALS if usable else 0):
        tokens = draw.choices(usable, k=4)
        expected = b"".join(
            [
                spelling.first[tokens[0]] or b"",
                *(spelling.inside[index] or b"" for index in tokens[1:]),
            ]
        )
        try:
            text = expected.decode()
        except UnicodeDecodeError:  # half a character is decoded as a sign of its own
            continue
        decoded = _decode(tokenizer, tokens)
        if decoded != text:
            raise ValueError(
                f"the tokenizer decodes {tokens} to {decoded!r}, and its tokens spell {text!r}: "
                "structured output needs one that puts texts together of its tokens"
            )
