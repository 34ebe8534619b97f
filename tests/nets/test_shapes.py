"""Layers as values: whatever differs between them, caches hold what whole rows read; short forms
say all or refuse.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.core import Prompt, Room
from jaxspec.nets import decoder, uniform
from jaxspec.nets.rotary import RopeScaling, Rotary
from jaxspec.nets.shapes import (
    AttentionShape,
    DecoderConfig,
    FeedForwardShape,
    LayerShape,
    NormShape,
)
from jaxspec.weights.hf_families import decoders
from tests.small import random_params

LOCAL = AttentionShape(
    2, 2, 4, window=3, rotary=Rotary(10.0), head_norms=True, value_norm=True, query_scalar=1.0
)
GLOBAL = AttentionShape(
    2,
    1,
    8,
    rotary=Rotary(100.0, dims=4, proportional=True),
    head_norms=True,
    keys_are_values=True,
    cap=5.0,
)
STILL = AttentionShape(4, 1, 4, rotary=None, qkv_bias=True, out_bias=True)
PARTLY = dataclasses.replace(STILL, rotary=Rotary(50.0, dims=2, scaling=RopeScaling("linear", 2.0)))
NARROW, WIDE = FeedForwardShape(8, "gelu"), FeedForwardShape(16, "relu", gated=False, bias=True)
LAYERS = (
    LayerShape(LOCAL, NARROW, post_norms=True),
    LayerShape(GLOBAL, NARROW),
    LayerShape(STILL, WIDE),
    LayerShape(PARTLY, WIDE),
    LayerShape(dataclasses.replace(LOCAL, shares=0), WIDE),
    LayerShape(dataclasses.replace(GLOBAL, shares=1), NARROW, post_norms=True),
)
CONFIG = DecoderConfig(13, 8, LAYERS, NormShape("rms", 1e-5), logits_cap=10.0)


def test_no_two_layers_alike():
    """Tokens fed one by one, after a rewind and in chunks, are read as whole rows."""
    params = random_params(decoder.init, CONFIG, 0, 0.2)
    tokens = jax.random.randint(jax.random.key(2), (2, 10), 0, 13)
    full, lm = (
        jax.jit(decoder.DecoderNet(CONFIG).apply)({"params": params}, tokens),
        decoder.language_model(CONFIG),
    )
    first, cache = jax.jit(lm.prefill, static_argnums=2)(
        params, Prompt(tokens[:, :5], jnp.array([5, 3])), Room(12, 4)
    )
    np.testing.assert_allclose(first.logits[:, 0], jnp.stack([full[0, 4], full[1, 2]]), atol=2e-5)
    extend = jax.jit(lm.extend)
    _, cache = extend(params, cache, jnp.zeros((2, 2), jnp.int32))
    cache = jax.jit(lm.rewind)(cache, jnp.array([5, 3]))
    for step in range(4):
        forward, cache = extend(
            params, cache, jnp.stack([tokens[0, 5 + step], tokens[1, 3 + step]])[:, None]
        )
        np.testing.assert_allclose(
            forward.logits[:, 0],
            jnp.stack([full[0, 5 + step], full[1, 3 + step]]),
            atol=3e-5,
            err_msg=str(step),
        )
    assert [keys.shape[1:] for keys in cache.keys] == [
        (2, 7, 4),
        (1, 12, 8),
        (1, 12, 4),
        (1, 12, 4),
    ]
    assert (
        "key" not in params["layers_4"]["attention"]
        and "value" not in params["layers_1"]["attention"]
    )


def test_a_short_form_says_all_of_a_network_or_is_refused():
    with pytest.raises(ValueError, match="differ in more than windows"):
        uniform.short_form(CONFIG)
    assert nets.short_form(CONFIG) is CONFIG


@pytest.mark.parametrize("name", ["embedding_scale", "logits_scale"])
@pytest.mark.parametrize("factor", [0.0, float("inf")])
def test_factors_are_finite_and_not_zero(name, factor):
    with pytest.raises(ValueError, match=f"{name} is {factor}: expected a finite number above 0"):
        dataclasses.replace(CONFIG, **{name: factor})


@pytest.mark.parametrize("dims", [0, 3, 6])
def test_what_is_rotated_is_an_even_number_of_a_heads_dimensions(dims):
    with pytest.raises(
        ValueError, match=f"{dims} of a head's 4 dimensions are rotated: expected an even number"
    ):
        dataclasses.replace(LOCAL, rotary=Rotary(dims=dims))


def test_the_share_of_a_heads_rotated_dimensions_is_not_rounded_down():
    layer = dataclasses.replace(
        LAYERS[0], attention=dataclasses.replace(LOCAL, head_dim=88, rotary=Rotary())
    )
    assert decoders.turned(layer, 30 / 88)["rotary"].dims == 30


def test_keys_are_shared_with_a_layer_before():
    with pytest.raises(
        ValueError, match="layer 0 shares the keys of layer 1: expected one before it"
    ):
        DecoderConfig(13, 8, (LayerShape(dataclasses.replace(LOCAL, shares=1), WIDE), LAYERS[0]))
