"""A kernel of one's own in place of the networks' forms; tests/benchmarks/test_kernels.py has
Triton's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.nets import attention, dense, kernels
from jaxspec.weights import quantisation


def test_forms_are_replaced_within_the_block():
    """By the platform's name, in programs that were compiled before, too; other shapes keep
    theirs.
    """
    x = jnp.arange(8.0).reshape(1, 1, 8)
    matrix = quantisation.quantise({"weight": jnp.ones((4, 8))}, dtype="int8")["weight"]
    arrays = (jnp.ones((1, 2, 1, 4)), *[jnp.ones((1, 2, 3, 4))] * 2, jnp.ones((1, 1, 1, 3), bool))

    def negated(plain, x, *others, **settings):
        if x.shape[2] == 7:
            return {}
        return dict.fromkeys(("cpu", "default"), lambda *arrays: -plain(*arrays))

    product = jax.jit(dense.product)
    attend = jax.jit(lambda *arrays: attention.attend(*arrays, None, 1.0, None))
    usual = [product(x, matrix), attend(*arrays)]
    with kernels.replaced(product=negated, attention=negated):
        within = [product(x, matrix), attend(*arrays)]
        assert kernels.forms("product", dense.product, x[:, :, :7], matrix) == {}
    after = [product(x, matrix), attend(*arrays)]
    for before, between, again in zip(usual, within, after, strict=True):
        assert np.any(before)
        np.testing.assert_allclose(between, -before, rtol=1e-6)
        np.testing.assert_array_equal(again, before)
