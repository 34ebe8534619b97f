"""Patterns of schemas match only what ECMA 262 and Python both match, by each code point."""

from __future__ import annotations

import re

import numpy as np
import pytest

from jaxspec.structured import byte_dfa, ecma, schemas
from tests.structured.test_byte_dfa import EVERY, accepted, accepts, held

# ECMA 262: CharacterClassEscape, WhiteSpace and LineTerminator, written out one by one
ECMA = {
    "d": [*range(ord("0"), ord("9") + 1)],
    "w": [*map(ord, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")],
    "s": [
        *(
            9,
            10,
            11,
            12,
            13,
            32,
            160,
            0x1680,
            *range(0x2000, 0x200B),
            0x2028,
            0x2029,
            0x202F,
            0x205F,
            0x3000,
            0xFEFF,
        ),
    ],
}
CONTROL = held(map(chr, range(32)))


@pytest.mark.parametrize("letter", "dws")
def test_classes_hold_the_characters_of_both(letter):
    in_ecma, in_python = held(map(chr, ECMA[letter])), held(re.findall(rf"\{letter}", EVERY))
    both, neither = in_ecma & in_python, held(EVERY) & ~in_ecma & ~in_python
    opposite = letter.upper()
    for written, expected in (
        (rf"\{letter}", both),
        (rf"[\{letter}\x00-\x1f]", both | CONTROL),
        (rf"[^\{letter}]", neither),
        (rf"[^\x00-\x1f\{letter}]", neither & ~CONTROL),
        (rf"\{opposite}", neither),
        (rf"[^\{opposite}]", both),
        (rf"[\{opposite}\x00-\x1f]", neither | CONTROL),
    ):
        np.testing.assert_array_equal(accepted(ecma.as_python(written)), expected, written)


def test_a_pattern_of_a_schema_writes_no_space_of_either():
    dfa = byte_dfa.from_regex(
        schemas.regex_of(schemas.as_text({"type": "string", "pattern": r'^[^\s"\\\x00-\x1f]+$'}))
    )
    for code in (0x85, 0xA0, 0x1680, 0x2028, 0x2029, 0x3000, 0xFEFF, 0x20):
        assert not accepts(dfa, f'"a{chr(code)}"'), hex(code)
    # neither of the last two is a space of either's
    for text in ("a", "é", "中", "\u200b", "\u180e"):
        assert accepts(dfa, f'"{text}"'), text


def test_what_the_two_read_differently_is_named_and_the_rest_is_left_as_it_is():
    for pattern, message in (
        ("[]a]", "a whole class"),
        ("a[^]b]", "a whole class"),
        ("a{,3}", r"write \{0,3\}"),
        ("a{,}", "write"),
    ):
        with pytest.raises(ValueError, match=message):
            ecma.as_python(pattern)
    for pattern in (r"[a[]b]", r"\[\]", "a{2,3}", r"[{,3}]", r"\\", r"a|(?:b)*", r"[\]]", "^$"):
        assert ecma.as_python(pattern) == pattern
    assert ecma.as_python(r"\\d\d") == r"\\d[0-9]"
    assert ecma.as_python(r"[[\d]\d") == "[[0-9][0-9]"
    np.testing.assert_array_equal(
        accepted(ecma.as_python(".")), held(re.sub("[\n\r\u2028\u2029]", "", EVERY))
    )
