"""Every drafter goes through the same properties, with every draft-length policy and the rejection rule.

tests/rules/test_conformance.py has the rules. Programs are what costs time: traced values make the cases of one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.drafters.common import as_drafter
from jaxspec.drafters.lookups import datastore
from jaxspec.rules import catalogue
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import (
    certify,
    decoder_distribution,
    excess,
    plain_distribution,
    table_model,
    total_variation,
    with_sampler,
)
from jaxspec.vocab.remap import map_vocabulary

EXACT = 1e-5
TARGET = table_model(jax.random.key(1), 3)
TEXTS = [[0, 1, 1, 2, 0, 1, 2, 2, 1, 0], [2, 2, 0]]
TABLES = drafters.bigram(TEXTS, TARGET, followers=2)
TRIGRAM = drafters.ngram([[0, 1, 1, 2, 0, 1], [2, 2, 0]], TARGET, order=3)  # lacks the pairs 0 0, 0 2, 1 0 and 2 1
STORE = datastore.build([[0, 2, 1, 1, 0, 2], [1, 0]], vocab_size=3)
MODEL = table_model(jax.random.key(2), 3, sharpness=1.5)
SMALL = table_model(jax.random.key(4), 3, order=1)
SPELLED = map_vocabulary(table_model(jax.random.key(3), 2, sharpness=1.5), [2, 0], 3, [[1], [0, 1], [0]])
DRAFTERS = {
    "a model": as_drafter(MODEL),
    "a model of another vocabulary": as_drafter(SPELLED),
    "its argmax": drafters.greedy(MODEL),
    "unigram": as_drafter(drafters.unigram(TEXTS, TARGET)),
    "n-gram samples": as_drafter(TABLES),
    "n-gram argmax": drafters.greedy(TABLES),
    "samples without back-off": drafters.without_backoff(TRIGRAM),
    "argmax without back-off": drafters.greedy(drafters.without_backoff(TRIGRAM)),
    "uniform": drafters.uniform(),
    "prompt_lookup": drafters.prompt_lookup(2),
    "retrieval": drafters.retrieval(STORE, longest=3, shortest=2),
    "online_ngram": drafters.online_ngram(3, top=2, slots=7),
    "fallback": drafters.fallback(drafters.prompt_lookup(2, 2), drafters.without_backoff(TRIGRAM), MODEL),
    "a tree": drafters.tree(MODEL, (2, 1)),
    "a tree of n-grams": drafters.tree(TABLES, (1, 2), draw="mixed"),
    "a ragged tree": drafters.tree(MODEL, shape=[(0,), (1,), (1, 0)], draw="without_replacement"),
    "sequences": drafters.sequences(MODEL, k=2, length=2),
    "a dynamic tree": drafters.dynamic_tree(MODEL, nodes=4, depth=3, width=2),
    "a dynamic tree of n-grams": drafters.dynamic_tree(TABLES, nodes=3, depth=2, width=2),
    "token_recycling": drafters.token_recycling([(0,), (1,), (0, 0)]),
    "prompt_lookup, a tree": drafters.prompt_lookup(2, candidates=2, length=2),
    "retrieval, a tree": drafters.retrieval(STORE, longest=2, shortest=1, candidates=2, length=2),
    "suffix": drafters.suffix(3, places=4),
    "suffix, a tree": drafters.suffix(3, places=4, candidates=2, length=2),
    "a cascade": drafters.cascade(MODEL, SMALL, gamma=2),
    "a cascade of three levels": drafters.cascade(MODEL, drafters.cascade(SMALL, drafters.prompt_lookup(2), gamma=1)),
    "a cascade, lower levels warmer": drafters.cascade(MODEL, SMALL, gamma=1, inner_temperature=2.0),
    "a cascade with a tree inside": drafters.cascade(MODEL, drafters.tree(SMALL, (2,))),
    "a cascade by the block rule": drafters.cascade(MODEL, SMALL, gamma=2, rule=rules.block()),
    "a lenient cascade": drafters.cascade(MODEL, SMALL, gamma=1, rule=rules.lenient(0.5)),
    "a horizontal cascade": drafters.horizontal_cascade(MODEL, SMALL, tokens=1),
    "a look-up, then a model": drafters.horizontal_cascade(drafters.prompt_lookup(2), TABLES, tokens=1),
    "jacobi": drafters.jacobi(),
    "lookahead": drafters.lookahead(window=2, ngram=2, candidates=1, pool=2),
    "lookahead with two levels": drafters.lookahead(window=2, ngram=3, candidates=1, pool=2),
}
MAY_BE_EMPTY = {name for name, drafter in DRAFTERS.items() if drafter.functions.may_be_empty}
POLICIES = {
    "constant": policies.constant(1),
    "heuristic": policies.heuristic(start=1, grow=1),
    "confidence": policies.confidence(0.45),
    "entropy": policies.entropy(1, 2, 0.5),
    "adaptive": policies.adaptive(0.1, 0.1, pause=1),
    "oracle": policies.oracle(np.array([[2, 0, 1]])),
}
TREES = {name for name, drafter in DRAFTERS.items() if drafter.functions.tree is not None}
# Others stand for these.
CASCADES = {name for name in DRAFTERS if "cascade" in name} | {"a look-up, then a model"}
SELDOM = {"a model", "a model of another vocabulary", "its argmax", "unigram", "a ragged tree", "a tree of n-grams"}
SELDOM |= {"a dynamic tree of n-grams", "retrieval, a tree", *CASCADES}
SELDOM -= {"a cascade of three levels", "a horizontal cascade"}
STOPPING = {name for name, policy in POLICIES.items() if policy.functions.should_continue is not None}  # refuse trees
OF_TREES = {"a tree": set(POLICIES) - STOPPING, "token_recycling": {"constant"}, "a dynamic tree": {"adaptive"}}
OF_CASCADES = {name: {"adaptive", "confidence"} for name in ("a cascade", "a horizontal cascade")}
OF_TREES["lookahead"] = {"constant"}
OF_TREES["lookahead with two levels"] = set()
PAIRS = [
    (name, policy)
    for name in DRAFTERS
    for policy in POLICIES
    if policy in ((OF_TREES | OF_CASCADES).get(name, ()) if name in TREES | CASCADES else POLICIES)
]
QUICK = {("a model", name) for name in ("heuristic", "confidence", "adaptive")}
QUICK |= {("prompt_lookup", "adaptive"), ("fallback", "oracle"), ("a dynamic tree", "adaptive")}


def _slow(really):
    return pytest.mark.exhaustive if really else ()


PLAIN = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))
CASES = {
    "plain": PLAIN,
    "warped": SamplingParams(jnp.array([1.3]), jnp.array([2]), jnp.array([0.9])),
    "temperature 0": PLAIN._replace(temperature=jnp.zeros(1)),
}
EVERYTHING = at_temperature(3, True)
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))


@pytest.mark.parametrize("name", [pytest.param(name, marks=_slow(name in SELDOM)) for name in DRAFTERS])
def test_the_distribution_of_the_text_is_the_targets(name):
    options = dict(drafter=DRAFTERS[name], gamma=2, sampler=EVERYTHING, prompt=PROMPT)
    options |= dict(steps=3) if name in TREES | CASCADES else {}  # two rounds at least
    some = {case: params for case, params in CASES.items() if case != "warped" or name not in TREES | CASCADES}
    off = {case: certify(TARGET, sampling_params=params, **options) for case, params in some.items()}
    assert max(off.values()) < EXACT, off


NESTED = {"a tree", "a tree of n-grams", *set(DRAFTERS).difference(TREES, CASCADES)}  # decode/test_rows.py has them
NESTED -= {"suffix", "a model of another vocabulary", "jacobi"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SELDOM else pytest.mark.slow)
        for name in DRAFTERS
        if name not in NESTED
    ],
)
def test_rows_may_be_permuted_in_mid_generation(name, permuted):
    as_it_is, on_the_way = permuted(TARGET, DRAFTERS[name])
    assert on_the_way == as_it_is


@pytest.mark.parametrize(
    ("name", "policy"),
    [pytest.param(name, policy, marks=_slow((name, policy) not in QUICK)) for name, policy in PAIRS],
)
def test_the_distribution_of_the_text_is_the_targets_with_every_policy(name, policy):
    """Nothing that a policy remembers is taken for granted: every path is followed by itself."""
    given = dict(sampler=EVERYTHING, sampling_params=PLAIN, prompt=PROMPT, policy=POLICIES[policy], steps=3)
    assert certify(TARGET, drafter=DRAFTERS[name], gamma=2, **given) < EXACT


@pytest.mark.parametrize(
    "name", ["prompt_lookup", *(pytest.param(x, marks=_slow(True)) for x in ("retrieval", "online_ngram"))]
)
def test_an_encoder_decoders_prompt_is_no_part_of_its_row(name):
    target = table_model(jax.random.key(1), 3, order=1, encoder=True)
    prompt = Prompt(jnp.array([[0, 1, 2, 1]]), jnp.array([4]))
    assert certify(target, drafter=DRAFTERS[name], gamma=2, prompt=prompt, steps=3) < EXACT


JUDGES = {name: entry for name, entry in catalogue.RULES.items() if entry.rule.trees and name != "rejection"}
SOME = {(name, "coupled") for name in ("sequences", "a dynamic tree", "token_recycling")}
SOME |= {(name, "traversal") for name in ("a dynamic tree", "prompt_lookup, a tree", "lookahead", "sequences")}
SOME |= {("sequences", "k_seq"), ("a dynamic tree", "exact_match"), ("token_recycling", "typical")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=() if (name, rule) in SOME else pytest.mark.exhaustive)
        for name in DRAFTERS
        if name in TREES
        for rule in JUDGES
    ],
)
def test_trees_with_every_rule_that_judges_them(name, rule):
    """Exact, or within the bound that an inexact rule states. At temperature 0 they do what rejection does."""
    entry, steps = JUDGES[rule], 3
    prepared = with_sampler(
        prepare(TARGET, PROMPT, drafter=DRAFTERS[name], rule=entry.rule, gamma=2), EVERYTHING, PLAIN
    )
    found = decoder_distribution(prepared, steps=steps)
    plain = plain_distribution(TARGET, PROMPT, EVERYTHING, PLAIN, steps)
    if entry.bound is None:
        assert total_variation(found, plain) < EXACT
    else:
        assert excess(found, plain, entry.bound, vocab=3) < EXACT


@pytest.mark.parametrize(
    "name", ["online_ngram", "jacobi", *(pytest.param(x, marks=_slow(True)) for x in ("token_recycling", "lookahead"))]
)
def test_that_the_tables_of_a_row_grew_otherwise_does_not_matter(name):
    """Paths with the same tokens are not merged, so nothing about a drafter's memory is taken for granted."""
    prepared = with_sampler(prepare(TARGET, PROMPT, drafter=DRAFTERS[name], gamma=2), EVERYTHING, PLAIN)
    distribution = decoder_distribution(prepared, steps=4, merge=False)
    assert total_variation(distribution, plain_distribution(TARGET, PROMPT, EVERYTHING, PLAIN, 4)) < EXACT


