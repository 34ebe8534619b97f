"""JSON schemas: every text of the expression is valid, and what is not supported is refused by its
place.
"""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest

from jaxspec.structured import byte_dfa, schemas

QUOTED = {
    'a"b.c': {"type": "null"},
    "d/e": {"const": 1.5},
    "z": {"type": "integer", "minimum": -5, "maximum": 300},
}
SCHEMAS = {
    "names that are escaped": {"type": "object", "properties": QUOTED, "required": ['a"b.c']},
    "optional properties": {
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}, "c": {"enum": ["x", 3]}}
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": 0},
        "minItems": 2,
        "maxItems": 4,
    },
    "dictionaries": {
        "additionalProperties": {"type": ["boolean", "null"]},
        "type": "object",
        "maxProperties": 2,
    },
    "tuples": {
        "prefixItems": [{"type": "null"}, {"type": "integer"}],
        "minItems": 2,
        "maxItems": 2,
    },
    "nothing said": {},
    "any object": {"type": "object"},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    "a constant": {"const": {"a": [1, None, "é\n"]}},
    "times": {"type": "string", "format": "date-time"},
    "dates": {"type": "string", "format": "date"},
    "addresses": {"type": "string", "format": "ipv4"},
    "a pattern": {"type": "string", "pattern": "^[a-z]{3}[0-9]+$"},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "references": {
        "anyOf": [{"$ref": "#/$defs/q"}, {"type": "null"}],
        "$defs": {
            "q": {"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]}
        },
    },
    "kinds": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"is": {"const": kind}, "n": {"type": "integer"}},
                "required": ["is"],
            }
            for kind in ("a", "b")
        ]
    },
}


def distances(dfa):
    """Bytes to the nearest end, from each state."""
    distance = np.where(dfa.accepting, 0, 2**20)
    for _ in range(len(distance)):
        after = np.where(dfa.step >= 0, distance[dfa.step], 2**20).min(axis=1) + 1
        distance = np.minimum(distance, after)
    return distance


def texts(dfa, count, size=60):
    """Texts that the automaton accepts, byte by byte at random; after `size` bytes by the shortest
    way to an end.
    """
    draw, distance = random.Random(0), distances(dfa)
    for _ in range(count):
        state, text = 0, b""
        while True:
            allowed = np.flatnonzero(dfa.step[state] >= 0)
            is_over = not len(allowed) or draw.random() < 0.3 or len(text) > size
            if dfa.accepting[state] and is_over:
                break
            if len(text) > size:
                allowed = allowed[distance[dfa.step[state][allowed]] < distance[state]]
            byte = int(draw.choice(allowed.tolist()))
            text, state = text + bytes([byte]), dfa.step[state][byte]
        yield text.decode()


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_valid(name):
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    dfa = byte_dfa.from_regex(schemas.regex_of(schemas.as_text(SCHEMAS[name])))
    different = set(texts(dfa, 100))
    for text in different:
        check.validate(json.loads(text))
    assert len(different) > (name == "a constant")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "multipleOf": 3}, "multipleOf at #, which is not supported"),
        (
            {"properties": {"a": {"type": "number", "maximum": 3}}},
            "maximum at #/properties/a, which is not supported",
        ),
        ({"type": "string", "format": "iri"}, "format 'iri' at #: expected one of date"),
        ({"type": "text"}, "type 'text' at #: expected one of null"),
        ({"allOf": [{}, {}]}, "allOf of 2 schemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        (
            {"oneOf": [{"properties": {"a": {"const": x}}, "required": ["a"]} for x in (1, 1.0)]},
            "use anyOf",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
            "refers to itself",
        ),
        ({"$ref": "#/$defs/b"}, "expected a place in it"),
        ({"type": "string", "pattern": "^.*$"}, "allows a quotation mark"),
        ({"type": "string", "pattern": "^a)(b$"}, "unbalanced parenthesis"),
        (
            {"type": "string", "pattern": "^[]a]$"},
            r"'\^\[\]a\]\$' at #: \[\] is a whole class in ECMA 262",
        ),
        ({"type": "string", "pattern": r"^a\$"}, r"expected \^\.\.\.\$"),
        (
            {"properties": {"a": {"type": "string", "pattern": r"^\w\b$"}}},
            r"at #/properties/a: .* an anchor within",
        ),
        ({"type": "string", "pattern": "a+"}, r"expected \^\.\.\.\$"),
        ({"type": "object", "required": ["a"]}, "requires 'a' at # and does not describe it"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems at #"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "bounds of 3 and 1"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "no integer at #: from 3 to 1"),
        ({"not": {}}, "not at #, which is not supported"),
        ({"enum": [1], "type": "string"}, "no value at #"),
        ({"type": "object", "minProperties": 2}, "minProperties 2"),
        ({"type": "object", "properties": ["a"]}, "is not JSON schema"),
        ({"type": "integer", "minimum": float("inf")}, "is not JSON schema"),
        ({"$ref": 5}, "is not JSON schema"),
        ({"enum": "abc"}, "expected a list of values"),
        ({"type": "string", "pattern": "^(?P<y>a)$"}, "leave out its name"),
        ({"anyOf": []}, "expected a list of schemas"),
        ({"type": []}, "no type at #"),
        ({"const": float("nan")}, "which JSON cannot write"),
        ({"type": ["integer", "number"], "minimum": 5}, "minimum at #, which is not supported"),
        ({"type": "number", "minimum": False}, "minimum at #, which is not supported"),
        ({"properties": {"a": False}}, "False at #/properties/a: expected an object"),
    ],
)
def test_what_is_not_supported_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        schemas.regex_of(schemas.as_text(schema))


