r"""Patterns of JSON schemas, which are ECMA 262's regular expressions, as Python's `re` reads them.

Validators in JavaScript read a pattern as ECMA 262 says (with the flag `u`), those in Python as
`re` does. So an expression here matches only texts that both accept. The classes differ most:

| | ECMA 262 | Python |
|---|---|---|
| `\d` | 0 to 9 | every decimal digit of Unicode |
| `\w` | ASCII letters, digits, `_` | letters and numbers of all scripts, `_` |
| `\s` | with U+FEFF | with U+001C to U+001F and U+0085 |
"""

from __future__ import annotations

import functools
import re

from jaxspec.structured.byte_dfa import Ranges, category, complement

ECMA: dict[str, Ranges] = {
    "d": [(0x30, 0x39)],
    "w": [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    # WhiteSpace and LineTerminator: tab to carriage return, Unicode's Space_Separator, U+2028,
    # U+2029, U+FEFF
    "s": [
        *(
            (0x09, 0x0D),
            (0x20, 0x20),
            (0xA0, 0xA0),
            (0x1680, 0x1680),
            (0x2000, 0x200A),
            (0x2028, 0x2029),
        ),
        *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ],
}
ANY = r"[^\n\r\u2028\u2029]"  # ECMA's line terminators; for Python "\n" is the only one
# The next part of a pattern: inside of brackets, and outside of them
INSIDE = re.compile(r"\\.|.", re.DOTALL)
OUTSIDE = re.compile(r"\\.|\[\^?\]?|\{,[0-9]*\}|.", re.DOTALL)


def as_python(pattern: str) -> str:
    r"""Returns an expression for Python's `re` that matches the texts that a pattern matches in
    both ECMA 262 and Python.

    Raises:
        ValueError: the pattern has a part that the two read differently, other than classes.

    >>> as_python("[a-z]\\d{2}|\\.")
    '[a-z][0-9]{2}|\\.'
    >>> (
    ...     bool(re.fullmatch(as_python("[^\\s,]+"), "a\ufeff")),
    ...     bool(re.fullmatch(as_python("\\w"), "é")),
    ... )
    (False, False)
    """
    written = list[str]()
    brackets: str | None = None  # the beginning of the class that is being read: "[" or "[^"
    position = 0
    while position < len(pattern):
        if brackets is None:
            match = OUTSIDE.match(pattern, position)
        else:
            match = INSIDE.match(pattern, position)
        assert match is not None  # both match any character
        token = match[0]
        position += len(token)
        letter = token.removeprefix("\\")
        if token != letter and letter.lower() in ECMA:
            # What a negated class leaves out must hold what either leaves out.
            if brackets == "[^":
                ranges = in_either(letter)
            else:
                ranges = in_both(letter)
            written.append(_text(ranges) if brackets else f"[{_text(ranges)}]")
        elif brackets is not None:
            written.append(token)
            if token == "]":
                brackets = None
        elif token in ("[]", "[^]"):
            raise ValueError(
                f"{token} is a whole class in ECMA 262 and begins one in Python: write \\] for the "
                "bracket"
            )
        elif token.startswith("{,"):
            raise ValueError(f"{token} is a repetition in Python alone: write {{0{token[1:]}")
        else:
            written.append(ANY if token == "." else token)
            brackets = token if token in ("[", "[^") else None
    return "".join(written)


@functools.lru_cache(maxsize=16)
def in_both(letter: str) -> Ranges:
    """Returns the characters that a class holds in ECMA 262 and in Python.

    >>> in_both("d")
    [(48, 57)]
    """
    if letter.isupper():
        return complement(in_either(letter.lower()))
    return complement([*complement(ECMA[letter]), *complement(category(letter))])


@functools.lru_cache(maxsize=16)
def in_either(letter: str) -> Ranges:
    r"""Returns the characters that a class holds in ECMA 262 or in Python.

    >>> (0xFEFF, 0xFEFF) in in_either("s"), (0x1C, 0x20) in in_either("s"), in_either("D")[0]
    (True, True, (0, 47))
    """
    if letter.isupper():
        return complement(in_both(letter.lower()))
    return complement(complement([*ECMA[letter], *category(letter)]))


def _text(ranges: Ranges) -> str:
    """Writes ranges of characters as the inside of a class."""

    def sign(code: int) -> str:
        if code < 0x80 and chr(code).isalnum():
            return chr(code)
        if code <= 0xFFFF:
            return f"\\u{code:04x}"
        return f"\\U{code:08x}"

    return "".join(
        sign(low) if low == high else f"{sign(low)}-{sign(high)}" for low, high in ranges
    )
