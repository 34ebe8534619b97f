"""A GPU's kernels compute what XLA's compute: in Pallas' interpreter, for this machine has no GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.core import Prompt, Room
from jaxspec.nets import attention, on_gpu
from tests.small import random_params, tiny_llama, tiny_t5


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "step", "keys", "width", "options"),
    [
        (4, 2, 3, 300, 40, ["bias"]),  # two spans, the second one short; a width that is no power of two
        (4, 4, 1, 600, 64, []),
        (8, 2, 4, 70, 32, ["bias", "cap", "sinks"]),
        (6, 6, 4, 256, 64, ["cap"]),
        (2, 1, 32, 700, 16, ["sinks"]),  # as many queries as a program takes
    ],
)
def test_attention(heads, kv_heads, step, keys, width, options):
    query, key, value = drawn(2, heads, step, width), drawn(2, kv_heads, keys, width), drawn(2, kv_heads, keys, width)
    # Few keys are visible, none in most blocks; one is, so that no row is without.
    seen = np.random.default_rng(0).random((2, 1, step, keys)) < 0.02
    seen[..., 5] = True
    mask = jnp.asarray(seen)
    bias = drawn(1, heads, step, keys) if "bias" in options else None
    sinks, cap = drawn(heads) if "sinks" in options else None, 2.0 if "cap" in options else None
    arrays, scale = (query, key, value, mask, bias, sinks), width**-0.5
    assert on_gpu.takes(query, key)
    kernel = functools.partial(on_gpu.attention, scale=scale, cap=cap, interpret=True)
    expected = attention._whole(scale, cap, *arrays)
    np.testing.assert_allclose(jax.jit(kernel)(*arrays), expected, atol=2e-6)


@pytest.mark.parametrize("batch", [(), (3,), (2, 5)])
@pytest.mark.parametrize("width", [1, 40, 64])
def test_norm(batch, width):
    x, scale = drawn(*batch, width), drawn(width)
    norm = attention.Norm(1e-3, dtype=jnp.bfloat16)
    expected = norm.apply({"params": {"scale": scale}}, x)
    got = on_gpu.norm(x, scale, epsilon=1e-3, dtype=jnp.bfloat16, interpret=True)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2**-7)


def through_kernels(fits: bool, kernel: Any, plain: Any, *arrays: Any) -> jax.Array:
    return kernel(*arrays, interpret=True) if fits else plain(*arrays)


@pytest.mark.parametrize("config", [tiny_llama(), tiny_t5()], ids=["Llama", "T5"])
def test_networks(config, monkeypatch: pytest.MonkeyPatch):
    """A prompt, a chain and a tree."""
    network = nets.net_of(config)
    params, row = random_params(network.init, config), Prompt(jnp.array([[3, 5, 7], [4, 6, 0]]), jnp.array([3, 2]))
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
    monkeypatch.setenv(on_gpu.SWITCH, "1")
    on_cpu = logits()  # where there is no GPU the switch changes nothing
    monkeypatch.setattr(on_gpu, "choose", through_kernels)
    for plain, unchanged, kernels in zip(expected, on_cpu, logits(), strict=True):
        np.testing.assert_array_equal(plain, unchanged)
        np.testing.assert_allclose(plain, kernels, atol=1e-5)


def test_gradients_are_those_without_kernels(monkeypatch: pytest.MonkeyPatch):
    """The kernels have none: each stands in for another function, whose gradient is taken."""
    monkeypatch.setenv(on_gpu.SWITCH, "1")
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, cuda, default: cuda(*arrays))
    x, scale = drawn(3, 8), drawn(8)
    kernel = functools.partial(on_gpu.norm, epsilon=1e-6, interpret=True)

    def plain(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale[None]

    gradients = jax.grad(lambda x, scale: jnp.sum(on_gpu.choose(True, kernel, plain, x, scale) ** 2), (0, 1))(x, scale)
    expected = jax.grad(lambda x, scale: jnp.sum(plain(x, scale) ** 2), (0, 1))(x, scale)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), gradients, expected)
