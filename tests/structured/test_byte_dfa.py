"""Automata over bytes accept what Python's own expressions match."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from jaxspec.structured import byte_dfa

REGEXES = [
    "a( b| c)*( a)?",
    "(ab|abcd)c?",
    "[0-9]+(\\.[0-9]+)?",
    "ä+é?b",
    "a{2,3}|",
    "[^a]b",
    "(?:a|b)*abb",
    "a?b?c?",
    "^a|b$",
    "\\.\\*",
    "\\d\\w?",
    "\\W.",
    "[^\\s1]+",
    "(?s).a",
    "a*?b",
]
ALPHABET = "ab c.*é1"


def accepts(dfa, text):
    state = 0
    for byte in text.encode():
        if (state := int(dfa.step[state, byte])) < 0:
            return False
    return bool(dfa.accepting[state])


# Characters of one number of bytes in UTF-8, the first and the one after the last; surrogates are
# none.
WIDTHS = [
    (1, 0, 0x80),
    (2, 0x80, 0x800),
    (3, 0x800, 0xD800),
    (3, 0xE000, 0x10000),
    (4, 0x10000, 0x110000),
]
EVERY = "".join(chr(code) for _, first, end in WIDTHS for code in range(first, end))


def held(characters):
    """Says of each code point whether it is among some characters."""
    each = np.zeros(0x110000, bool)
    each[np.frombuffer("".join(characters).encode("utf-32-le"), np.uint32)] = True
    return each


def accepted(regex):
    """Says of each code point whether an expression of one character accepts it."""
    dfa = byte_dfa.from_regex(regex)
    step = np.concatenate([dfa.step, np.full((1, 256), -1)])  # -1, the last row, leads to itself
    accepting = np.append(dfa.accepting, False)
    each = np.zeros(0x110000, bool)
    for width, first, end in WIDTHS:
        state = np.zeros(end - first, int)
        text = "".join(map(chr, range(first, end)))
        for column in np.frombuffer(text.encode(), np.uint8).reshape(-1, width).T:
            state = step[state, column]
        each[first:end] = accepting[state]
    return each


def test_a_class_holds_the_characters_that_it_holds_in_python():
    for regex in (
        r"\d",
        r"\D",
        r"\s",
        r"\w",
        ".",
        r"[^\S\d]",
        r"(?a)\W",
        r"(?a)[^\s]",
        "(?s).",
        "[^.]",
    ):
        np.testing.assert_array_equal(accepted(regex), held(re.findall(regex, EVERY)), regex)


def test_a_dollar_after_an_even_number_of_backslashes_is_an_anchor():
    for regex, text in (
        (r"a\\$", "a\\"),
        (r"a\$", "a$"),
        (r"a\\\$", "a\\$"),
        ("a$", "a"),
        (r"\\$", "\\"),
        (r"^\\\\$", "\\\\"),
    ):
        dfa = byte_dfa.from_regex(regex)
        assert re.fullmatch(regex, text)
        assert accepts(dfa, text)
        assert not any(accepts(dfa, other) for other in (text + "$", text[:-1], text + "\\"))


@pytest.mark.parametrize("regex", REGEXES)
def test_an_expression_accepts_what_it_matches(regex):
    dfa = byte_dfa.from_regex(regex)
    texts = (
        "".join(x)
        for n in range(6)
        for x in itertools.product(ALPHABET, repeat=n)
        if n < 5 or x[0] in "a1"
    )
    for text in texts:
        assert accepts(dfa, text) == bool(re.fullmatch(regex, text)), text


def test_choices_and_the_same_as_an_expression_are_one_automaton():
    choices = ("yes", "no", "é", "yes, but", "n.o")
    a, b = byte_dfa.from_choices(choices), byte_dfa.from_regex("|".join(map(re.escape, choices)))
    assert len(a.step) == len(b.step)
    for text in (*choices, "", "y", "yes,", "n_o", "noo"):
        assert accepts(a, text) == accepts(b, text) == (text in choices)


def test_what_matches_nothing_or_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="expected a regular expression"):
        byte_dfa.from_regex("(a")
    with pytest.raises(ValueError, match="matches no text"):
        byte_dfa.from_regex("a[^\\x00-\\U0010FFFF]")


@pytest.mark.parametrize("regex", ["(a)\\1", "a(?=b)", "a\\bb", "(?i)a", "a^b", "a{1000000}"])
def test_what_is_not_regular_is_refused(regex):
    with pytest.raises(ValueError, match="regex is"):
        byte_dfa.from_regex(regex)


def test_long_repetitions_have_a_state_for_each_character():
    assert byte_dfa.from_regex("[a-z]{1000}").step.shape == (1001, 256)


def test_a_group_may_be_of_ascii_alone():
    dfa = byte_dfa.from_regex("(?a:\\d)\\d")
    assert accepts(dfa, "1\u0661") and not accepts(dfa, "\u06611")


def test_characters_of_every_length_are_whole():
    dfa = byte_dfa.from_regex("[é-\U0001f600]")
    for code in (0xE8, 0xE9, 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x1F600, 0x1F601):
        assert accepts(dfa, chr(code)) == (0xE9 <= code <= 0x1F600), hex(code)
