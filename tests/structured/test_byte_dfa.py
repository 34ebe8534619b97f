"""Automata over bytes accept what Python's own expressions match."""

from __future__ import annotations

import itertools
import re

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


@pytest.mark.parametrize("regex", REGEXES)
def test_an_expression_accepts_what_it_matches(regex):
    dfa = byte_dfa.from_regex(regex)
    texts = ("".join(x) for n in range(6) for x in itertools.product(ALPHABET, repeat=n) if n < 5 or x[0] in "a1")
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
