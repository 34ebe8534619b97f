"""Widening changes the cost of a model and nothing that it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.analysis.measure.synthetic import widen
from jaxspec.base import Model, Prompt
from jaxspec.nets import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import table_model
from jaxspec.weights import int8

CONFIGS = {
    "t5-v1_1": T5Config(40, dim=16, ff_dim=24, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1),
    "t5-1_0": T5Config(40, 16, 24, 2, 8, 1, 1, activation="relu", gated=False, tied_head=True),
    "gpt": GPTConfig(40, dim=16, ff_dim=24, layers=1, heads=2, max_positions=64),
}
PROMPT = Prompt(jnp.array([[3, 1, 2, 7], [2, 9, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32))


def model(name: str) -> Model:
    """Random parameters, biases included."""
    config = CONFIGS[name]
    net = gpt if isinstance(config, GPTConfig) else t5
    random = np.random.default_rng(0)
    params = jax.jit(net.init, static_argnums=0)(config, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.1 * random.standard_normal(x.shape).astype(x.dtype), params)
    return Model(net.language_model(config), params, None, config, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_text_and_logits(name):
    small = model(name)
    wide = widen(small, 100)
    assert wide.config.ff_dim == 100 and wide.name == name
    ours, theirs = (jax.jit(m.lm.prefill, static_argnums=2)(m.params, PROMPT, 8)[0].logits for m in (wide, small))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    options = dict(temperature=np.array([0.0, 1.0]), key=jax.random.key(0), max_new_tokens=24)  # a greedy row, too
    text, expected = (jaxspec.generate(m, PROMPT, **options) for m in (wide, small))
    np.testing.assert_array_equal(text.tokens, expected.tokens)
    assert len(np.unique(text.tokens)) > 8


@pytest.mark.parametrize("name", CONFIGS)
def test_every_feed_forward_block_grows_and_nothing_else(name):
    small = model(name)
    wide = widen(small, 100)
    sizes = {}
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(wide.params), jax.tree.leaves(small.params), strict=True
    ):
        names = [entry.key for entry in path]
        if "ff" in names and names[-2:] != ["out", "bias"]:
            assert 100 in x.shape and 24 in y.shape
            assert x.dtype == y.dtype
            sizes[names[0]] = sizes.get(names[0], 0) + x.size - y.size
        else:
            np.testing.assert_array_equal(x, y)
    assert len(sizes) == {"t5-v1_1": 2, "t5-1_0": 2, "gpt": 1}[name]
    matrices = 3 if name == "t5-v1_1" else 2
    biases = 1 if name == "gpt" else 0
    assert set(sizes.values()) == {76 * (16 * matrices + biases)}


def test_the_parameters_have_the_shapes_of_a_model_of_that_size():
    wide = widen(model("gpt"), 100)
    fresh = jax.eval_shape(lambda: gpt.init(wide.config, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, wide.params) == jax.tree.map(lambda x: x.shape, fresh)


def test_bfloat16_stays_bfloat16():
    small = model("t5-v1_1")
    wide = widen(small._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), small.params)), 32)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(wide.params))


@pytest.mark.parametrize("name", ["t5-v1_1", "gpt"])
def test_int8_stays_int8(name):
    small = model(name)
    small = small._replace(params=int8.quantise(small.params))
    wide = widen(small, 32)
    expected = widen(small._replace(params=int8.dequantise(small.params)), 32)
    read = int8.dequantise(wide.params)
    assert wide.params["encoder_0" if name != "gpt" else "layers_0"]["ff"]["out"]["weight"]["int8"].shape == (16, 32)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read, expected.params))


def test_widening_to_its_own_size_changes_nothing():
    small = model("gpt")
    same = widen(small, 24)
    assert same.config == small.config
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), same.params, small.params))


def test_bad_arguments():
    with pytest.raises(ValueError, match="ff_dim is 8: expected at least the model's own, 24"):
        widen(model("gpt"), 8)
    with pytest.raises(TypeError, match="got one with a TableConfig"):
        widen(table_model(jax.random.key(0), 3), 8)
