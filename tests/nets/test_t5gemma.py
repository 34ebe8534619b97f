"""T5Gemma's cache against its own full pass: windows in rings, ragged rows, both kinds of decoder
layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import nets
from jaxspec.core import Prompt, Room, chunks
from jaxspec.nets import t5gemma
from jaxspec.nets.decoder import decoder_config
from tests.small import random_params

GEMMA = {"post_norms": True, "norms_from_one": True, "scale_embedding": True, "tied_head": True}
WINDOWS = GEMMA | {"window": 3, "local": (True, False)}
WIDE = decoder_config(31, 24, 32, 2, 4, 2, 8, attention_cap=5.0, **WINDOWS | {"window": 5})
NARROW = decoder_config(31, 16, 24, 2, 2, 1, 8, attention_cap=5.0, logits_cap=9.0, **WINDOWS)
GEMMA3 = decoder_config(31, 16, 32, 2, 4, 2, 8, head_norms=True, local_rope_base=100.0, **WINDOWS)
CONFIGS = {
    "cross-attention": t5gemma.t5gemma_config(WIDE, NARROW),
    "one softmax": t5gemma.t5gemma_config(
        GEMMA3, GEMMA3, merged=True, shares_embedding=True, end_of_image=7
    ),
}
PROMPT = Prompt(jnp.array([[3, 1, 4, 1, 5, 9, 7], [2, 6, 0, 0, 0, 0, 0]]), jnp.array([7, 2]))
TOKENS = jnp.array([[2, 5, 6, 7, 8, 9, 10, 11], [2, 7, 9, 8, 7, 6, 5, 4]])


def params_of(config):
    """Random parameters, norms and the vector of an image's end among them."""
    return random_params(nets.net_of(config).init, config, noise=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_cache_equals_full_pass(kind, compiled):
    """In rings, too: one by one, several at once, and from ragged beginnings of rows."""
    config = CONFIGS[kind]
    lm, params = compiled(t5gemma.language_model(config)), params_of(config)
    lm = lm._replace(prefill=jax.jit(t5gemma.language_model(config).prefill, static_argnums=2))
    full = jax.jit(t5gemma.T5Gemma(config).apply)({"params": params}, PROMPT, TOKENS)
    for rewind in (None, 1):
        forward, cache = lm.prefill(params, PROMPT, Room(9, rewind))
        several, cache = lm.extend(params, cache, TOKENS[:, 1:5])
        one, _ = lm.extend(params, cache, TOKENS[:, 5:6])
        got = np.concatenate([forward.logits, several.logits, one.logits], axis=1)
        np.testing.assert_allclose(got, full[:, :6], atol=2e-5)
        # Of the second row only three tokens are real: what is fed next lies after these.
        beginning = Prompt(TOKENS[:, :6], jnp.array([6, 3]), encoder=PROMPT)
        forward, cache = lm.prefill(params, beginning, Room(9, rewind))
        fed = jnp.stack([TOKENS[0, 6], TOKENS[1, 3]])[:, None]
        following, _ = lm.extend(params, cache, fed)
        for row, length in enumerate((6, 3)):
            got = np.concatenate([forward.logits[row], following.logits[row]])
            np.testing.assert_allclose(got, full[row, length - 1 : length + 1], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_nodes_of_a_tree_have_the_logits_of_their_paths(kind, compiled):
    config = CONFIGS[kind]
    lm, params = compiled(t5gemma.language_model(config)), params_of(config)
    _, cache = lm.prefill(params, PROMPT, Room(12))
    _, cache = lm.extend(params, cache, TOKENS[:, 1:4])
    nodes = jnp.array([[8, 9, 10, 11, 12], [5, 6, 7, 8, 9]])
    forward, _ = lm.extend(params, cache, nodes, jnp.array([[-1, 0, 0, 2, 3]] * 2))
    for path in ([0, 1], [0, 2, 3, 4]):
        chain, _ = lm.extend(params, cache, nodes[:, jnp.array(path)])
        np.testing.assert_allclose(forward.logits[:, path[-1]], chain.logits[:, -1], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_wide_passes_make_their_masks_by_chunks_of_queries(kind):
    """A prompt with padding, and tokens behind a row, that are more than a chunk change nothing
    before them.
    """
    config = CONFIGS[kind]
    params, full = params_of(config), jax.jit(t5gemma.T5Gemma(config).apply)
    more = ((0, 0), (0, chunks.LONGEST))
    wide = Prompt(jnp.pad(PROMPT.tokens, more, constant_values=5), PROMPT.length)
    expected = full({"params": params}, PROMPT, TOKENS)
    got = full({"params": params}, wide, jnp.pad(TOKENS, more, constant_values=6))[
        :, : TOKENS.shape[1]
    ]
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_layers_that_read_no_encoder_are_refused():
    with pytest.raises(ValueError, match="a decoder layer reads no encoder: expected `cross`"):
        t5gemma.T5GemmaConfig(**vars(NARROW), encoder=WIDE)
    with pytest.raises(ValueError, match="the start of a row has 31: expected ids from 0 to 30"):
        dataclasses.replace(CONFIGS["one softmax"], start_token=31)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_with_a_trimmed_vocabulary_drafts(kind):
    config = CONFIGS[kind]
    model = jaxspec.Model(t5gemma.language_model(config), params_of(config), config=config)
    options = dict(max_new_tokens=9, eos_ids=())
    plain = jaxspec.generate(model, PROMPT, **options)
    drafter = jaxspec.trim_vocabulary(model, size=20)
    out = jaxspec.generate(model, PROMPT, drafter=drafter, gamma=3, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.accepted.sum() > 0
