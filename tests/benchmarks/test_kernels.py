"""A GPU's kernel computes what XLA's compute: in Pallas' interpreter, for this machine has no
GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels import triton
from jaxspec import nets
from jaxspec.core import Prompt, Room
from jaxspec.nets import attention, dense, kernels, quantised
from tests.small import random_params, tiny_llama, tiny_t5


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "step", "keys", "width", "options"),
    [
        # two spans, the second one short; a width that is no power of two
        (4, 2, 3, 300, 40, ["bias"]),
        (4, 4, 1, 600, 64, []),
        (8, 2, 4, 70, 32, ["bias", "cap", "sinks"]),
        (6, 6, 4, 256, 64, ["cap"]),
        (2, 1, 32, 700, 16, ["sinks"]),  # as many queries as a program takes
    ],
)
def test_attention(heads, kv_heads, step, keys, width, options):
    query, key, value = (
        drawn(2, heads, step, width),
        drawn(2, kv_heads, keys, width),
        drawn(2, kv_heads, keys, width),
    )
    # Few keys are visible, none in most blocks; one is, so that no row is without.
    seen = np.random.default_rng(0).random((2, 1, step, keys)) < 0.02
    seen[..., 5] = True
    mask = jnp.asarray(seen)
    bias = drawn(1, heads, step, keys) if "bias" in options else None
    sinks, cap = drawn(heads) if "sinks" in options else None, 2.0 if "cap" in options else None
    arrays, scale = (query, key, value, mask, bias, sinks), width**-0.5
    assert triton.takes_attention(query, key)
    kernel = functools.partial(triton.attention, scale=scale, cap=cap, interpret=True)
    expected = attention._whole(scale, cap, *arrays)
    np.testing.assert_allclose(jax.jit(kernel)(*arrays), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "rows", "groups", "outputs", "width"),
    [
        ("int8", 1, 1, 40, 1024),  # two parts of the columns; a program whose last outputs are none
        ("int8", 5, 1, 70, 48),
        ("int8", 2, 3, 16, 256),  # two turns a group
        ("int4", 3, 9, 70, 128),  # the last part has one turn
        ("int4", 20, 1, 64, 256),  # more rows than a tensor core's least product
    ],
)
def test_quantised_product(dtype, rows, groups, outputs, width):
    matrix, x = (
        random_matrix(dtype, groups, outputs, width),
        drawn(1, rows, groups * width).astype(jnp.bfloat16),
    )
    assert triton.takes_product(x, matrix)
    got = jax.jit(functools.partial(triton.quantised_product, interpret=True))(x, matrix)
    assert got.dtype == jnp.bfloat16 and got.shape == (1, rows, outputs)
    # Products and sums are float32; only the order of sums differs, which may decide how the last
    # bit is rounded.
    np.testing.assert_allclose(
        *(np.asarray(y, np.float32) for y in (got, quantised.product(x, matrix))), rtol=8e-3
    )


def random_matrix(dtype: str, groups: int, outputs: int, width: int) -> dict[str, jax.Array]:
    random, most = np.random.default_rng(groups), 1 << (int(dtype[3:]) - 1)
    entries = jnp.asarray(random.integers(-most, most, (groups, outputs, width)), dtype)
    return {
        dtype: entries if groups > 1 else entries[0],
        "scale": jnp.asarray(random.uniform(1, 2, (outputs, groups)), jnp.float32),
    }


def test_a_product_in_float16():
    matrix, x = random_matrix("int4", 2, 24, 128), drawn(1, 2, 256).astype(jnp.float16)
    got = triton.quantised_product(x, matrix, interpret=True)
    np.testing.assert_allclose(
        *(np.asarray(y, np.float32) for y in (got, quantised.product(x, matrix))), rtol=2e-3
    )


def test_other_products_stay_with_xla():
    x, matrix = drawn(1, 2, 64).astype(jnp.bfloat16), random_matrix("int8", 1, 24, 64)
    assert triton.takes_product(x, matrix)
    assert not triton.takes_product(x.astype(jnp.float32), matrix)
    assert not triton.takes_product(jnp.tile(x, (1, 40, 1)), matrix)  # 80 rows
    assert not triton.takes_product(x, matrix | {"zero": jnp.zeros((24, 1), jnp.int8)})
    # turns of 8 columns
    assert not triton.takes_product(x[..., :40], random_matrix("int8", 1, 24, 40))
    assert not triton.takes_product(x[..., :36], random_matrix("int4", 1, 24, 36))  # half a word
    assert not triton.takes_product(x, jax.tree.map(lambda leaf: leaf[None], matrix))  # experts
    # Command R+'s head: its offsets need more than 31 bits.
    scale = jax.ShapeDtypeStruct((256_000, 1), jnp.float32)
    head = {"int8": jax.ShapeDtypeStruct((256_000, 12_288), jnp.int8), "scale": scale}
    assert not triton.takes_product(jax.ShapeDtypeStruct((1, 1, 12_288), jnp.bfloat16), head)


def test_one_row_of_a_large_int8_matrix_is_one_of_two_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    matrix, x = random_matrix("int8", 1, 24, 64), drawn(1, 1, 64).astype(jnp.bfloat16)
    expected = quantised.product(x, matrix)
    as_on_a_gpu(monkeypatch)

    def has_more_rows(x: jax.Array, matrix: dict[str, jax.Array]) -> bool:
        # a function of its own, traced anew
        traced = jax.make_jaxpr(lambda *arrays: dense.product(*arrays))(x, matrix)
        return f"f32[1,{x.shape[1] + 1},24]" in str(traced)

    assert not has_more_rows(x, matrix)
    monkeypatch.setattr(dense, "LARGE", 24 * 64 - 1)
    assert has_more_rows(x, matrix)
    np.testing.assert_array_equal(dense.product(x, matrix), expected)
    assert not has_more_rows(jnp.tile(x, (1, 2, 1)), matrix)
    assert not has_more_rows(x.astype(jnp.float32), matrix)
    assert not has_more_rows(x, random_matrix("int8", 2, 24, 32))  # groups


@pytest.mark.parametrize(("dtype", "groups"), [("int8", 1), ("int4", 2)])
def test_the_kernel_in_a_product_and_its_gradient(dtype, groups, monkeypatch: pytest.MonkeyPatch):
    matrix, x = (
        random_matrix(dtype, groups, 24, 128),
        drawn(1, 3, groups * 128).astype(jnp.bfloat16),
    )

    def run() -> tuple[jax.Array, jax.Array]:
        return jax.value_and_grad(
            lambda x: jnp.sum(dense.product(x, matrix).astype(jnp.float32) ** 2)
        )(x)

    expected = run()
    turn_on(monkeypatch)
    as_on_a_gpu(monkeypatch)
    assert "pallas_call" in str(jax.make_jaxpr(dense.product)(x, matrix))
    np.testing.assert_allclose(run()[0], expected[0], rtol=1e-2)
    np.testing.assert_allclose(
        *(np.asarray(y[1], np.float32) for y in (run(), expected)), rtol=2e-2, atol=1
    )


def turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts both kernels in the networks, as `kernels.replaced` does for a block."""
    for name, replacement in triton.replacements("attention", "product").items():
        monkeypatch.setitem(kernels._replacements, name, replacement)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a GPU's branches run here, and the kernels in the interpreter."""
    for name in "attention", "quantised_product":
        monkeypatch.setattr(triton, name, functools.partial(getattr(triton, name), interpret=True))

    def branch(*arrays: Any, default: Any, cuda: Any = None, **_: Any) -> Any:
        return (cuda or default)(*arrays)

    monkeypatch.setattr(jax.lax, "platform_dependent", branch)


