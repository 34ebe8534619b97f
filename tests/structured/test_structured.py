"""Structured output: every text matches, and has the distribution of the target that was masked by
hand.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, rules
from jaxspec.core import Prompt, Room
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.drafters.lookups import datastore
from jaxspec.structured.patterns import patterns_of
from jaxspec.testing import (
    certify_prepared,
    decoder_distribution,
    table_model,
    total_variation,
    word_tokenizer,
)
from tests.drafters.cases import EXACT
from tests.marks import marked
from tests.small import CHARACTERS, characters, prefill

WORDS = ["<unk>", "</s>", "a", "b", "c"]
TOKENIZER = word_tokenizer(WORDS)
TARGET, DRAFT = (
    table_model(jax.random.key(seed), 5, sharpness=sharpness)._replace(tokenizer=TOKENIZER)
    for seed, sharpness in ((1, 1.0), (2, 1.5))
)
PROMPT = Prompt(jnp.array([[2, 3]]), jnp.array([2]))
REGEX, LIMIT = "a( b| c)*( a)?", 4  # tokens, with the end token
DRAFTERS = {
    "a model": DRAFT,
    "its argmax": drafters.greedy(DRAFT),
    "prompt_lookup": drafters.prompt_lookup(2),
    "forced": drafters.forced(),
    "a tree": drafters.tree(DRAFT, (2, 1)),
    "a tree of look-ups": drafters.prompt_lookup(1, candidates=2, length=2),
    "a fallback": drafters.fallback(drafters.prompt_lookup(2, 2), DRAFT),
}


def texts_of(pattern, limit):
    """Every sequence of tokens, the end token among them, whose text matches the pattern within the
    limit.
    """
    inner = [index for index, word in enumerate(WORDS) if index > 1]
    sequences = itertools.chain.from_iterable(
        itertools.product(inner, repeat=n) for n in range(1, limit)
    )
    return {
        (*x, 1) for x in sequences if re.fullmatch(pattern, " ".join(WORDS[token] for token in x))
    }


def masked_by_hand(target, pattern, limit, temperature=1.0):
    """The target's distribution, each token's among those with which some text still matches within
    the limit.
    """
    allowed, chances = texts_of(pattern, limit), {(): 1.0}
    finished = {}
    for depth in range(limit):
        longer = {}
        for text, chance in chances.items():
            row = np.asarray(
                prefill(target, _prompt_with(text), Room(16))[0].logits[0, -1], np.float64
            )
            following = sorted({x[depth] for x in allowed if x[:depth] == text and len(x) > depth})
            weights = np.exp(row[following] / temperature - np.max(row[following] / temperature))
            for token, share in zip(following, weights / weights.sum(), strict=True):
                longer[(*text, token)] = chance * float(share)
        finished |= {x: p for x, p in longer.items() if x[-1] == 1}
        chances = {x: p for x, p in longer.items() if x[-1] != 1}
    return finished


def _prompt_with(text):
    row = [*np.asarray(PROMPT.tokens)[0].tolist(), *text]
    return Prompt(jnp.array([row]), jnp.array([len(row)]))


@pytest.mark.parametrize(
    "name", marked(DRAFTERS, slow={*DRAFTERS} - {"forced"}, exhaustive={"a tree of look-ups"})
)
def test_the_distribution_is_that_of_the_masked_target(name):
    options = dict(
        regex=REGEX, max_new_tokens=LIMIT, temperature=1.0, key=jax.random.key(0), eos_ids=(1,)
    )
    prepared = prepare(TARGET, PROMPT, drafter=DRAFTERS[name], gamma=2, **options)
    distribution = decoder_distribution(prepared, steps=LIMIT, limit=LIMIT)
    expected = masked_by_hand(TARGET, REGEX, LIMIT)
    assert len(expected) == 10 and abs(sum(expected.values()) - 1) < 1e-6
    assert total_variation(distribution, expected) < EXACT


RULES = {
    "block": rules.block(),
    "classical_rejection": rules.classical_rejection(),
    "exact_match": rules.exact_match(),
}
TREE_RULES = {"traversal": rules.traversal(), "k_seq": rules.k_seq()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", marked({**RULES, **TREE_RULES}, exhaustive={"exact_match", "classical_rejection"})
)
def test_every_rule_keeps_the_masked_distribution(name):
    drafter = drafters.sequences(DRAFT, k=2, length=2) if name in TREE_RULES else DRAFT
    options = dict(
        regex=REGEX, max_new_tokens=LIMIT, temperature=1.0, key=jax.random.key(0), eos_ids=(1,)
    )
    prepared = prepare(
        TARGET, PROMPT, drafter=drafter, gamma=2, rule={**RULES, **TREE_RULES}[name], **options
    )
    assert certify_prepared(prepared, steps=3) < EXACT


@pytest.mark.slow
def test_the_coupled_rule_emits_what_plain_sampling_emits_with_the_same_key():
    options = dict(
        regex=REGEX,
        max_new_tokens=8,
        temperature=1.0,
        key=jax.random.key(3),
        eos_ids=(1,),
        num_samples=64,
    )
    plain = jaxspec.generate(TARGET, PROMPT, **options)
    out = jaxspec.generate(TARGET, PROMPT, drafter=DRAFT, gamma=3, rule=rules.coupled(), **options)
    assert out.texts == plain.texts and len(set(out.texts)) > 8


# Random models over the characters of JSON, which would write anything else.
SCHEMAS = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
        "required": ["a"],
    },
    {"type": "array", "items": {"type": ["null", "integer"]}, "minItems": 1, "maxItems": 3},
    {
        "type": "object",
        "properties": {"x": {"type": "string", "maxLength": 3}, "e": {"enum": [1, "é", None]}},
    },
    {
        "anyOf": [
            {"type": "number"},
            {"type": "object", "additionalProperties": {"type": "boolean"}},
        ]
    },
]
PATTERNS = [
    r"[0-9]{3}(\.[0-9]+)?",
    r"(true|false)( (true|false))*",
    r"-?(0|[1-9][0-9]*)",
    r"\{\"a\": ?[a-f]+\}",
    "é+x?",
]


JSON_TARGET, JSON_DRAFT = (
    table_model(jax.random.key(seed), len(CHARACTERS), order=1, sharpness=2.0)._replace(
        tokenizer=characters()
    )
    for seed in (3, 4)
)
ROWS, TRIALS = 50, 15
TEXTS = [
    [CHARACTERS.index(character) for character in text]
    for text in ('{"a": 12,"x": true}', "[null, 3]", "3.14")
]
KINDS = {  # of drafters; heads and early exits are in tests/draft_heads
    "none": None,
    "a model": JSON_DRAFT,
    "its argmax": drafters.greedy(JSON_DRAFT),
    "forced": drafters.forced(),
    "prompt_lookup": drafters.prompt_lookup(2),
    "suffix": drafters.suffix(),
    "online_ngram": drafters.online_ngram(3),
    "lookahead": drafters.lookahead(3, 3, 2),
    "jacobi": drafters.jacobi(3),
    "token_recycling": drafters.token_recycling(),
    "n-grams": drafters.ngram(TEXTS, JSON_TARGET, order=2),
    "retrieval": drafters.retrieval(datastore.build(TEXTS, vocab_size=len(CHARACTERS))),
    "a fallback": drafters.fallback(drafters.prompt_lookup(2, 2), JSON_DRAFT),
    "a cascade": drafters.cascade(JSON_DRAFT, drafters.prompt_lookup(2)),
    "a tree": drafters.tree(JSON_DRAFT, (2, 2)),
    "a dynamic tree": drafters.dynamic_tree(JSON_DRAFT, nodes=4, depth=3, width=2),
    "sequences": drafters.sequences(JSON_DRAFT, k=2, length=2),
}
# the others have the same loop
USUAL = ("none", "a model", "prompt_lookup", "forced", "a dynamic tree")


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(KINDS, exhaustive={*KINDS} - {*USUAL}))
def test_every_text_matches_its_pattern(name):
    """Rows of other patterns and limits in one batch, at several temperatures; none is cut.

    All kinds of drafters together are 12,750 texts.
    """
    jsonschema, draw = pytest.importorskip("jsonschema"), random.Random(name)
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)
    every = [(schema, None) for schema in SCHEMAS] + [(None, pattern) for pattern in PATTERNS]
    for trial in range(TRIALS):
        # Each at least once, so that all trials have automata of one size, and share a program.
        forms = every + [draw.choice(every) for _ in range(ROWS - len(every))]
        draw.shuffle(forms)
        schemas, patterns = map(list, zip(*forms, strict=True))
        out = jaxspec.generate(
            JSON_TARGET,
            [[draw.randrange(2, 20)] for _ in range(ROWS)],
            drafter=KINDS[name],
            gamma=4,
            json_schema=schemas,
            regex=patterns,
            temperature=[draw.choice([0.0, 0.7, 1.5]) for _ in range(ROWS)],
            max_new_tokens=[draw.randrange(16, 33) for _ in range(ROWS)],
            key=jax.random.key(trial),
        )
        for text, schema, pattern in zip(out.texts, schemas, patterns, strict=True):
            if schema is None:
                assert re.fullmatch(pattern, text)
            else:
                jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert set(out.finish) == {"eos"}


@pytest.mark.slow
def test_drafts_leave_greedy_texts_as_they_are_and_run_ahead():
    model = table_model(jax.random.key(3), len(CHARACTERS), order=1)._replace(
        tokenizer=characters()
    )
    draft = table_model(jax.random.key(4), len(CHARACTERS), order=1)._replace(
        tokenizer=characters()
    )
    options = dict(json_schema=SCHEMAS[0], max_new_tokens=24)
    plain = jaxspec.generate(model, [[5], [9]], **options)
    rounds = {}
    for drafter in (
        draft,
        drafters.prompt_lookup(),
        drafters.forced(),
        drafters.tree(draft, (2, 1)),
    ):
        out = jaxspec.generate(model, [[5], [9]], drafter=drafter, gamma=4, **options)
        assert out.texts == plain.texts
        rounds[getattr(drafter, "name", "a model")] = int(out.stats.rounds.sum())
    assert rounds["forced"] < int(plain.stats.rounds.sum())


def test_no_draft_goes_on_past_an_end_token():
    out = jaxspec.generate(
        TARGET, [[2]], choices=["a b c"], drafter=drafters.forced(), gamma=6, max_new_tokens=9
    )
    assert (out.texts, int(out.stats.drafted[0]), int(out.stats.accepted[0])) == (["a b c"], 3, 3)


def test_bias_penalties_and_bans_act_within_what_is_allowed():
    options = dict(choices=["a b", "a c", "b"], max_new_tokens=3, eos_ids=(1,))
    assert jaxspec.generate(TARGET, [[2]], banned=[2], **options).texts == ["b"]
    assert jaxspec.generate(TARGET, [[2]], logit_bias={2: 50.0, 4: 50.0}, **options).texts == [
        "a c"
    ]
    with pytest.raises(ValueError, match="matches no text without the banned tokens"):
        jaxspec.generate(TARGET, [[2]], banned=[2, 3], **options)


def test_log_probs_are_those_of_the_raw_and_of_the_masked_distribution():
    out = jaxspec.generate(
        TARGET,
        [[2]],
        choices=["b"],
        log_probs=True,
        temperature=1.0,
        key=jax.random.key(0),
        max_new_tokens=2,
    )
    raw = np.asarray(out.log_probs.raw)[0]
    assert raw[0] < -0.1 and np.allclose(np.asarray(out.log_probs.sampled)[0], 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(choices=[]), "at least one"),
        (dict(choices="a"), "expected a list of strings"),
        (dict(choices=["a", ""]), "strings that are not empty"),
        (dict(regex=3), "expected a string"),
        (dict(regex="("), "expected a regular expression"),
        (
            dict(regex="a", choices=["b"]),
            r"^regex is given with choices=\['b'\]: expected one of choices, regex",
        ),
        (dict(choices=["a", "\ud83d"]), "choices has .* at character 0, half of a surrogate pair"),
        (dict(regex="a\ud83d"), "regex has .* at character 1, half of a surrogate pair"),
        (dict(json_schema={"enum": ["\ud83d"]}), "json_schema has .* half of a surrogate pair"),
        (dict(regex=["a", "b"]), "2 values for 1 rows"),
        (dict(regex="z"), "matches no text of this tokenizer's tokens"),
        (
            dict(regex="a( b){9}"),
            "max_new_tokens is 4, and the shortest text .* has 11 tokens with its end token",
        ),
        (dict(json_schema="{"), "is not JSON"),
        (dict(json_schema=3), "a dict, the JSON text of an object, or a class of pydantic"),
        (dict(choices=["a"], eos_ids=()), "give eos_ids"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_decoded(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        jaxspec.generate(TARGET, PROMPT, **{"max_new_tokens": 4, "eos_ids": (1,)} | options)


def test_the_row_with_two_patterns_is_named_where_rows_differ():
    for options, message in (
        (dict(regex=[None, "a"], choices=["b"]), r"^row 1 has regex and choices"),
        (dict(regex="a", choices=["b"]), "^regex is given with choices"),
    ):
        with pytest.raises(ValueError, match=message):
            patterns_of(options, 2)


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="needs a tokenizer"):
        jaxspec.generate(TARGET._replace(tokenizer=None), PROMPT, choices=["a"])


def test_rows_of_other_patterns_share_a_program():
    options = dict(max_new_tokens=8, eos_ids=(1,))
    jaxspec.generate(TARGET, [[2], [3]], regex=["a( b)*", None], **options)
    before = loop.generation.num_programs()
    out = jaxspec.generate(TARGET, [[2], [3]], choices=[["c c", "b"], ["a"]], **options)
    assert out.texts[1] == "a" and out.texts[0] in ("c c", "b")
    assert loop.generation.num_programs() == before


def test_beams_are_the_most_probable_texts_that_match():
    """With as many beams as there are beginnings the search finds all of them, by the model's own
    probabilities.
    """
    options = dict(
        regex=REGEX,
        max_new_tokens=LIMIT,
        eos_ids=(1,),
        beams=5,
        length_penalty=0.0,
        early_stopping="never",
    )

    @functools.cache
    def after(text):
        forward, _ = prefill(TARGET, _prompt_with(text), Room(16))
        return np.asarray(jax.nn.log_softmax(forward.logits[0, -1].astype(jnp.float32)))

    chances = {
        text: sum(float(after(text[:place])[token]) for place, token in enumerate(text))
        for text in texts_of(REGEX, LIMIT)
    }
    best = sorted(chances, key=lambda text: -chances[text])
    for drafter in (None, DRAFT):
        out = jaxspec.beam_search(TARGET, PROMPT, drafter=drafter, **options)
        found = [
            tuple(row[:n].tolist())
            for row, n in zip(out.tokens[0], out.lengths[0], strict=True)
            if n
        ]
        assert found[0] == best[0] and set(found) <= set(chances)
        np.testing.assert_allclose(
            out.scores[0][: len(found)], [chances[text] for text in found], atol=1e-5
        )
        assert found == sorted(found, key=lambda text: -chances[text])


def test_fewer_texts_than_beams_are_fewer_hypotheses():
    options = dict(choices=["a b", "c"], max_new_tokens=4, eos_ids=(1,), beams=4)
    for drafter in (None, DRAFT):
        out = jaxspec.beam_search(TARGET, PROMPT, drafter=drafter, **options)
        assert sorted(out.texts[0]) == ["a b", "c"]


@pytest.mark.slow
def test_a_drafter_that_does_a_part_of_the_targets_pass_is_not_changed():
    """With a policy that ends drafts early: the target goes on from what drafting has read, and
    from nothing else.
    """
    model = jaxspec.load("debian-gpt-base")
    options = dict(json_schema=SCHEMAS[0], max_new_tokens=24, log_probs=True)
    plain = jaxspec.generate(model, ["This package"], **options)
    policy = jaxspec.policies.confidence(0.999)
    drafter = drafters.early_exit(model, 1)
    out = jaxspec.generate(
        model, ["This package"], drafter=drafter, gamma=5, policy=policy, **options
    )
    assert out.texts == plain.texts
    np.testing.assert_allclose(out.log_probs.raw, plain.log_probs.raw, atol=1e-3)


def test_an_empty_text_may_match():
    options = dict(regex="(a)?", max_new_tokens=3, eos_ids=(1,))
    assert jaxspec.generate(TARGET, [[2]], logit_bias={1: 50.0}, **options).texts == [""]
    assert jaxspec.generate(TARGET, [[2]], logit_bias={1: -50.0}, **options).texts == ["a"]
