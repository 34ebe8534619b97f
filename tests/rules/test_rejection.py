"""The rule by itself: its distribution by counting, and the corners where others went wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec import rules
from jaxspec.core import Distribution, Draft, noise
from jaxspec.rules.common import residual

RULE = jax.jit(rules.rejection().verify)
COUNT = 20_000


def first_tokens(p, q, tokens=None, count=COUNT, seed=0):
    """The distribution of the first token out, by `count` independent rows with one draft token
    each.
    """
    vocab = len(p)
    keys = noise.row_keys(jax.random.key(seed), count)
    position = jnp.zeros(count, jnp.int32)
    spread = lambda x: jnp.broadcast_to(jnp.log(jnp.asarray(x)), (count, 1, vocab))  # noqa: E731
    if tokens is None:
        draft_tokens = noise.categorical(
            noise.at(keys, position, noise.Purpose.DRAFT), spread(q)[:, 0]
        )[:, None]
        draft = Draft(draft_tokens, jnp.ones(count, jnp.int32), log_probs=spread(q))
    else:
        draft = Draft(jnp.full((count, 1), tokens), jnp.ones(count, jnp.int32))
    target = Distribution(log_probs=jnp.concatenate([spread(p)] * 2, axis=1))
    verdict = RULE(keys, position, draft, target)
    out = jnp.where(verdict.num_accepted > 0, draft.tokens[:, 0], verdict.next_token)
    return np.bincount(out, minlength=vocab) / count, verdict


def assert_distribution(got, p, count=COUNT):
    p = np.asarray(p)
    assert (np.abs(got - p) <= 4.5 * np.sqrt(p * (1 - p) / count) + 1e-12).all(), (got, p)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),  # p == q
        ([0.0, 0.0, 1.0], [0.5, 0.5, 0.0]),  # disjoint
        ([0.5, 0.5, 0.0], [0.1, 0.1, 0.8]),  # a draft token of probability 0
        ([0.7, 0.0, 0.3], [0.0, 1.0, 0.0]),
    ],
)
def test_distribution_of_the_output_is_the_targets(p, q):
    got, _ = first_tokens(p, q)
    assert_distribution(got, p)


@pytest.mark.parametrize("token", [0, 1, 2])
def test_deterministic_proposal_is_a_point_mass(token):
    p = [0.5, 0.3, 0.2]
    got, verdict = first_tokens(p, None, tokens=token)
    assert_distribution(got, p)
    rate = float((verdict.num_accepted > 0).mean())
    assert abs(rate - p[token]) < 4.5 * np.sqrt(p[token] * (1 - p[token]) / COUNT)


@pytest.mark.slow
def test_equal_distributions_accept_everything():
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = jax.random.normal(jax.random.key(0), (5,)).astype(dtype).astype(jnp.float32)
        p = jax.nn.softmax(logits)
        _, verdict = first_tokens(p, p, count=2000)
        assert (verdict.num_accepted == 1).all()


@pytest.mark.slow
def test_a_coin_of_zero_does_not_accept_a_token_of_probability_zero(monkeypatch):
    monkeypatch.setattr(noise, "uniform", lambda keys, count: jnp.zeros((keys.shape[0], count)))
    got, verdict = first_tokens([0.0, 1.0], None, tokens=0, count=8)
    assert (verdict.num_accepted == 0).all()
    assert got.tolist() == [0, 1]


def test_residual_of_nothing_is_p():
    p = jax.nn.softmax(jax.random.normal(jax.random.key(1), (4, 50)))
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, p * (1 + 1e-7)), p)


@pytest.mark.slow
def test_each_row_uses_its_own_first_rejection():
    """Three rows that reject at 0, 1 and nowhere, with certain residuals and bonus."""
    certain = jnp.log(jax.nn.one_hot(jnp.array([1, 2, 3]), 6))
    target = Distribution(log_probs=jnp.stack([certain] * 3))
    draft_tokens = jnp.array([[0, 2], [1, 0], [1, 2]])
    draft = Draft(draft_tokens, jnp.full(3, 2))
    verdict = RULE(noise.row_keys(jax.random.key(0), 3), jnp.zeros(3, jnp.int32), draft, target)
    assert verdict.num_accepted.tolist() == [0, 1, 2]
    assert verdict.next_token.tolist() == [1, 2, 3]
    assert verdict.num_tested.tolist() == [1, 2, 2]


def test_padding_of_a_draft_is_never_accepted():
    target = Distribution(log_probs=jnp.log(jnp.array([[[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]])))
    draft = Draft(jnp.array([[1, 1]]), jnp.array([1]))
    verdict = RULE(noise.row_keys(jax.random.key(0), 1), jnp.array([0]), draft, target)
    assert verdict.num_accepted.tolist() == [1] and verdict.num_tested.tolist() == [1]
    # the bonus of position 1: nothing was drafted there, nothing excluded
    assert verdict.next_token.tolist() == [1]


def test_greedy_is_exact_match():
    target = Distribution(tokens=jnp.array([[4, 5, 6], [4, 5, 6]]))
    draft = Draft(jnp.array([[4, 9], [4, 5]]), jnp.array([2, 2]))
    verdict = RULE(noise.row_keys(jax.random.key(0), 2), jnp.array([0, 0]), draft, target)
    assert verdict.num_accepted.tolist() == [1, 2]
    assert verdict.next_token.tolist() == [5, 6]


def test_a_vocabulary_of_one():
    zero = jnp.zeros((1, 2, 1))
    draft = Draft(jnp.array([[0]]), jnp.array([1]), log_probs=zero[:, :1])
    verdict = RULE(
        noise.row_keys(jax.random.key(0), 1), jnp.array([0]), draft, Distribution(log_probs=zero)
    )
    assert (verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ([1], [0])


def test_a_drafter_that_yields_nan_cannot_harm():
    p = [0.5, 0.3, 0.2]
    count = COUNT
    keys = noise.row_keys(jax.random.key(3), count)
    ones = jnp.ones(count, jnp.int32)
    draft = Draft(ones[:, None], ones, log_probs=jnp.full((count, 1, 3), jnp.nan))
    target = Distribution(log_probs=jnp.broadcast_to(jnp.log(jnp.array(p)), (count, 2, 3)))
    verdict = RULE(keys, jnp.zeros(count, jnp.int32), draft, target)
    assert (verdict.num_accepted == 0).all()
    assert_distribution(np.bincount(verdict.next_token, minlength=3) / count, p)


weights = st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)


@given(weights, weights)
def test_accepted_and_residual_mass_sum_to_p(a, b):
    """q·min(1, p/q) + (1 − β)·p' = p, token by token (the paper's appendix A.1)."""
    p, q = (jnp.asarray(x, jnp.float32) / sum(x) for x in (a, b))
    left = residual(p[None], q[None])[0]
    rejected = 1 - jnp.minimum(p, q).sum()
    total = jnp.minimum(p, q) + rejected * left / left.sum()
    np.testing.assert_allclose(total, p, atol=1e-6)
