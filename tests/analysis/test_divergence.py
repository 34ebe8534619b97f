"""The identities of section 3.2, and the rules whose acceptance they give."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec import core, rules
from jaxspec.analysis import divergence
from jaxspec.core import noise


@st.composite
def distributions(draw, vocab: int = 5):
    weights = np.array(draw(st.lists(st.integers(0, 9), min_size=vocab, max_size=vocab)), float)
    weights[draw(st.integers(0, vocab - 1))] += 1
    return weights / weights.sum()


@given(distributions(), distributions())
def test_lemma_3_3_and_corollary_3_4(p, q):
    middle = (p + q) / 2  # Definition 3.2, by its M
    assert divergence.d_lk(p, q) == pytest.approx(np.abs(p - middle).sum())
    assert (
        divergence.d_lk(p, q)
        == pytest.approx(1 - divergence.beta(p, q))
        == pytest.approx(divergence.d_lk(q, p))
    )
    assert divergence.beta(p, q) == pytest.approx(1 - np.abs(p - q).sum() / 2)


@given(distributions(), distributions())
def test_theorem_3_5(p, q):
    """The expectation that beta is defined by: keep x with probability min(1, p / q)."""
    accepted = sum(q[x] * min(1.0, p[x] / q[x]) for x in range(len(q)) if q[x] > 0)
    assert divergence.beta(p, q) == pytest.approx(accepted)


@given(distributions(), distributions(), st.sampled_from([1.0, 0.5, 0.3, 0.1]))
def test_beta_with_a_lenience_is_the_probability_of_acceptance(p, q, lenience):
    accepted = sum(q[x] * min(1.0, p[x] / (lenience * q[x])) for x in range(len(q)) if q[x] > 0)
    assert divergence.beta(p, q, lenience) == pytest.approx(accepted)
    assert divergence.beta(p, q, lenience) >= divergence.beta(p, q)


@given(distributions(), st.floats(-9e-4, 9e-4), st.sampled_from([1.0, 0.5]))
def test_beta_is_a_probability_of_distributions_that_are_rounded(p, off, lenience):
    assert divergence.beta(p * (1 + off), p * (1 + off), lenience) == pytest.approx(
        min(1 + off, 1.0)
    )
    assert divergence.beta(p * (1 + off), p * (1 + off), lenience) <= 1


@given(distributions(), distributions())
def test_rejection_sampling_keeps_no_more(p, q):
    """Appendix A.2, with M = max p / q by its definition."""
    accepted = divergence.classical_rejection(p, q)
    assert accepted <= divergence.beta(p, q) + 1e-12
    if (q[p > 0] > 0).all():
        assert accepted == pytest.approx(1 / max(p[q > 0] / q[q > 0]))
    else:
        assert accepted == 0


@given(distributions(), distributions())
def test_accepted_and_residual_mass_make_p(p, q):
    """Appendix A.1: the output's distribution is the target's."""
    rejected = 1 - divergence.beta(p, q)
    np.testing.assert_allclose(
        np.minimum(p, q) + rejected * divergence.residual(p, q), p, atol=1e-12
    )
    assert divergence.residual(p, q).sum() == pytest.approx(1)


def test_alpha_is_the_mean_over_positions():
    p = [[[1.0, 0.0], [0.5, 0.5]], [[0.2, 0.8], [0.0, 1.0]]]
    q = [[[0.5, 0.5], [0.5, 0.5]], [[0.8, 0.2], [1.0, 0.0]]]
    assert divergence.alpha(p, q) == pytest.approx((0.5 + 1.0 + 0.4 + 0.0) / 4)
    assert divergence.alpha(p, q, lenience=0.5) == pytest.approx((0.5 + 1.0 + 0.6 + 0.0) / 4)


@pytest.mark.slow
def test_beta_is_what_the_rules_do():
    """The share that the rules accept of 20,000 draft tokens, against what is computed here."""
    count, p, q = 20_000, jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
    tokens = jax.random.categorical(jax.random.key(1), jnp.log(q), shape=(count, 1)).astype(
        jnp.int32
    )
    draft = core.Draft(
        tokens, jnp.ones(count, jnp.int32), log_probs=jnp.broadcast_to(jnp.log(q), (count, 1, 3))
    )
    target = core.Distribution(jnp.broadcast_to(jnp.log(p), (count, 2, 3)))
    keys, position = noise.row_keys(jax.random.key(2), count), jnp.zeros(count, jnp.int32)
    expected = {
        rules.rejection(): divergence.beta(p, q),
        rules.lenient(0.5): divergence.beta(p, q, lenience=0.5),
        rules.classical_rejection(): divergence.classical_rejection(p, q),
    }
    for rule, share in expected.items():
        accepted = np.asarray(rule.verify(keys, position, draft, target).num_accepted)
        assert accepted.mean() == pytest.approx(float(share), abs=4 * np.sqrt(0.25 / count)), (
            rule.name
        )


@pytest.mark.slow
def test_beta_of_candidates_is_what_the_rejection_rule_does():
    """The share of 20,000 rows of which one of the first k candidates is accepted."""
    count, p, q = 20_000, jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
    tokens = jax.random.categorical(jax.random.key(1), jnp.log(q), shape=(count, 3)).astype(
        jnp.int32
    )
    log_q, three = jnp.broadcast_to(jnp.log(q), (count, 1, 3)), jnp.full(count, 3, jnp.int32)
    draws = jnp.full_like(tokens, int(core.Draw.WITH_REPLACEMENT))
    star = core.Draft(tokens, three, parent=jnp.zeros_like(tokens), log_probs=log_q, draws=draws)
    keys, position = noise.row_keys(jax.random.key(2), count), jnp.zeros(count, jnp.int32)
    target = core.Distribution(jnp.broadcast_to(jnp.log(p), (count, 4, 3)))
    verdict = jax.jit(rules.rejection().verify)(keys, position, star, target)
    index = np.where(np.asarray(verdict.num_accepted) > 0, np.asarray(verdict.path)[:, 0], 3)
    for k, share in enumerate(divergence.beta_of_candidates(p, q, 3)):
        assert np.mean(index <= k) == pytest.approx(float(share), abs=4 * np.sqrt(0.25 / count))


@given(distributions(), distributions())
def test_one_of_more_candidates_is_accepted_more_often(p, q):
    accepted = divergence.beta_of_candidates(p, q, 4)
    assert accepted[0] == pytest.approx(divergence.beta(p, q))
    assert (np.diff(accepted) >= -1e-12).all() and accepted[-1] <= 1 + 1e-12
    # no draft token is accepted that the target never generates
    drafted = 1 - (1 - q[p > 0].sum()) ** np.arange(1, 5)
    assert (accepted <= drafted + 1e-12).all()
    assert divergence.beta_of_candidates(p, p, 2) == pytest.approx([1, 1])
    both = divergence.beta_of_candidates(np.stack([p, q]), np.stack([q, p]), 2)
    np.testing.assert_allclose(both[0], accepted[:2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: divergence.beta([0.5, 0.6], [0.5, 0.5]),
            r"p of shape \(2,\) is not a distribution",
        ),
        (lambda: divergence.beta([0.5, 0.5], [1.5, -0.5]), "q of shape .* is not a distribution"),
        (lambda: divergence.alpha(1.0, [1.0]), r"p of shape \(\) is not a distribution"),
        (
            lambda: divergence.residual([0.5, 0.5], [0.5, np.nan]),
            "q of shape .* is not a distribution",
        ),
        (
            lambda: divergence.classical_rejection([1.0], [0.5, 0.5]),
            "over 1 and 2 tokens: expected one vocabulary",
        ),
        (lambda: divergence.beta([1.0], [1.0], lenience=0.0), "lenience is 0.0: expected above 0"),
        (lambda: divergence.beta([1.0], [1.0], lenience=2.0), "lenience is 2.0"),
        (lambda: divergence.beta_of_candidates([1.0], [1.0], 0), "count is 0: expected at least 1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