def test_a_class_of_pydantic_is_a_schema():
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", name=(str, ...), age=(int | None, None))
    dfa = byte_dfa.from_regex(schemas.regex_of(schemas.as_text(person)))
    for text in texts(dfa, 30):
        person.model_validate_json(text)


def test_integers_are_those_between_the_bounds():
    for least, most in ((0, 9), (-12, 131), (7, 7), (None, -3), (95, 1005)):
        dfa = byte_dfa.from_regex(schemas.integers(least, most))
        for n in range(-1100, 1100):
            state = 0
            for byte in str(n).encode():
                state = dfa.step[state, byte] if state >= 0 else -1
            inside = (least is None or n >= least) and (most is None or n <= most)
            assert (state >= 0 and dfa.accepting[state]) == inside, n


BOUNDS = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]


def test_integers_of_any_size_keep_their_bounds():
    """Every keyword alone, and each from below with each from above."""
    draw = random.Random(0)
    for names in [
        *((name,) for name in BOUNDS),
        *itertools.product(BOUNDS[:2], BOUNDS[2:]),
        ("minimum", BOUNDS[1]),
    ]:
        for digits in (3, 18, 19, 20, 25, 60):
            bounds = sorted(
                draw.choice([-1, 1]) * draw.randrange(10 ** (digits - 1), 10**digits) for _ in names
            )
            bounds = [min(bounds), max(bounds) + 3][: len(names)]  # between them is a number
            schema = {"type": "integer"} | dict(zip(names, bounds, strict=True))
            compiled = re.compile(schemas.regex_of(schemas.as_text(schema)))
            longest = max(19, *(len(str(abs(bound))) for bound in bounds))
            near = [bound + step for bound in bounds for step in (-2, -1, 0, 1, 2)]
            for value in [
                *near,
                *(-bound for bound in bounds),
                0,
                10**longest - 1,
                10**longest,
                1 - 10**longest,
            ]:
                valid = {
                    "minimum": lambda bound, value=value: value >= bound,
                    "exclusiveMinimum": lambda bound, value=value: value > bound,
                    "maximum": lambda bound, value=value: value <= bound,
                    "exclusiveMaximum": lambda bound, value=value: value < bound,
                }
                expected = (
                    all(valid[name](schema[name]) for name in names)
                    and len(str(abs(value))) <= longest
                )
                assert bool(compiled.fullmatch(str(value))) == expected, (schema, value)


def test_names_of_hosts_are_ones_that_parsers_take():
    for name in ("email", "uri"):
        for text in texts(
            byte_dfa.from_regex(schemas.regex_of(json.dumps({"type": "string", "format": name}))),
            100,
            300,
        ):
            host = re.split(
                "[@/]", json.loads(text).removeprefix("https://").removeprefix("http://")
            )
            labels = host[1 if name == "email" else 0].split(".")
            assert (
                all(len(label) <= 63 for label in labels)
                and labels[-1].isalpha()
                and len(".".join(labels)) <= 253
            )
            assert name == "uri" or len(host[0]) <= 64
