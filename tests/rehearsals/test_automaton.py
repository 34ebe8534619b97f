"""Structured output as one file: an automaton is a logits processor with a memory, its state.

Texts are `ab` or `c`, any number of times, and then the end `e`: after `a` only `b` is allowed,
after `e` only `e`.
"""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, rules
from jaxspec.core import BoundProcessor, Processor, Prompt, token_rows
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.testing import certify, decoder_distribution, table_model, total_variation
from jaxspec.vocab.remap import map_vocabulary
from tests.marks import marked

LETTERS, DEAD = "abce", 3
#          a     b     c  e
TABLE = [[1, DEAD, 0, 2], [DEAD, 0, DEAD, DEAD], [DEAD, DEAD, DEAD, 2], [DEAD] * 4]
EXACT, VOCAB = 1e-5, len(LETTERS)
TARGET, DRAFT = (
    table_model(jax.random.key(1), VOCAB),
    table_model(jax.random.key(2), VOCAB, sharpness=1.5),
)
PROMPTS = Prompt(
    jnp.array([[1, 0, 2, 1, 0], [3, 3, 1, 0, 0], [0, 2, 0, 0, 0]]), jnp.array([5, 3, 1])
)
GREEDY = dict(max_new_tokens=np.array([13, 9, 16]))


def walk(table, state, token):  # [B, states, V], [B], [B]
    return jax.vmap(lambda table, state, token: table[state, token])(table, state, token)


def after_row(table, row, start, vocab):
    def step(state, entry):
        place, token = entry
        new = jnp.logical_and(place >= start, place < row.length)
        return jnp.where(new, walk(table, state, token), state), None

    places = jnp.arange(row.tokens.shape[1], dtype=start.dtype)
    return jax.lax.scan(step, jnp.zeros_like(start), (places, row.tokens.T))[0]


def mask(table, logits, preceding):
    follows = jax.vmap(lambda table, states: table[states])(table, preceding.memory)  # [B, T, V]
    return jnp.where(follows == DEAD, -jnp.inf, logits)


AUTOMATON = BoundProcessor(
    Processor(mask, after_row, walk), params=np.array([TABLE], np.int32), name="automaton"
)
DRAFTERS = {
    "a model": DRAFT,
    "its own target": TARGET,
    "a tree": drafters.tree(DRAFT, (2, 2)),
    "a dynamic tree": drafters.dynamic_tree(DRAFT, nodes=6, depth=3, width=2),
    "a look-up": drafters.prompt_lookup(),
    "a cascade": drafters.cascade(DRAFT, drafters.prompt_lookup(), gamma=2),
    "another vocabulary": map_vocabulary(
        table_model(jax.random.key(3), 3), [2, 0, 3], VOCAB, [[1], [0, 1], [0], [2]]
    ),
}


def is_accepted(tokens):
    return re.fullmatch("(ab|c)*(a|e*)", "".join(LETTERS[token] for token in tokens)) is not None


