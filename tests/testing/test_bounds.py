"""Bounds of inexact rules, checked on exact distributions."""

import jax.numpy as jnp
import pytest

from jaxspec.testing import excess

PLAIN = {(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.25, (1, 1): 0.25}


def half_as_much_again(log_p):
    return 1.5 * jnp.exp(log_p)


@pytest.mark.parametrize(
    ("distribution", "most"),
    [
        (PLAIN, -0.125),  # p is 0.5, and 0.75 allowed, after tokens of 0.5
        # the first token, just so
        ({(0, 0): 0.375, (0, 1): 0.375, (1, 0): 0.125, (1, 1): 0.125}, 0.0),
        ({(0, 0): 0.25, (0, 1): 0.25, (1, 0): 0.45, (1, 1): 0.05}, 0.075),  # the second: 0.9 of 0.5
        ({(0, 0): 1.0}, 0.25),
    ],
)
def test_excess_is_what_goes_above_the_bound(distribution, most):
    assert excess(distribution, PLAIN, half_as_much_again, vocab=2) == pytest.approx(most)
