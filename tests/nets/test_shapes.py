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
from jaxspec.nets import decoder
from jaxspec.nets.rotary import RopeScaling, Rotary
from jaxspec.nets.shapes import (
    AttentionShape,
    DecoderConfig,
    FeedForwardShape,
    LayerShape,
    NormShape,
)
from jaxspec.weights import orbax
from jaxspec.weights.hf_families import FAMILIES, decoders, llama, qwen
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


def test_what_no_short_form_says_is_written_layer_by_layer(tmp_path):
    with pytest.raises(ValueError, match="differ in more than windows"):
        nets.form_of(CONFIG) and nets.FORMS["decoder"].of(CONFIG)
    assert nets.form_of(CONFIG) == ("decoder", CONFIG)
    table = orbax.without_none(dataclasses.asdict(CONFIG))
    assert nets.from_table("decoder", table, "[model]") == CONFIG
    with pytest.raises(ValueError, match=r"\[model\] layers has an unknown key 'postnorms'"):
        nets.from_table(
            "decoder", table | {"layers": [{**table["layers"][0], "postnorms": True}]}, "[model]"
        )


def test_a_table_of_one_number_for_all_layers():
    """As manifests were written before layers were values: windows and rotary bases by turns."""
    table = dict(
        vocab_size=13, dim=8, ff_dim=16, layers=3, heads=2, kv_heads=1, head_dim=4, head_norms=True
    )
    table |= dict(
        window=3,
        local=[True, False],
        rope_base=100.0,
        local_rope_base=10.0,
        tied_head=True,
        activation="gelu",
    )
    local = AttentionShape(2, 1, 4, window=3, rotary=Rotary(10.0), head_norms=True)
    layers = [local, dataclasses.replace(local, window=None, rotary=Rotary(100.0)), local]
    expected = DecoderConfig(
        13,
        8,
        tuple(LayerShape(layer, FeedForwardShape(16, "gelu")) for layer in layers),
        NormShape(),
        tied_head=True,
    )
    assert nets.from_table("decoder", table, "[model]") == expected
    assert (
        nets.from_table("decoder", orbax.without_none(dataclasses.asdict(expected)), "[model]")
        == expected
    )


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.sizes], ids=lambda family: family.title
)
def test_manifests_hold_published_shapes(family):
    """In a short form, or layer by layer: OLMo's norms, Gemma 4's layers and experts have none."""
    for config in family.sizes.values():
        name, form = nets.form_of(config)
        assert nets.from_table(name, orbax.without_none(nets.table_of(config)), "") == config
        assert type(form) is nets.FORMS[name].kind or (
            form is config and family not in (llama.LLAMA, qwen.QWEN3)
        )


def test_a_manifest_holds_a_factor_of_embeddings():
    config = dataclasses.replace(CONFIG, embedding_scale=12.0, logits_scale=0.25)
    assert (
        nets.from_table("decoder", orbax.without_none(dataclasses.asdict(config)), "[model]")
        == config
    )


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
