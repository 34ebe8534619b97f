"""Draft tokens that are taken unseen: which ones, and how far the text is from the target's by
enumeration.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import rules
from jaxspec.cli import names
from jaxspec.core import Distribution, Draft, noise
from jaxspec.testing import certify, table_model, table_model_from


def test_what_is_trusted_is_accepted_and_the_rest_is_judged():
    """Sum of q over trusted tokens, and of min(p, q) over the others."""
    p, q, count = jnp.array([0.1, 0.5, 0.4]), jnp.array([0.6, 0.3, 0.1]), 20_000
    tokens = jax.random.categorical(jax.random.key(1), jnp.log(q), shape=(count, 1)).astype(
        jnp.int32
    )
    draft = Draft(
        tokens, jnp.ones(count, jnp.int32), log_probs=jnp.broadcast_to(jnp.log(q), (count, 1, 3))
    )
    target = Distribution(log_probs=jnp.broadcast_to(jnp.log(p), (count, 2, 3)))
    keys, position = noise.row_keys(jax.random.key(0), count), jnp.zeros(count, jnp.int32)
    verdict = rules.trusting(0.5).verify(keys, position, draft, target)
    is_trusted = np.asarray(tokens[:, 0] == 0)
    assert np.asarray(verdict.num_accepted)[is_trusted].all()
    assert np.asarray(verdict.num_accepted).all()  # the others have p > q here
    rate = float(jnp.mean(rules.trusting(0.7).verify(keys, position, draft, target).num_accepted))
    assert abs(rate - 0.5) < 4.5 * np.sqrt(0.25 / count)  # none is trusted: the sum of min(p, q)


def test_a_token_that_the_target_leaves_out_does_not_pass():
    draft = Draft(jnp.array([[0]]), jnp.array([1]), log_probs=jnp.log(jnp.array([[[0.9, 0.1]]])))
    target = Distribution(log_probs=jnp.log(jnp.array([[[0.0, 1.0]] * 2])))
    keys = noise.row_keys(jax.random.key(0), 1)
    verdict = rules.trusting(0.5).verify(keys, jnp.array([2]), draft, target)
    assert verdict.num_accepted.tolist() == [0] and verdict.next_token.tolist() == [1]


@pytest.mark.slow
def test_the_distance_from_the_target_is_what_can_be_worked_out():
    """Token 0 is taken with q(0) = 0.6, where p(0) is 0.1; 1 and 2 are judged, and here
    accepted.
    """
    p, q = jnp.array([0.1, 0.5, 0.4]), jnp.array([0.6, 0.3, 0.1])
    target, draft = table_model_from(jnp.log(p)), table_model_from(jnp.log(q))
    off = certify(target, drafter=draft, rule=rules.trusting(0.5), gamma=1, steps=2)
    assert off == pytest.approx(0.5, abs=1e-5)  # half of |0.6 - 0.1| + |0.3 - 0.5| + |0.1 - 0.4|
    assert certify(target, drafter=draft, rule=rules.trusting(0.7), gamma=1, steps=2) < 1e-6


def test_rows_at_temperature_0_are_refused():
    """Their draft tokens have no q(x), so the rejection rule would judge them."""
    model = table_model(jax.random.key(1), vocab=5)
    options = dict(drafter=model, rule=rules.trusting(0.5), key=jax.random.key(0), max_new_tokens=4)
    expected = "at temperature 0: set a temperature above 0"
    for temperature in (0.0, [1.0, 0.0]):
        with pytest.raises(ValueError, match=expected):
            jaxspec.generate(model, [[3], [1]], temperature=temperature, **options)
    prompts = [{"prompt": [3], "temperature": 0.0}]
    (row,) = jaxspec.generate_many(
        model, prompts, temperature=1.0, slots=1, on_error="yield", **options
    )
    assert expected in row.error
    with pytest.raises(ValueError, match=expected):
        names.check_options(True, rule=names.rule("trusting=0.9"), temperature=0.0)
    names.check_options(
        False, rule=names.rule("trusting=0.9"), temperature=0.0
    )  # nothing is drafted


def test_a_threshold_is_a_probability():
    for wrong in (0.0, 1.5, -1):
        with pytest.raises(ValueError, match="threshold is"):
            rules.trusting(wrong)
