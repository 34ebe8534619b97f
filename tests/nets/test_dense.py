"""A product of few rows is written in another order on CPU: the same numbers, and no copy of the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nets import dense


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 2), (1, dense.FEW), (5, 13)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_same_product_for_any_number_of_rows(shape, dtype):
    x = jax.random.normal(jax.random.key(0), (*shape, 24), dtype)
    weight = jax.random.normal(jax.random.key(1), (40, 24), dtype)
    got = jax.jit(dense.product)(x, weight)
    assert got.dtype == dtype
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=1e-5 if dtype == jnp.float32 else 0.2)


def test_few_rows_leave_the_weights_where_they_are():
    """On CPU the compiled program holds one product whose left factor is the weights, as they came."""
    compiled = jax.jit(dense.product).lower(jnp.ones((1, 4, 24)), jnp.ones((40, 24))).compile().as_text()
    (dot,) = [line for line in compiled.splitlines() if " dot(" in line]
    assert "f32[40,4]" in dot


def test_gradients_are_those_of_the_product():
    x, weight = jnp.arange(6.0).reshape(1, 2, 3), jnp.arange(12.0).reshape(4, 3)
    loss = lambda multiply: lambda x, w: jnp.sum(jnp.sin(multiply(x, w)))  # noqa: E731
    ours = jax.grad(loss(dense.product), argnums=(0, 1))(x, weight)
    theirs = jax.grad(loss(lambda x, w: x @ w.T), argnums=(0, 1))(x, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


def test_a_layer_has_its_weights_as_pytorch_has_them():
    layer = dense.Dense(5, use_bias=True)
    variables = layer.init(jax.random.key(0), jnp.ones((1, 2, 3)))
    assert jax.tree.map(jnp.shape, variables["params"]) == {"weight": (5, 3), "bias": (5,)}
    params = {"weight": jnp.eye(5, 3), "bias": jnp.arange(5.0)}
    got = layer.apply({"params": params}, jnp.array([[[1.0, 2.0, 3.0]]]))
    np.testing.assert_allclose(got, [[[1, 3, 5, 3, 4]]])
