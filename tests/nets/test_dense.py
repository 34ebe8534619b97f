"""A product of few rows is written in another order on CPU: the same numbers, and no copy of the
weights.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Prompt, Room
from jaxspec.nets import decoder, dense, t5
from jaxspec.weights import quantisation


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 2), (1, dense.FEW), (5, 13)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_same_product_for_any_number_of_rows(shape, dtype):
    x = jax.random.normal(jax.random.key(0), (*shape, 24), dtype)
    weight = jax.random.normal(jax.random.key(1), (40, 24), dtype)
    got = jax.jit(dense.product)(x, weight)
    assert got.dtype == dtype
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, atol=1e-5 if dtype == jnp.float32 else 0.2
    )


def test_few_rows_leave_the_weights_where_they_are():
    """On CPU the compiled program holds one product whose left factor is the weights, as they
    came.
    """
    compiled = (
        jax.jit(dense.product).lower(jnp.ones((1, 4, 24)), jnp.ones((40, 24))).compile().as_text()
    )
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


# --- what a TPU is given: lowered only, which needs none

NETS = {
    "decoder": (decoder, decoder.decoder_config(64, 16, 24, 1, 4, 2, 4)),
    "gpt": (decoder, decoder.gpt_config(64, dim=16, ff_dim=24, layers=1, heads=2)),
    "t5": (t5, t5.T5Config(64, 16, 24, 2, 8, 1, 1)),
}
PRODUCT = re.compile(r"stablehlo.dot_general .*")


def products(name, dtype, platform="tpu", quantised=False):
    """The products of prefill and of a step of one token, as they are lowered."""
    net, config = NETS[name]
    lm = net.language_model(dataclasses.replace(config, dtype=dtype))

    def program(params, prompt):
        forward, cache = lm.prefill(params, prompt, Room(8))
        return forward.logits, lm.extend(params, cache, prompt.tokens[:, :1])[0].logits

    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    if quantised:
        params = jax.eval_shape(quantisation.quantise, params)
    prompt = Prompt(jnp.ones((1, 3), jnp.int32), jnp.array([3]))
    text = jax.jit(program).trace(params, prompt).lower(lowering_platforms=(platform,)).as_text()
    shapes = PRODUCT.findall(text)
    assert shapes
    return shapes


@pytest.mark.parametrize("name", NETS)
def test_float32_is_multiplied_as_float32(name):
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products(name, "float32"))
    assert not any("HIGHEST" in line for line in products(name, "bfloat16"))


def test_float32_around_int8_and_a_choice_with_a_name():
    assert all(
        "precision = [HIGHEST, HIGHEST]" in line
        for line in products("decoder", "float32", quantised=True)
    )
    with jax.default_matmul_precision("bfloat16"):
        assert not any("HIGHEST" in line for line in products("decoder", "float32"))


def test_one_row_is_one_of_eight_on_a_tpu_only():
    one_row, two_rows, eight_rows = "(tensor<1x1x16x", "(tensor<2x16x", "(tensor<1x8x16x"
    for platform, expected in (("tpu", eight_rows), ("cuda", one_row), ("cpu", two_rows)):
        lines = products("decoder", "bfloat16", platform)
        made = {
            rows for rows in (one_row, two_rows, eight_rows) if any(rows in line for line in lines)
        }
        assert made == {expected}, platform


@pytest.mark.parametrize(
    ("shape", "rows", "platform", "barrier"),
    [
        ((4096, 14336), 6, "tpu", True),  # Llama 8B's feed-forward block
        ((14336, 4096), 6, "tpu", True),
        ((2048, 8192), 6, "tpu", False),  # that of a draft model: it would cost a fifth
        ((128256, 2048), 6, "tpu", False),  # a head
        ((4096, 14336), 128, "tpu", False),
        ((4096, 14336), 6, "cuda", False),
    ],
)
def test_large_products_of_a_few_rows_are_between_barriers_on_a_tpu_only(
    shape, rows, platform, barrier
):
    arguments = (
        jax.ShapeDtypeStruct((1, rows, shape[1]), "bfloat16"),
        jax.ShapeDtypeStruct(shape, "bfloat16"),
    )
    text = jax.jit(dense.product).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("stablehlo.optimization_barrier") == 2 * barrier


@pytest.mark.parametrize("rows", [1, 6, 128])
def test_a_cpu_s_program_is_without_what_a_tpu_is_given(monkeypatch, rows):
    arguments = (
        jax.ShapeDtypeStruct((1, rows, 4096), "float32"),
        jax.ShapeDtypeStruct((14336, 4096), "float32"),
    )

    def texts():
        return [
            jax.jit(lambda *x: dense.product(*x))
            .trace(*arguments)
            .lower(lowering_platforms=(platform,))
            .as_text()
            for platform in ("cpu", "tpu")
        ]

    before = texts()
    monkeypatch.setattr(dense, "_on_tpu", lambda x, weight: -dense._plainly(x, weight))
    after = texts()
    assert before[0] == after[0] and (before[1] == after[1]) == (rows == 128)