@pytest.mark.parametrize("config", [tiny_llama(), tiny_t5()], ids=["Llama", "T5"])
def test_networks(config, monkeypatch: pytest.MonkeyPatch):
    """A prompt, a chain and a tree."""
    network = nets.net_of(config)
    params, row = (
        random_params(network.init, config),
        Prompt(jnp.array([[3, 5, 7], [4, 6, 0]]), jnp.array([3, 2])),
    )
    parent = jnp.array([[-1, 0, 0]] * 2)  # the second and the third are children of the first

    def logits() -> list[jax.Array]:
        def run(params, row):  # a function of its own each time, so that it is traced anew
            lm = network.language_model(config)
            start, cache = lm.prefill(params, row, Room(12, 4))
            chain, cache = lm.extend(params, cache, jnp.array([[1, 2], [3, 4]]))
            branches, _ = lm.extend(params, cache, jnp.array([[5, 6, 7], [8, 9, 1]]), parent)
            return [start.logits, chain.logits, branches.logits]

        return jax.jit(run)(params, row)

    expected = logits()
    turn_on(monkeypatch)
    on_cpu = logits()  # where there is no GPU they change nothing
    as_on_a_gpu(monkeypatch)
    for plain, unchanged, ours in zip(expected, on_cpu, logits(), strict=True):
        np.testing.assert_array_equal(plain, unchanged)
        np.testing.assert_allclose(plain, ours, atol=1e-5)


def test_gradients_are_those_without_it(monkeypatch: pytest.MonkeyPatch):
    arrays, mask = (
        (drawn(1, 4, 3, 8), drawn(1, 2, 9, 8), drawn(1, 2, 9, 8)),
        jnp.tri(3, 9, 4, dtype=bool)[None, None],
    )

    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.sum(attention.attend(*arrays, mask, None, 0.3, None) ** 2)

    expected = jax.grad(loss, (0, 1, 2))(*arrays)
    turn_on(monkeypatch)
    as_on_a_gpu(monkeypatch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        jax.grad(loss, (0, 1, 2))(*arrays),
        expected,
    )
