"""Matrices that a checkpoint may have been made of, before int8 rounded them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import synthetic
from jaxspec.weights import quantisation


def tree(seed: int) -> dict:
    """Quantised channels of many sizes, one of zeros, and leaves that are no matrices."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((400, 257)) * 10.0 ** random.uniform(-30, 30, (400, 1))
    weight[3], weight[4] = 0.0, 1.0
    params = {
        "weight": jnp.asarray(weight, jnp.float32),
        "bias": jnp.ones(400),
        "table": jnp.ones((32, 4)),
    }
    return quantisation.quantise({"layer": params})


@pytest.mark.parametrize("seed", range(2))
def test_unrounded_matrices_are_others_that_round_to_the_same(seed):
    stored = tree(seed)
    drawn = synthetic.unrounded(stored, jax.random.key(seed))
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and bool((a == b).all()),
        quantisation.quantise(drawn),
        stored,
    )
    assert jax.tree.all(same), same
    assert drawn["layer"]["bias"] is stored["layer"]["bias"]
    q, scale = (np.asarray(x, np.float64) for x in stored["layer"]["weight"].values())
    moved = np.asarray(drawn["layer"]["weight"], np.float64) / scale - q
    assert (moved[np.abs(q) == 127] == 0).all() and (moved[3] == 0).all()
    # as uniform as rounding errors are
    assert np.std(moved[np.abs(q) < 127]) == pytest.approx(12**-0.5, rel=0.01)
    assert np.abs(moved).max() > 0.499
