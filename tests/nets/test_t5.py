"""T5 and umT5 against transformers, and their cache against their own full pass (trees:
test_trees.py).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import Prompt, Room, layer_caches
from jaxspec.nets import t5
from tests.small import random_params

V11 = t5.T5Config(61, dim=32, ff_dim=48, heads=4, head_dim=8, encoder_layers=2, decoder_layers=3)
V10 = t5.T5Config(
    61,
    32,
    48,
    4,
    8,
    encoder_layers=2,
    decoder_layers=2,
    activation="relu",
    gated=False,
    tied_head=True,
)
UMT5 = dataclasses.replace(V11, bias_by_layer=True)
PROMPT = Prompt(jnp.array([[5, 6, 7, 8, 9, 1], [4, 3, 1, 0, 0, 0]]), jnp.array([6, 3]))
TOKENS = jnp.array([[0, 11, 12, 13, 14, 15, 16], [0, 21, 22, 23, 24, 25, 26]])


@pytest.fixture(params=[V11, V10, UMT5], ids=["v1.1", "1.0", "umT5"])
def config(request):
    return request.param


def params_of(config, seed=0):
    return random_params(t5.init, config, seed)


@pytest.mark.slow
def test_cache_equals_full_pass(config, compiled):
    """Fed in ragged pieces through the cache, every position has the logits of the full pass."""
    lm, params = compiled(t5.language_model(config)), params_of(config)
    full = jax.jit(t5.T5(config).apply)({"params": params}, PROMPT, TOKENS)
    forward, cache = lm.prefill(params, PROMPT, Room(9))
    np.testing.assert_allclose(forward.logits, full[:, :1], atol=2e-5)
    forward, cache = lm.extend(params, cache, TOKENS[:, 1:4])
    np.testing.assert_allclose(forward.logits, full[:, 1:4], atol=2e-5)
    cache = lm.rewind(cache, jnp.array([2, 4]))  # row 0 goes two tokens back, row 1 stays
    fed = jnp.stack([TOKENS[0, 2:5], TOKENS[1, 4:7]])
    forward, _ = lm.extend(params, cache, fed)
    np.testing.assert_allclose(forward.logits[0], full[0, 2:5], atol=2e-5)
    np.testing.assert_allclose(forward.logits[1], full[1, 4:7], atol=2e-5)


@pytest.mark.slow
def test_padding_of_the_prompt_has_no_effect(config, compiled):
    lm, params = compiled(t5.language_model(config)), params_of(config)
    wide = Prompt(jnp.pad(PROMPT.tokens, ((0, 0), (0, 10)), constant_values=17), PROMPT.length)
    a, _ = lm.prefill(params, PROMPT, Room(4))
    b, _ = lm.prefill(params, wide, Room(4))
    np.testing.assert_allclose(a.logits, b.logits, atol=1e-5)


@pytest.mark.slow
def test_garbage_after_the_length_is_masked(config, compiled):
    """NaN keys and huge values past a row's length change nothing, up to the last slot of the
    cache.
    """
    lm, params = compiled(t5.language_model(config)), params_of(config)
    _, cache = lm.prefill(params, PROMPT, Room(4))
    clean, _ = lm.extend(params, cache, TOKENS[:, 1:4])  # ends exactly at capacity
    real = (jnp.arange(4) < 1)[None, None, :, None]
    pairs = zip(cache.decoder.keys, cache.decoder.values, strict=True)
    layers = tuple(
        layer_caches.Attended(jnp.where(real, k, jnp.nan), jnp.where(real, v, 1e30))
        for k, v in pairs
    )
    poisoned = cache._replace(decoder=cache.decoder._replace(layers=layers))
    forward, _ = lm.extend(params, poisoned, TOKENS[:, 1:4])
    np.testing.assert_array_equal(forward.logits, clean.logits)


@pytest.mark.slow
def test_bfloat16_gives_float32_logits(compiled):
    config = t5.T5Config(61, 32, 48, 4, 8, 1, 1, dtype="bfloat16")
    forward, cache = compiled(t5.language_model(config)).prefill(params_of(config), PROMPT, Room(4))
    assert forward.logits.dtype == jnp.float32
    assert cache.decoder.keys[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "count"),
    [  # counted from the models that transformers builds from the published configurations
        ("t5-v1_1-small", 76_961_152),
        ("t5-v1_1-base", 247_577_856),
        pytest.param("t5-v1_1-large", 783_150_080, marks=pytest.mark.slow),
        pytest.param("t5-v1_1-xl", 2_849_757_184, marks=pytest.mark.slow),
        pytest.param("t5-v1_1-xxl", 11_135_332_352, marks=pytest.mark.slow),
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        pytest.param("t5-large", 737_668_096, marks=pytest.mark.slow),
        pytest.param("t5-11b", 11_307_321_344, marks=pytest.mark.slow),
    ],
)
def test_published_sizes_have_their_parameter_counts(name, count):
    """Instantiated abstractly: no memory."""
    shapes = jax.eval_shape(lambda key: t5.init(t5.SIZES[name], key), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count


@pytest.mark.needs_torch
@pytest.mark.slow
def test_parity_with_transformers(config, compiled):
    """Float32 logits and taps of transformers' T5 with the same weights, for each version."""
    import torch
    import transformers

    name = "UMT5" if config.bias_by_layer else "T5"
    peer = getattr(transformers, f"{name}ForConditionalGeneration")(
        getattr(transformers, f"{name}Config")(
            vocab_size=config.vocab_size,
            d_model=config.dim,
            d_kv=config.head_dim,
            d_ff=config.ff_dim,
            num_layers=config.encoder_layers,
            num_decoder_layers=config.decoder_layers,
            num_heads=config.heads,
            feed_forward_proj="gated-gelu" if config.gated else "relu",
            tie_word_embeddings=config.tied_head,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ).eval()
    if not config.tied_head:  # transformers ties an umT5's, whatever its configuration says
        peer.lm_head.weight = torch.nn.Parameter(peer.lm_head.weight.clone())
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(0.0, 0.15)
    params = from_peer({k: v.detach().numpy() for k, v in peer.state_dict().items()}, config)
    ours = jax.jit(t5.T5(config).apply)({"params": params}, PROMPT, TOKENS)
    real = np.arange(6)[None] < np.asarray(PROMPT.length)[:, None]
    with torch.no_grad():
        said = peer(
            input_ids=torch.tensor(np.array(PROMPT.tokens)),
            attention_mask=torch.tensor(real.astype(np.int64)),
            decoder_input_ids=torch.tensor(np.array(TOKENS)),
            output_hidden_states=True,
        )
    theirs = said.logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())

    lm = compiled(t5.language_model(config, taps=(0, 1)))
    _, cache = lm.prefill(params, PROMPT, Room(8))
    forward, _ = lm.extend(params, cache, TOKENS[:, 1:])
    *_, last = hidden = [x.numpy()[:, 1:] for x in said.decoder_hidden_states]
    # after layer l, but for the last: after the final norm
    expected = np.concatenate(hidden[1:3], axis=-1)
    got = forward.taps if config.decoder_layers > 2 else forward.taps[..., : config.dim]
    np.testing.assert_allclose(
        got, expected[..., : got.shape[-1]], atol=2e-5 * np.abs(expected).max()
    )
    np.testing.assert_allclose(forward.features, last, atol=2e-5 * np.abs(last).max())


