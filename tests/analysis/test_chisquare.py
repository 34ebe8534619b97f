"""The tests of samples find what is wrong, and pass what is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import accept
from jaxspec.accept import catalogue
from jaxspec.analysis import ceiling, chisquare, samples
from jaxspec.analysis.samples import Place
from jaxspec.base import Prompt
from jaxspec.testing import table_model

TARGET, DRAFT = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
PROMPT, KEY, DRAWS = Prompt(jnp.array([[3, 1]]), jnp.array([2])), jax.random.key(0), 2048


@pytest.fixture(scope="module")
def place():
    return samples.place(TARGET, PROMPT, KEY, temperature=1.0, draws=DRAWS)


def drawn(place, rule):
    asked = samples.job(TARGET, PROMPT, KEY, temperature=1.0, drafter=DRAFT, accept=rule)
    return samples.draw(asked, place.first, jax.random.key(1), DRAWS)


def test_a_place_is_in_the_table(place):
    table = jax.nn.softmax(TARGET.params, axis=-1)
    np.testing.assert_allclose(place.after, table[1, place.first], atol=1e-6)
    assert place.then
    for token, law in place.then.items():
        np.testing.assert_allclose(law, table[place.first, token], atol=1e-6)


@pytest.mark.parametrize("rule", [accept.rejection(), accept.block()], ids=lambda rule: rule.name)
def test_a_right_rule_passes(place, rule):
    found = drawn(place, rule)
    fitted = chisquare.fit(place, found.tokens)
    assert fitted.pvalue > 1e-3 and fitted.draws == DRAWS == len(found.tokens) and fitted.cells > 10
    assert 0.05 < found.acceptance_rate < 0.95
    np.testing.assert_allclose(fitted.pvalue, stats.chi2.sf(fitted.statistic, fitted.cells - 1), rtol=1e-4)


def test_a_wrong_rule_does_not(place, wrong_rule):
    assert chisquare.fit(place, drawn(place, wrong_rule).tokens).pvalue < 1e-6


def test_a_rule_that_is_wrong_about_the_second_token_only(place):
    """Right tokens, but each pair in an order that hides who came first behind whom."""
    right = drawn(place, accept.rejection()).tokens
    mixed = np.stack([right[:, 0], np.roll(right[:, 1], 1)], axis=1)
    assert chisquare.fit(place, mixed).pvalue < 1e-6


def test_what_the_target_never_says_is_found_for_certain():
    place = Place(0, np.array([0.5, 0.5, 0.0]), {0: np.array([1.0, 0.0, 0.0])})
    right = np.repeat([[0, 0], [1, 2]], 500, axis=0)
    assert chisquare.fit(place, right).pvalue > 0.9
    for never in ([2, 0], [0, 1]):
        assert chisquare.fit(place, np.concatenate([right, [never]])).pvalue == 0


def test_a_law_that_is_nearly_certain_tests_nothing():
    place = Place(0, np.array([1.0, 0.0]), {0: np.array([1.0, 0.0])})
    assert chisquare.fit(place, np.zeros((100, 2), int)) == chisquare.ChiSquare(0.0, 1, 100, 1.0)


def test_bounds_are_kept_and_broken(place):
    """Lenience of 0.5 keeps its own bound, and breaks that of 0.9."""
    found = drawn(place, accept.lenient(0.5)).tokens
    assert ceiling.check(place, found, catalogue.CHAINS["lenient"].ceiling).pvalue > 1e-3
    assert ceiling.check(place, found, lambda log_p: jnp.minimum(jnp.exp(log_p) / 0.9, 1)).pvalue < 1e-6


def test_a_bound_on_rare_tokens_is_tested_on_all_of_them_together():
    place = Place(0, np.append(0.95, np.full(50, 0.001)), {})

    def as_it_is(log_p):
        return jnp.exp(log_p)

    for rare, broken in ((50, False), (100, True)):
        tokens = np.append(np.zeros(1000 - rare, int), 1 + np.arange(rare) % 50)
        found = ceiling.check(place, np.stack([tokens, tokens], axis=1), as_it_is)
        assert found.cells == 2 and (found.pvalue < 1e-3) == broken
    none = ceiling.check(place, np.zeros((100, 2), int), lambda log_p: jnp.ones_like(log_p))
    assert none == ceiling.Bounded(0, 100, 1.0)


def test_bad_input_is_named():
    two = Prompt(jnp.array([[3, 1], [1, 1]]), jnp.array([2, 2]))
    with pytest.raises(ValueError, match="got 2 prompts: expected one"):
        samples.job(TARGET, two, KEY, temperature=1.0)
    with pytest.raises(ValueError, match="temperature is 0"):
        samples.job(TARGET, PROMPT, KEY, temperature=0)


def test_a_target_without_numbers_is_named():
    broken = TARGET._replace(params=TARGET.params.at[:, 2].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="not finite"):
        samples.draw(samples.job(broken, PROMPT, KEY, temperature=1.0), 2, KEY, 8)