# --- rows among other rows

BIG = table_model(jax.random.key(5), 6, sharpness=2.0)
WRITTEN = [[1, 2, 3, 1, 2, 3, 4, 5], [4, 5, 0, 4, 5], [0, 0, 1, 2]]
BIG_TABLES = drafters.ngram(WRITTEN, BIG, order=3)
BIG_MODEL = table_model(jax.random.key(6), 6, sharpness=2.0)
AMONG = {
    **{name: DRAFTERS[name] for name in ("uniform", "prompt_lookup", "online_ngram")},
    "n-gram samples": BIG_TABLES,
    "n-gram argmax": drafters.greedy(BIG_TABLES),
    "samples without back-off": drafters.without_backoff(BIG_TABLES),
    "fallback": drafters.fallback(drafters.prompt_lookup(3, 3), drafters.without_backoff(BIG_TABLES), BIG_MODEL),
    "retrieval": drafters.retrieval(datastore.build([[*row, *row] for row in WRITTEN], vocab_size=6)),
    "a tree": drafters.tree(BIG_MODEL, (2, 2, 1)),
    "sequences": drafters.sequences(BIG_MODEL, k=3, length=2),
    "a dynamic tree": drafters.dynamic_tree(BIG_MODEL, nodes=6, depth=3, width=3),
    "token_recycling": drafters.token_recycling(),
    "prompt_lookup, a tree": drafters.prompt_lookup(candidates=2, length=4),
    "suffix": drafters.suffix(),
    "a cascade": drafters.cascade(BIG_MODEL, drafters.cascade(BIG_TABLES, drafters.prompt_lookup(), gamma=1), gamma=2),
    "a horizontal cascade": drafters.horizontal_cascade(BIG_MODEL, drafters.greedy(BIG_TABLES), tokens=2),
    "jacobi": drafters.jacobi(),
    "lookahead": drafters.lookahead(window=3, ngram=3, candidates=2, pool=16),
}
LIMITS, TEMPERATURES = np.array([20, 24, 7]), np.array([1.0, 0.0, 1.0])


