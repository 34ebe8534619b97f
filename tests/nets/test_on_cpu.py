"""Products on a CPU: the same numbers in each form, and the forms that XLA does not copy matrices
for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nets import on_cpu


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 17, on_cpu.FEW, on_cpu.FEW + 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_of_any_number_of_rows(rows, dtype):
    x = jax.random.normal(jax.random.key(0), (1, rows, 24), dtype)
    weight = jax.random.normal(jax.random.key(1), (40, 24), dtype)
    got = jax.jit(on_cpu.product, static_argnums=2)(x, weight, None)
    assert got.dtype == dtype and got.shape == (1, rows, 40)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    # bfloat16 is rounded once, after the sum: half of the last of 8 bits.
    rtol = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize(
    ("rows", "made"), [(1, 1), (2, 2), (4, 4), (5, 8), (7, 8), (9, 16), (16, 16), (17, 17)]
)
def test_few_rows_in_float32_come_second_and_some_are_padded(rows, made):
    lowered = (
        jax.jit(on_cpu.product, static_argnums=2)
        .lower(jnp.ones((1, rows, 24)), jnp.ones((40, 24)), None)
        .as_text()
    )
    (dot,) = [line for line in lowered.splitlines() if "dot_general" in line]
    shape = "1x40" if rows == 1 else f"40x{made}"
    assert f"-> tensor<{shape}xf32>" in dot, dot


@pytest.mark.parametrize(("rows", "made"), [(1, 2), (2, 2), (5, 5), (64, 64)])
def test_bfloat16_is_summed_in_float32_over_two_rows_or_more(rows, made):
    arrays = jnp.ones((1, rows, 24), jnp.bfloat16), jnp.ones((40, 24), jnp.bfloat16)
    lowered = jax.jit(on_cpu.product, static_argnums=2).lower(*arrays, None).as_text()
    (dot,) = [line for line in lowered.splitlines() if "dot_general" in line]
    assert f"(tensor<{made}x24xbf16>, tensor<40x24xbf16>) -> tensor<{made}x40xf32>" in dot, dot


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 257, 50257])
@pytest.mark.parametrize("columns", [1, 768, 10**6])
def test_blocks_fit_and_are_at_least_two(rows, columns):
    size = on_cpu.block_rows(rows, columns)
    assert 1 <= size <= max(1, rows // 2)
    assert size == 1 or 4 * size * columns <= on_cpu.BLOCK


def test_a_group_is_widened_at_a_time():
    """No array of the whole matrix in floats is made."""
    matrix = {"int8": jnp.ones((4, 200, 32), jnp.int8), "scale": jnp.ones((200, 4))}
    program = jax.jit(on_cpu.quantised_product, static_argnums=2).lower(
        jnp.ones((1, 3, 128)), matrix, None
    )
    text = program.as_text()
    assert (
        "tensor<200x32xf32>" in text
        and "x200x32xf32" not in text
        and "tensor<200x128xf32>" not in text
    )


def test_rows_of_a_batch_are_not_padded():
    """They may lie on several devices, which padding would have to move."""
    lowered = (
        jax.jit(on_cpu.product, static_argnums=2)
        .lower(jnp.ones((2, 3, 24)), jnp.ones((40, 24)), None)
        .as_text()
    )
    assert "stablehlo.pad" not in lowered and "tensor<40x6xf32>" in lowered


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (6,), (1, 2, 3)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_rows_and_other_numbers_of_axes(shape, dtype):
    x, weight = jnp.ones((*shape, 24), dtype), jnp.ones((40, 24), dtype)
    assert (on_cpu.product(x, weight, None) == jnp.full((*shape, 40), 24.0, dtype)).all()
    matrix = {"int8": jnp.ones((2, 40, 12), jnp.int8), "scale": jnp.ones((40, 2))}
    assert (on_cpu.quantised_product(x, matrix, None) == jnp.full((*shape, 40), 24.0)).all()
