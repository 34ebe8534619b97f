"""The decoder with all of its options: its cache against its own full pass, windows, refusals
(trees: test_trees).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import nets
from jaxspec.core import Prompt, Room
from jaxspec.nets import decoder
from jaxspec.nets.decoder import decoder_config
from tests.small import random_params

SHAPE = decoder_config(
    61, dim=32, ff_dim=48, layers=3, heads=4, kv_heads=2, head_dim=8, max_positions=32
)
LOCAL = nets.replace(
    SHAPE,
    qkv_bias=True,
    out_bias=True,
    head_norms=True,
    post_norms=True,
    norms_from_one=True,
    scale_embedding=True,
    attention_cap=5.0,
    logits_cap=8.0,
    window=3,
    local=(True, False),
    rope_scaling="linear",
    rope_factor=2.0,
    local_rope_base=100.0,
    tied_head=True,
)
RELATIVE = nets.replace(SHAPE, positions="relative", buckets=8, max_distance=6, activation="gelu")
TOKENS = jax.random.randint(jax.random.key(1), (2, 10), 0, 61)


@pytest.fixture(params=[LOCAL, RELATIVE], ids=["local", "relative"])
def config(request):
    return request.param


def params_of(config, seed=0):
    return random_params(decoder.init, config, seed, 0.1)


@pytest.mark.slow
def test_cache_equals_full_pass(config, compiled):
    """Fed in ragged pieces, after a rewind too, every position has the logits of the full pass."""
    lm, params = compiled(decoder.language_model(config)), params_of(config)
    full = jax.jit(decoder.DecoderNet(config).apply)({"params": params}, TOKENS)
    forward, cache = lm.prefill(params, Prompt(TOKENS[:, :5], jnp.array([5, 3])), Room(10))
    np.testing.assert_allclose(forward.logits[:, 0], jnp.stack([full[0, 4], full[1, 2]]), atol=2e-5)
    _, cache = lm.extend(params, cache, jnp.stack([TOKENS[0, 5:9], jnp.full(4, 7)]))
    # below what a local layer's window would still hold
    cache = lm.rewind(cache, jnp.array([6, 3]))
    # row 0 ends at capacity
    forward, _ = lm.extend(params, cache, jnp.stack([TOKENS[0, 6:10], TOKENS[1, 3:7]]))
    np.testing.assert_allclose(forward.logits, jnp.stack([full[0, 6:10], full[1, 3:7]]), atol=2e-5)


@pytest.mark.slow
def test_garbage_outside_what_is_seen_has_no_effect(compiled):
    """NaN keys after the length, and before a window where every layer has one."""
    config = nets.replace(LOCAL, local=(True,))
    lm, params = compiled(decoder.language_model(config)), params_of(config)
    _, cache = lm.prefill(params, Prompt(TOKENS[:, :5], jnp.array([5, 5])), Room(8))
    clean, _ = lm.extend(params, cache, TOKENS[:, 5:7])
    slot = jnp.arange(8)[None, None, :, None]
    seen = jnp.logical_and(slot >= 5 - config.layers[0].attention.window + 1, slot < 5)
    layers = (
        dataclasses.replace(layer, keys=jnp.where(seen, layer.keys, jnp.nan))
        for layer in cache.layers
    )
    poisoned = cache._replace(layers=tuple(layers))
    forward, _ = lm.extend(params, poisoned, TOKENS[:, 5:7])
    np.testing.assert_array_equal(forward.logits, clean.logits)


def test_bfloat16_gives_float32_logits(config):
    narrow = dataclasses.replace(config, dtype="bfloat16")
    lm, params = (
        decoder.language_model(narrow),
        jax.eval_shape(lambda: decoder.init(narrow, jax.random.key(0))),
    )
    prompt = Prompt(TOKENS, jnp.array([9, 9]))
    forward, cache = jax.eval_shape(lambda p: lm.prefill(p, prompt, Room(12)), params)
    assert forward.logits.dtype == jnp.float32
    assert cache.keys[0].dtype == jnp.bfloat16
    attention = config.layers[0].attention
    assert cache.keys[0].shape == (2, attention.kv_heads, 12, attention.head_dim)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "4 query heads cannot share 3 key-value heads"),
        ({"local": (True,)}, "some layers are local, but window is None"),
        ({"activation": "tanh"}, "activation is 'tanh': expected one of relu, silu, gelu"),
        ({"positions": "learned"}, "positions is 'learned': expected one of rotary, relative"),
        (
            {"rope_scaling": "su"},
            "rope_scaling is 'su': expected one of default, linear, llama3, yarn",
        ),
    ],
)
def test_shapes_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        nets.replace(SHAPE, **changes)


@pytest.mark.slow
def test_an_8b_llama_has_its_published_size():
    """Instantiated abstractly: no memory."""
    config = nets.replace(
        SHAPE,
        vocab_size=128_256,
        dim=4096,
        ff_dim=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 8_030_261_248