@pytest.fixture(scope="module")
def greedy():
    row = Prompt(jnp.array([WRITTEN[1]]), jnp.array([len(WRITTEN[1])]))
    return jaxspec.generate(BIG, row, max_new_tokens=int(LIMITS[1])).tokens[0].tolist()


@pytest.mark.parametrize("name", AMONG)
def test_rows_depend_on_no_other_row(name, greedy):
    """Ragged rows in two orders, one of them greedy and one that ends early; the first among copies of itself."""
    keys = jax.random.split(jax.random.key(7), 3)
    texts = {}
    for order in ([0, 1, 2], [2, 0, 1], [0, 0, 0]):
        tokens = np.full((3, 9), 5, np.int32)
        for i, row in enumerate(order):
            tokens[i, : len(WRITTEN[row])] = WRITTEN[row]
        out = jaxspec.generate(
            BIG,
            Prompt(jnp.asarray(tokens), jnp.array([len(WRITTEN[row]) for row in order])),
            drafter=AMONG[name],
            gamma=3,
            temperature=TEMPERATURES[order],
            max_new_tokens=LIMITS[order],
            key=keys[np.array(order)],
        )
        for i, row in enumerate(order):
            text = out.tokens[i, : out.lengths[i]].tolist(), int(out.stats.rounds[i]), int(out.stats.drafted[i])
            assert texts.setdefault(row, text) == text
    assert texts[1][0] == greedy
    assert any(drafted > 0 for _, _, drafted in texts.values())
    if name in MAY_BE_EMPTY - TREES:
        assert any(drafted < 3 * rounds for _, rounds, drafted in texts.values())


# --- without training


@pytest.mark.parametrize(("drafter", "most"), [(drafters.prompt_lookup(), 29), (drafters.online_ngram(), 24)])
def test_text_that_repeats_itself_takes_fewer_rounds(drafter, most):
    target = table_model(jax.random.key(3), 6)  # greedy text of a small table soon runs in circles
    prompts = Prompt(jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2]))
    plain = jaxspec.generate(target, prompts, max_new_tokens=40)
    out = jaxspec.generate(target, prompts, drafter=drafter, gamma=5, max_new_tokens=40)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (np.asarray(out.stats.rounds) <= most).all()