def from_peer(weights, config):
    """Our parameter tree from transformers' T5 weights."""

    def attention(prefix):
        return {
            ours: {"weight": jnp.array(weights[f"{prefix}.{theirs}.weight"])}
            for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o"))
        }

    def feed_forward(prefix):
        names = (
            {"gate": "wi_0", "wi": "wi_1", "out": "wo"}
            if config.gated
            else {"wi": "wi", "out": "wo"}
        )
        return {
            n: {"weight": jnp.array(weights[f"{prefix}.DenseReluDense.{m}.weight"])}
            for n, m in names.items()
        }

    def norm(name):
        return {"scale": jnp.array(weights[f"{name}.weight"])}

    params = {
        "embedding": {"embedding": jnp.array(weights["shared.weight"])},
        "encoder_norm": norm("encoder.final_layer_norm"),
        "decoder_norm": norm("decoder.final_layer_norm"),
    }

    def bias(side, i):
        name = f"{side}.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight"
        return {"table": jnp.array(weights[name])}

    for i in range(config.encoder_layers):
        at = f"encoder.block.{i}.layer"
        params[f"encoder_{i}"] = {
            "attention_norm": norm(f"{at}.0.layer_norm"),
            "attention": attention(f"{at}.0.SelfAttention"),
            "ff_norm": norm(f"{at}.1.layer_norm"),
            "ff": feed_forward(f"{at}.1"),
        }
    for i in range(config.decoder_layers):
        at = f"decoder.block.{i}.layer"
        params[f"decoder_{i}"] = {
            "attention_norm": norm(f"{at}.0.layer_norm"),
            "attention": attention(f"{at}.0.SelfAttention"),
            "cross_norm": norm(f"{at}.1.layer_norm"),
            "cross": attention(f"{at}.1.EncDecAttention"),
            "ff_norm": norm(f"{at}.2.layer_norm"),
            "ff": feed_forward(f"{at}.2"),
        }
    for side, layers in t5.NETWORK.stacks(config).items():
        if not config.bias_by_layer:
            params[f"{side}_bias"] = bias(side, 0)
        for i in range(layers if config.bias_by_layer else 0):
            params[f"{side}_{i}"]["bias"] = bias(side, i)
    if not config.tied_head:
        params["head"] = {"weight": jnp.array(weights["lm_head.weight"])}
    return params