@pytest.mark.parametrize("name", marked(DRAFTERS, slow={*DRAFTERS} - {"its own target"}))
def test_drafted_text_is_plain_text_and_in_the_language(name):
    plain = jaxspec.generate(TARGET, PROMPTS, logits_processors=(AUTOMATON,), **GREEDY)
    out = jaxspec.generate(
        TARGET, PROMPTS, drafter=DRAFTERS[name], gamma=3, logits_processors=(AUTOMATON,), **GREEDY
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    rows = token_rows.to_lists(out.tokens, out.lengths)
    assert all(map(is_accepted, rows)) and [len(row) for row in rows] == [13, 9, 16]
    free = jaxspec.generate(TARGET, PROMPTS, **GREEDY)
    assert not all(map(is_accepted, token_rows.to_lists(free.tokens, free.lengths)))
    if name == "its own target":  # the draft side is masked after its own prefix, too
        assert out.stats.accepted.tolist() == out.stats.drafted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a model", "a tree"])
def test_refilled_rows_streams_prefixes_and_rollouts_begin_in_the_first_state(name):
    options = dict(
        drafter=DRAFTERS[name],
        gamma=3,
        logits_processors=AUTOMATON,
        temperature=1.0,
        key=jax.random.key(4),
    )
    prompts = [row + [1] * n for n in range(3) for row in token_rows.to_lists(*PROMPTS[:2])]
    out = jaxspec.generate(TARGET, prompts, max_new_tokens=12, **options)
    expected = out.tokens.tolist()
    assert all(map(is_accepted, expected))
    rows = jaxspec.generate_many(TARGET, prompts, slots=2, max_new_tokens=12, **options)
    assert [row.tokens for row in sorted(rows, key=lambda row: row.number)] == expected
    shared = jaxspec.prefix(TARGET, [3, 3], drafter=DRAFTERS[name])
    after = prompts[1][2:]
    resumed = jaxspec.generate(TARGET, [after] * 2, prefix=shared, max_new_tokens=12, **options)
    whole = jaxspec.generate(TARGET, [prompts[1]] * 2, max_new_tokens=12, **options)
    assert resumed.tokens.tolist() == whole.tokens.tolist()
    pieces = jaxspec.stream(TARGET, prompts[1], max_new_tokens=12, **options)
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens[0].tolist()
    prepared = prepare(TARGET, [prompts[1]] * 2, max_new_tokens=12, **options)
    assert jaxspec.rollout(prepared).tokens[:, :12].tolist() == whole.tokens.tolist()


def masked_distribution(steps):
    """The distribution of plain sampling, walked token by token in numpy."""
    start = PROMPTS.tokens[0, :5].tolist()
    distribution = {}
    for new in itertools.product(range(VOCAB), repeat=steps):
        probability, row, state = 1.0, list(start), 0
        for token in new:
            logits = np.asarray(TARGET.params, np.float64)[row[-2], row[-1]]
            weights = np.exp(logits) * (np.array(TABLE[state]) != DEAD)
            probability *= weights[token] / weights.sum()
            row.append(token)
            state = TABLE[state][token]
            if probability == 0:
                break
        if probability:
            distribution[new] = probability
    return distribution


@pytest.mark.parametrize(
    "name", marked(["a model", "a tree", "a look-up"], slow=["a tree", "a look-up"])
)
def test_the_certificate_of_masked_text(name):
    prompt = Prompt(PROMPTS.tokens[:1], PROMPTS.length[:1])
    options = dict(drafter=DRAFTERS[name], gamma=2, temperature=1.0, logits_processors=[AUTOMATON])
    prepared = prepare(TARGET, prompt, key=jax.random.key(0), **options)
    distribution = decoder_distribution(prepared, steps=3)
    assert total_variation(distribution, masked_distribution(3)) <= EXACT
    assert all(map(is_accepted, distribution))


@pytest.mark.slow
def test_a_memory_that_draft_tokens_do_not_reach_is_caught():
    forgetful = Processor(mask, after_row, lambda table, state, token: state)
    options = dict(drafter=TARGET, gamma=1, steps=3, rule=rules.rejection())
    assert certify(TARGET, logits_processors=AUTOMATON, **options) <= EXACT
    assert (
        certify(TARGET, logits_processors=AUTOMATON._replace(functions=forgetful), **options) > 1e-2
    )


@pytest.mark.slow
def test_another_automaton_compiles_nothing():
    def run(table, key):
        processor = AUTOMATON._replace(params=np.array([table], np.int32))
        options = dict(drafter=DRAFT, gamma=3, temperature=1.0, key=key, max_new_tokens=9)
        return jaxspec.generate(TARGET, PROMPTS, logits_processors=(processor,), **options)

    run(TABLE, jax.random.key(0))
    before = loop.generation.num_programs()
    out = run([[DEAD, DEAD, 0, DEAD]] * 4, jax.random.key(1))
    assert loop.generation.num_programs() == before
    assert set(out.tokens.ravel().tolist()) == {LETTERS.index("c")}
