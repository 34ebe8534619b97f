"""Every drafter goes through the same properties, with every draft-length policy and the rejection
rule.

cases.py has the drafters, and tests/rules/test_conformance.py the rules. Programs are what costs
time: traced values make the cases of one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.rules import catalogue
from jaxspec.testing import (
    certify,
    decoder_distribution,
    excess,
    plain_distribution,
    table_model,
    total_variation,
    with_sampler,
)
from tests.drafters.cases import (
    CASES,
    EVERYTHING,
    EXACT,
    LARGE_TARGET,
    LARGE_TEXTS,
    PLAIN,
    POLICIES,
    PROMPT,
    SAMPLING,
    TARGET,
    TREES,
)
from tests.marks import marked

EXHAUSTIVE = {name for name, case in CASES.items() if case.exhaustive}
SLOW = {name for name, case in CASES.items() if case.slow} - EXHAUSTIVE


@pytest.mark.parametrize("name", marked(CASES, slow=SLOW, exhaustive=EXHAUSTIVE))
def test_the_distribution_of_the_text_is_the_targets(name):
    case = CASES[name]
    options = dict(drafter=case.drafter, gamma=2, sampler=EVERYTHING, prompt=PROMPT)
    options |= dict(steps=3) if case.brief else {}  # two rounds at least
    sampling = {
        kind: params for kind, params in SAMPLING.items() if kind != "warped" or not case.brief
    }
    distances = {
        kind: certify(TARGET, sampling_params=params, **options)
        for kind, params in sampling.items()
    }
    assert max(distances.values()) < EXACT, distances


PERMUTED = [name for name, case in CASES.items() if case.permuted]
# their states are those of the chains
ALIKE = {"suffix, a tree", "prompt_lookup, a tree", "lookahead with two levels"}


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(PERMUTED, exhaustive=EXHAUSTIVE | ALIKE))
def test_rows_may_be_permuted_in_mid_generation(name, permuted):
    as_it_is, on_the_way = permuted(TARGET, CASES[name].drafter)
    assert on_the_way == as_it_is


PAIRS = [(name, policy) for name, case in CASES.items() for policy in case.policies]
USUAL = {(name, policy) for name, case in CASES.items() for policy in case.usual_policies}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), marked(PAIRS, exhaustive={*PAIRS} - USUAL))
def test_the_distribution_of_the_text_is_the_targets_with_every_policy(name, policy):
    """Nothing that a policy remembers is taken for granted: every path is followed by itself."""
    options = dict(
        sampler=EVERYTHING, sampling_params=PLAIN, prompt=PROMPT, policy=POLICIES[policy], steps=3
    )
    assert certify(TARGET, drafter=CASES[name].drafter, gamma=2, **options) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        ["prompt_lookup", "retrieval", "online_ngram"], exhaustive={"retrieval", "online_ngram"}
    ),
)
def test_an_encoder_decoders_prompt_is_no_part_of_its_row(name):
    target = table_model(jax.random.key(1), 3, order=1, encoder=True)
    prompt = Prompt(jnp.array([[0, 1, 2, 1]]), jnp.array([4]))
    assert certify(target, drafter=CASES[name].drafter, gamma=2, prompt=prompt, steps=3) < EXACT


JUDGES = {
    name: entry
    for name, entry in catalogue.RULES.items()
    if entry.rule.trees and name != "rejection"
}
JUDGED = [
    (name, rule)
    for name in TREES
    for rule, entry in JUDGES.items()
    if entry.rule.sources or CASES[name].drafter.functions.tree.sources == 1
]
USUALLY_JUDGED = {(name, rule) for name in TREES for rule in CASES[name].usual_rules}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), marked(JUDGED, exhaustive={*JUDGED} - USUALLY_JUDGED))
def test_trees_with_every_rule_that_judges_them(name, rule):
    """Exact, or within the bound that an inexact rule states. At temperature 0 they do what
    rejection does.
    """
    entry, steps = JUDGES[rule], 3
    prepared = prepare(TARGET, PROMPT, drafter=CASES[name].drafter, rule=entry.rule, gamma=2)
    distribution = decoder_distribution(with_sampler(prepared, EVERYTHING, PLAIN), steps=steps)
    plain = plain_distribution(TARGET, PROMPT, EVERYTHING, PLAIN, steps)
    if entry.bound is None:
        assert total_variation(distribution, plain) < EXACT
    else:
        assert excess(distribution, plain, entry.bound, vocab=3) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    marked(
        ["online_ngram", "jacobi", "token_recycling", "lookahead"],
        exhaustive={"token_recycling", "lookahead"},
    ),
)
def test_that_the_tables_of_a_row_grew_otherwise_does_not_matter(name):
    """Paths with the same tokens are not merged, so nothing about a drafter's memory is taken for
    granted.
    """
    prepared = with_sampler(
        prepare(TARGET, PROMPT, drafter=CASES[name].drafter, gamma=2), EVERYTHING, PLAIN
    )
    distribution = decoder_distribution(prepared, steps=4, merge=False)
    assert (
        total_variation(distribution, plain_distribution(TARGET, PROMPT, EVERYTHING, PLAIN, 4))
        < EXACT
    )


# --- rows among other rows

LARGE = {name: case.large for name, case in CASES.items() if case.large is not None}
LIMITS, TEMPERATURES = np.array([20, 24, 7]), np.array([1.0, 0.0, 1.0])


@pytest.fixture(scope="module")
def greedy():
    row = Prompt(jnp.array([LARGE_TEXTS[1]]), jnp.array([len(LARGE_TEXTS[1])]))
    return jaxspec.generate(LARGE_TARGET, row, max_new_tokens=int(LIMITS[1])).tokens[0].tolist()


# of the same parts as others
ALIKE_LARGE = ("samples without back-off", "n-gram argmax", "uniform", "a cascade")


@pytest.mark.parametrize("name", marked(LARGE, slow={*LARGE} - {"jacobi"}, exhaustive=ALIKE_LARGE))
def test_rows_depend_on_no_other_row(name, greedy):
    """Ragged rows in two orders, one of them greedy and one that ends early; the first among copies
    of itself.
    """
    keys = jax.random.split(jax.random.key(7), 3)
    texts = {}
    for order in ([0, 1, 2], [2, 0, 1], [0, 0, 0]):
        tokens = np.full((3, 9), 5, np.int32)
        for i, row in enumerate(order):
            tokens[i, : len(LARGE_TEXTS[row])] = LARGE_TEXTS[row]
        out = jaxspec.generate(
            LARGE_TARGET,
            Prompt(jnp.asarray(tokens), jnp.array([len(LARGE_TEXTS[row]) for row in order])),
            drafter=LARGE[name],
            gamma=3,
            temperature=TEMPERATURES[order],
            max_new_tokens=LIMITS[order],
            key=keys[np.array(order)],
        )
        for i, row in enumerate(order):
            text = (
                out.tokens[i, : out.lengths[i]].tolist(),
                int(out.stats.rounds[i]),
                int(out.stats.drafted[i]),
            )
            assert texts.setdefault(row, text) == text
    assert texts[1][0] == greedy
    assert any(drafted > 0 for _, _, drafted in texts.values())
    if CASES[name].drafter.functions.may_be_empty and name not in TREES:
        assert any(drafted < 3 * rounds for _, rounds, drafted in texts.values())


# --- without training


@pytest.mark.parametrize(
    ("drafter", "most"), [(drafters.prompt_lookup(), 29), (drafters.online_ngram(), 24)]
)
def test_text_that_repeats_itself_takes_fewer_rounds(drafter, most):
    target = table_model(jax.random.key(3), 6)  # greedy text of a small table soon runs in circles
    prompts = Prompt(jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2]))
    plain = jaxspec.generate(target, prompts, max_new_tokens=40)
    out = jaxspec.generate(target, prompts, drafter=drafter, gamma=5, max_new_tokens=40)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (np.asarray(out.stats.rounds) <= most).all()
