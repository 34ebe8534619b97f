"""The tests of samples find what is wrong, and pass what is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from benchmarks import goodness_of_fit as fits
from benchmarks import samples
from benchmarks.samples import Context
from jaxspec import rules
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.rules import catalogue
from jaxspec.testing import table_model

TARGET, DRAFT = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
PROMPT, KEY, DRAWS = Prompt(jnp.array([[3, 1]]), jnp.array([2])), jax.random.key(0), 2048


def asked(target=TARGET, prompt=PROMPT, **options):
    return prepare(
        target, prompt, **(dict(drafter=DRAFT, gamma=2, temperature=1.0, key=KEY) | options)
    )


@pytest.fixture(scope="module")
def context():
    return samples.context(asked(), DRAWS)


def drawn(context, rule):
    return samples.draw(asked(rule=rule), context.first, jax.random.key(1), DRAWS)


def test_a_context_is_in_the_table(context):
    table = jax.nn.softmax(TARGET.params, axis=-1)
    np.testing.assert_allclose(context.next_probs, table[1, context.first], atol=1e-6)
    assert context.second_probs
    for token, distribution in context.second_probs.items():
        np.testing.assert_allclose(distribution, table[context.first, token], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rules.rejection(), rules.block()], ids=lambda rule: rule.name)
def test_a_right_rule_passes(context, rule):
    sampled = drawn(context, rule)
    fitted = fits.fit(context, sampled.tokens)
    assert (
        fitted.pvalue > 1e-3 and fitted.draws == DRAWS == len(sampled.tokens) and fitted.cells > 10
    )
    assert 0.05 < sampled.acceptance_rate < 0.95
    np.testing.assert_allclose(
        fitted.pvalue, stats.chi2.sf(fitted.statistic, fitted.cells - 1), rtol=1e-4
    )


@pytest.mark.slow
def test_a_wrong_rule_does_not(context, wrong_rule):
    assert fits.fit(context, drawn(context, wrong_rule).tokens).pvalue < 1e-6


@pytest.mark.slow
def test_a_rule_that_is_wrong_about_the_second_token_only(context):
    """Right tokens, but each pair in an order that hides who came first after whom."""
    right = drawn(context, rules.rejection()).tokens
    mixed = np.stack([right[:, 0], np.roll(right[:, 1], 1)], axis=1)
    assert fits.fit(context, mixed).pvalue < 1e-6


def test_what_the_target_never_generates_is_found_for_certain():
    context = Context(0, np.array([0.5, 0.5, 0.0]), {0: np.array([1.0, 0.0, 0.0])})
    right = np.repeat([[0, 0], [1, 2]], 500, axis=0)
    assert fits.fit(context, right).pvalue > 0.9
    for never in ([2, 0], [0, 1]):
        assert fits.fit(context, np.concatenate([right, [never]])).pvalue == 0


def test_a_distribution_that_is_nearly_certain_tests_nothing():
    context = Context(0, np.array([1.0, 0.0]), {0: np.array([1.0, 0.0])})
    assert fits.fit(context, np.zeros((100, 2), int)) == fits.Fit("chi-square", 1, 100, 1.0, 0.0)


@pytest.mark.slow
def test_bounds_are_kept_and_broken(context):
    """Lenience of 0.5 keeps to its own bound, and breaks that of 0.9."""
    sampled = drawn(context, rules.lenient(0.5)).tokens
    assert fits.bound_test(context, sampled, catalogue.RULES["lenient"].bound).pvalue > 1e-3
    assert (
        fits.bound_test(context, sampled, lambda log_p: jnp.minimum(jnp.exp(log_p) / 0.9, 1)).pvalue
        < 1e-6
    )


def test_a_bound_on_rare_tokens_is_tested_on_all_of_them_together():
    context = Context(0, np.append(0.95, np.full(50, 0.001)), {})

    def as_it_is(log_p):
        return jnp.exp(log_p)

    for rare, broken in ((50, False), (100, True)):
        tokens = np.append(np.zeros(1000 - rare, int), 1 + np.arange(rare) % 50)
        test = fits.bound_test(context, np.stack([tokens, tokens], axis=1), as_it_is)
        assert test.cells == 2 and (test.pvalue < 1e-3) == broken
    none = fits.bound_test(context, np.zeros((100, 2), int), lambda log_p: jnp.ones_like(log_p))
    assert none == fits.Fit("bound", 0, 100, 1.0)


def test_bad_input_is_named():
    two = Prompt(jnp.array([[3, 1], [1, 1]]), jnp.array([2, 2]))
    with pytest.raises(ValueError, match="got 2 prompts: expected one"):
        samples.context(asked(prompt=two), 8)
    with pytest.raises(ValueError, match="temperature is 0"):
        samples.draw(asked(temperature=0.0), 2, KEY, 8)


def test_a_target_without_numbers_is_named():
    broken = TARGET._replace(params=TARGET.params.at[:, 2].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="not finite"):
        samples.draw(asked(broken, drafter=None), 2, KEY, 8)


pvalues = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(pvalues, st.floats(0.001, 0.5))
def test_holm_rejects_what_its_procedure_does(drawn_pvalues, level):
    """Step down: the i-th smallest is rejected while it is below level / (m - i)."""
    m, rejected = len(drawn_pvalues), set()
    for i, index in enumerate(np.argsort(drawn_pvalues, kind="stable")):
        if drawn_pvalues[index] >= level / (m - i) * (1 - 1e-12):
            break
        rejected.add(int(index))
    adjusted = fits.holm_adjust(drawn_pvalues)
    assert {i for i, p in enumerate(adjusted) if p < level * (1 - 1e-12)} <= rejected
    assert rejected <= {i for i, p in enumerate(adjusted) if p < level * (1 + 1e-12)}
    assert all(a >= p for a, p in zip(adjusted, drawn_pvalues, strict=True))
