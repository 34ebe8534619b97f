"""Automata over tokens say of every token what the automaton over bytes says of its text."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.structured import automaton, schemas, spelling
from jaxspec.structured.automaton import FAR
from jaxspec.structured.patterns import Pattern
from jaxspec.structured.tables import Pool, TooLarge
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.weights.loading import find
from jaxspec.weights.orbax import tokenizer_of
from tests.small import slow_tokenizers

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "é": {"enum": ["a", 1]},
        "n": {"type": "integer"},
    },
    "required": ["name"],
}
PATTERNS = {
    "a schema": Pattern(regex=schemas.regex_of(json.dumps(SCHEMA)), schema=json.dumps(SCHEMA)),
    "a number": Pattern(regex=r"-?[0-9]+(\.[0-9]+)?"),
    "words": Pattern(regex=r" ?\w+( \w+){0,3}"),
    "choices": Pattern(choices=("the library", "a tool", "über")),
}


def after(dfa, state, text):
    for byte in text:
        state = dfa.step[state, byte] if state >= 0 else -1
    return int(state)


@pytest.mark.parametrize("tokenizer", ["debian-t5-small", "debian-gpt-small"])
@pytest.mark.parametrize("name", PATTERNS)
def test_tokens_lead_where_their_bytes_lead(name, tokenizer):
    """SentencePiece, whose first token loses its space, and byte-level BPE, whose tokens may be
    parts of characters.
    """
    pattern, tokenizer, vocab = PATTERNS[name], tokenizer_of(find(tokenizer)), 8192
    tokens, texts = automaton.of(pattern, tokenizer, vocab), spelling.of(tokenizer, vocab)
    dfa = automaton._read_bytes(pattern)
    draw = np.random.default_rng(0)
    for _ in range(20):
        state, before, row = 0, 0, []
        for place in range(10):
            column = texts.inside if place else texts.first
            leads = tokens.step[state][tokens.classes]
            for token in draw.integers(0, vocab, 50):
                if column[token] is None:
                    assert leads[token] < 0
                elif column[token]:
                    assert (leads[token] >= 0) == (after(dfa, before, column[token]) >= 0), (
                        row,
                        token,
                    )
            allowed = np.flatnonzero(leads >= 0)
            if not len(allowed):
                break
            token = int(draw.choice(allowed))
            row.append(token)
            state, before = leads[token], after(dfa, before, column[token])
            assert bool(tokens.accepting[state]) == (
                bool(dfa.accepting[before]) and column[token] != b""
            )
        text = b"".join(
            (texts.inside if place else texts.first)[token] for place, token in enumerate(row)
        )
        if row and tokens.accepting[state]:
            assert tokenizer.decode(row) == text.decode()


def test_distances_are_those_of_the_shortest_texts_and_bans_count():
    tokenizer = word_tokenizer(["<unk>", "</s>", "a", "b", "c"])
    tokens = automaton.of(Pattern(choices=("a b c", "a c")), tokenizer, 5)
    assert tokens.distances()[0] == 3
    assert tokens.without((1,)).distances()[0] == 3
    assert tokens.without((4,)).distances()[0] == FAR


def test_a_draft_goes_on_with_what_does_not_branch():
    tokenizer = word_tokenizer(["<unk>", "</s>", "a", "b", "c"])
    tokens = automaton.of(Pattern(regex="a b( c| a)"), tokenizer, 5)
    state, row = 0, []
    while (token := int(tokens.likely[state])) >= 0:
        row.append(token)
        state = tokens.step[state, tokens.classes[token]]
    assert row == [2, 3]


def test_a_text_that_matches_is_not_cleaned_up():
    tokenizer = word_tokenizer(["<unk>", "</s>", "a", ".", "b"])
    tokenizer.clean_up_tokenization_spaces = True
    model = table_model(jax.random.key(1), 5)._replace(tokenizer=tokenizer)
    assert jaxspec.generate(model, [[2]], choices=["a . b"], max_new_tokens=4).texts == ["a . b"]
    (row,) = jaxspec.generate_many(
        model, [{"prompt": [2], "choices": ["a . b"]}], max_new_tokens=4, slots=1
    )
    assert row.text == "a . b"


def test_slow_tokenizers_spell_what_they_decode_to_within_a_text(tmp_path):
    """The first piece of Marian's and M2M-100's is a space, which is no text by itself: no word
    before others.
    """
    for name, tokenizer in slow_tokenizers(tmp_path).items():
        ids = tokenizer.get_vocab()
        spelled = spelling.of(tokenizer, 160)
        assert (spelled.first[ids["▁a"]], spelled.inside[ids["▁a"]]) == (b"a", b" a"), name
        assert (spelled.first[ids["1"]], spelled.inside[ids["1"]]) == (b"1", b"1"), name
        # A text ends without its space, so a token of a space alone would be shown in two ways.
        assert spelled.inside[ids["▁"]] is None and spelled.first[ids["▁"]] is None
        unusable = {word for word, index in ids.items() if spelled.inside[index] is None}
        assert (
            {"</s>", "<unk>", "<pad>"} <= unusable <= {*tokenizer.get_added_vocab(), "<s>", "▁"}
        ), name
        model = table_model(jax.random.key(1), 160)._replace(tokenizer=tokenizer)
        options = dict(
            max_new_tokens=8, eos_ids=(tokenizer.eos_token_id,), num_samples=4, temperature=1.0
        )
        out = jaxspec.generate(
            model, [[ids["e"]]], regex="(a|b)( a|1){2}", key=jax.random.key(2), **options
        )
        assert all(re.fullmatch("(a|b)( a|1){2}", text) for text in out.texts), (name, out.texts)


def test_a_tokenizer_whose_text_is_not_put_together_is_refused():
    tokenizer = word_tokenizer(["<unk>", "</s>", "a", "b"])
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **options: decode(tokens, **options).replace("b b", "bb")
    with pytest.raises(ValueError, match="one that puts texts together of its tokens"):
        spelling.of(tokenizer, 4)


def test_a_pattern_that_is_too_large_says_which_part_is():
    schema = json.dumps(
        {"properties": {"a": {"type": "null"}, "text": {"type": "string", "maxLength": 30_000}}}
    )
    pattern = Pattern(regex=schemas.regex_of(schema), schema=schema)
    with pytest.raises(ValueError, match="its property 'text' alone has more than 32,768 states"):
        automaton.of(pattern, word_tokenizer(["<unk>", "</s>", "a"]), 3)


def test_tables_have_a_bound(monkeypatch):
    monkeypatch.setattr("jaxspec.structured.tables.MOST", 10_000)
    pool = Pool(tokenizer_of(find("debian-gpt-small")), 8192, (0,))
    with pytest.raises(TooLarge, match="its property 'name' alone has"):
        pool.add(PATTERNS["a schema"], (), 100)


def test_what_was_built_is_read_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("jaxspec.structured.automaton.SMALL", 0)
    tokenizer = word_tokenizer(["<unk>", "</s>", "a", "b", "c"])
    automaton.of.cache_clear()
    built = automaton.of(Pattern(regex="a( b)+"), tokenizer, 5)
    (file,) = tmp_path.rglob("*.npz")
    automaton.of.cache_clear()
    monkeypatch.setattr("jaxspec.structured.automaton.build", None)
    for made, kept in zip(built, automaton.of(Pattern(regex="a( b)+"), tokenizer, 5), strict=True):
        np.testing.assert_array_equal(made, kept)
    automaton.of.cache_clear()
    for damaged in (b"half", file.read_bytes()[:-30]):
        file.write_bytes(damaged)
        with pytest.raises(TypeError):  # it is built again, which cannot be here
            automaton.of(Pattern(regex="a( b)+"), tokenizer, 5)
        automaton.of.cache_clear()
