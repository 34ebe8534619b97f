"""Jobs whose lines ask for structured output: each its own pattern, in programs that all share."""

from __future__ import annotations

import json
import re

import jax
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.jobs import fields, slots
from jaxspec.testing import table_model, word_tokenizer
from tests.small import CHARACTERS, characters

WORDS = ["<unk>", "</s>", "a", "b", "c"]
MODEL = table_model(jax.random.key(1), 5)._replace(tokenizer=word_tokenizer(WORDS))
REGEXES = ["a( b)*", "(a|b) c", "c( a| b)+", "b b"]


def lines(count):
    return [
        {"prompt": [2 + n % 3], "regex": REGEXES[n % len(REGEXES)], "max_new_tokens": 4 + n % 3}
        for n in range(count)
    ]


def texts(prompts, **options):
    options = dict(max_new_tokens=6, slots=4, in_order=True) | options
    return [row.text for row in jaxspec.generate_many(MODEL, prompts, **options)]


def test_lines_have_patterns_of_their_own_and_compile_nothing_further():
    expected = [
        jaxspec.generate(
            MODEL, [line["prompt"]], regex=line["regex"], max_new_tokens=line["max_new_tokens"]
        ).texts[0]
        for line in lines(6)
    ]
    assert texts(lines(6)) == expected
    before = slots.run_rounds.num_programs(), slots.prefill.num_programs()
    for line, text in zip(lines(12), texts(lines(12)), strict=True):
        assert re.fullmatch(line["regex"], text)
    assert (slots.run_rounds.num_programs(), slots.prefill.num_programs()) == before


@pytest.mark.slow
def test_two_hundred_lines_of_twenty_schemas_compile_what_twenty_lines_do():
    schemas = [
        {
            "type": "object",
            "properties": {first: {"type": "integer"}, second: {"type": kind}},
            "required": [first],
        }
        for first, second in (("a", "x"), ("t", "e"), ("s", "u"), ("n", "f"), ("r", "l"))
        for kind in ("boolean", "null", "integer", "string")
    ]
    model = table_model(jax.random.key(3), len(CHARACTERS), order=1, sharpness=2.0)._replace(
        tokenizer=characters()
    )

    def check(count):
        prompts = [{"prompt": [3 + n % 9], "json_schema": schemas[n % 20]} for n in range(count)]
        options = dict(drafter=drafters.forced(), max_new_tokens=40, slots=4, in_order=True)
        rows = jaxspec.generate_many(model, prompts, **options)
        for prompt, row in zip(prompts, rows, strict=True):
            assert row.finish == "eos"
            jsonschema.validate(json.loads(row.text), prompt["json_schema"])

    jsonschema = pytest.importorskip("jsonschema")
    check(20)
    before = (
        slots.run_rounds.num_programs(),
        slots.prefill.num_programs(),
        slots.insert.num_programs(),
    )
    check(200)
    assert (
        slots.run_rounds.num_programs(),
        slots.prefill.num_programs(),
        slots.insert.num_programs(),
    ) == before


@pytest.mark.slow
def test_drafters_and_lines_without_a_pattern_share_the_slots():
    mixed = [*lines(4), {"prompt": [3]}, {"prompt": [4], "choices": ["a b", "c"]}]
    free = jaxspec.generate(MODEL, [[3]], max_new_tokens=6).texts[0]
    for drafter in (MODEL, drafters.forced()):
        out = texts(mixed, drafter=drafter, gamma=3)
        assert out == texts(mixed) and out[4] == free and out[5] in ("a b", "c")


def test_a_pattern_of_the_job_holds_for_lines_without_one():
    assert set(texts([{"prompt": [2]}, {"prompt": [3], "choices": ["a a"]}], choices=["c c"])) == {
        "c c",
        "a a",
    }


def test_what_cannot_be_is_the_lines_own_error():
    prompts = [
        {"prompt": [2], "regex": "("},
        {"prompt": [2], "regex": "a( b){5}"},
        {"prompt": [2], "choices": ["b"]},
        {"prompt": [2], "json_schema": {"type": "text"}},
        {"prompt": [2], "choices": {"text": ["b"]}},
    ]
    rows = list(
        jaxspec.generate_many(
            MODEL, prompts, max_new_tokens=6, slots=2, on_error="yield", in_order=True
        )
    )
    assert [row.error is None for row in rows] == [False, False, True, False, False]
    assert (
        "shortest text" in rows[1].error
        and "type 'text'" in rows[3].error
        and "list of strings" in rows[4].error
    )


def test_names_of_other_libraries_are_read():
    assert fields.read({"prompt": "a", "guided_regex": "a+"}).pattern.regex == "a+"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    assert fields.read({"prompt": "a", "response_format": schema}).pattern.regex == "(?:null)"
    assert fields.read({"prompt": "a", "response_format": {"type": "text"}}).pattern is None
    with pytest.raises(ValueError, match="expected a type among"):
        fields.read({"prompt": "a", "response_format": {"type": "xml"}})
    with pytest.raises(ValueError, match="mean the same"):
        fields.read({"prompt": "a", "response_format": schema, "json_schema": {"type": "null"}})
