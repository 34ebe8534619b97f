"""A network grown is the same function; one cut down is a part of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Prompt
from jaxspec.nets import t5
from jaxspec.nets.resize import resize
from tests.small import random_params

SMALL = t5.T5Config(
    32, dim=16, ff_dim=24, heads=2, head_dim=8, encoder_layers=2, decoder_layers=3, tied_head=True
)
LARGE = dataclasses.replace(SMALL, encoder_layers=3, decoder_layers=7, ff_dim=40)
PROMPT = Prompt(jnp.array([[3, 4, 5, 1]]), jnp.array([4]))


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params):
    return t5.T5(config).apply({"params": params}, PROMPT, jnp.array([[0, 4, 7]]))


@functools.partial(jax.jit, static_argnums=0)
def gradient_of(config, params):
    return jax.grad(lambda p: jnp.sum(logits(config, p)[0, 0] ** 2))(params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "new",
    [LARGE, dataclasses.replace(SMALL, ff_dim=40), dataclasses.replace(SMALL, encoder_layers=5)],
)
def test_a_grown_network_is_the_same_function_and_can_learn(new):
    params = random_params(t5.init, SMALL)
    grown = resize(params, SMALL, new, jax.random.key(1))
    np.testing.assert_allclose(logits(new, grown), logits(SMALL, params), rtol=1e-5, atol=1e-6)
    gradient = jax.device_get(gradient_of(new, grown))
    for side, count in (("encoder", new.encoder_layers), ("decoder", new.decoder_layers)):
        for layer in range(count):
            assert np.any(gradient[f"{side}_{layer}"]["ff"]["out"]["weight"] != 0)


@pytest.mark.slow
def test_a_smaller_network_is_made_of_the_largers_layers():
    params = random_params(t5.init, LARGE)
    small = resize(params, LARGE, SMALL, jax.random.key(1))
    assert jax.tree.map(jnp.shape, small) == jax.tree.map(jnp.shape, random_params(t5.init, SMALL))
    for mine, theirs in (
        ("encoder_1", "encoder_2"),
        ("decoder_2", "decoder_6"),
        ("decoder_0", "decoder_1"),
    ):
        np.testing.assert_array_equal(
            small[mine]["attention"]["key"]["weight"], params[theirs]["attention"]["key"]["weight"]
        )
    np.testing.assert_array_equal(small["embedding"]["embedding"], params["embedding"]["embedding"])


@pytest.mark.slow
def test_hidden_units_that_matter_stay():
    """The hidden units that the small network leaves out add nothing: the same function is left."""
    small = dataclasses.replace(LARGE, ff_dim=24)
    params = random_params(t5.init, small)
    grown = resize(params, small, LARGE, jax.random.key(1))
    back = resize(grown, LARGE, small, jax.random.key(2))
    jax.tree.map(np.testing.assert_array_equal, back, params)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_untied_head_begins_as_the_embedding(scaled):
    new = dataclasses.replace(SMALL, tied_head=False, scaled_head=scaled)
    params = random_params(t5.init, SMALL)
    untied = resize(params, SMALL, new, jax.random.key(1))
    np.testing.assert_allclose(logits(new, untied), logits(SMALL, params), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_cannot_change():
    params = random_params(t5.init, SMALL)
    for new in (dataclasses.replace(SMALL, heads=4), dataclasses.replace(SMALL, scaled_head=False)):
        with pytest.raises(
            ValueError,
            match="they may differ in encoder_layers, decoder_layers, ff_dim, and in that",
        ):
            resize(params, SMALL, new, jax.random.key(1))
    untied = dataclasses.replace(SMALL, tied_head=False, scaled_head=False)
    with pytest.raises(ValueError, match="does not become"):
        resize(params, untied, SMALL, jax.random.key(1))
