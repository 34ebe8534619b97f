"""The GPT against transformers' GPT-2, and its cache against its own full pass (trees:
test_trees.py).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Prompt, Room
from jaxspec.nets import decoder
from jaxspec.weights import huggingface
from jaxspec.weights.hf_families.gpt import SIZES
from tests.small import random_params

CONFIG = decoder.gpt_config(61, dim=32, ff_dim=64, layers=2, heads=4, max_positions=16)
TOKENS = jax.random.randint(jax.random.key(1), (2, 9), 0, 61)


def params_of(config, seed=0):
    return random_params(decoder.init, config, seed, 0.1)


@pytest.mark.slow
def test_cache_equals_full_pass(compiled):
    lm, params = compiled(decoder.language_model(CONFIG)), params_of(CONFIG)
    full = jax.jit(decoder.DecoderNet(CONFIG).apply)({"params": params}, TOKENS)
    prompt = Prompt(TOKENS[:, :5], jnp.array([5, 3]))
    forward, cache = lm.prefill(params, prompt, Room(9))
    np.testing.assert_allclose(forward.logits[:, 0], jnp.stack([full[0, 4], full[1, 2]]), atol=2e-5)
    fed = jnp.stack([TOKENS[0, 5:8], TOKENS[1, 3:6]])
    forward, cache = lm.extend(params, cache, fed)
    np.testing.assert_allclose(forward.logits, jnp.stack([full[0, 5:8], full[1, 3:6]]), atol=2e-5)
    cache = lm.rewind(cache, jnp.array([6, 4]))
    # row 0 ends at capacity
    forward, _ = lm.extend(params, cache, jnp.stack([TOKENS[0, 6:9], TOKENS[1, 4:7]]))
    np.testing.assert_allclose(forward.logits, jnp.stack([full[0, 6:9], full[1, 4:7]]), atol=2e-5)


@pytest.mark.slow
def test_bfloat16_gives_float32_logits(compiled):
    config = decoder.gpt_config(61, 32, 64, 1, 4, 16, dtype="bfloat16")
    forward, cache = compiled(decoder.language_model(config)).prefill(
        params_of(config), Prompt(TOKENS, jnp.array([9, 9])), Room(12)
    )
    assert forward.logits.dtype == jnp.float32
    assert cache.keys[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("name", "count", "published"), [("gpt-97m", 98_425_344, 97.6e6), ("gpt-6m", 6_036_480, 5.8e6)]
)
def test_the_papers_sizes(name, count, published):
    """With 8k tokens; the paper's counts have no positions."""
    shapes = jax.eval_shape(lambda key: decoder.init(SIZES[name], key), jax.random.key(0))
    sizes = {
        module: sum(x.size for x in jax.tree.leaves(shape)) for module, shape in shapes.items()
    }
    assert sum(sizes.values()) == count
    assert count - sizes["position"] == pytest.approx(published, rel=0.01)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_parity_with_transformers(tmp_path, tied, compiled):
    """Our GPT is GPT-2: float32 logits and taps with the same weights, which are written as they
    were read.
    """
    import torch
    import transformers

    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_inner=64,
            n_layer=2,
            n_head=4,
            n_positions=16,
            resid_pdrop=0.0,
            eos_token_id=60,
            tie_word_embeddings=tied,
        )
    ).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.normal_(0.0, 0.2)
    peer.save_pretrained(tmp_path)
    loaded = jaxspec.load(tmp_path)
    assert loaded.config == dataclasses.replace(CONFIG, tied_head=tied, end_tokens=(60,))
    ours = jax.jit(decoder.DecoderNet(loaded.config).apply)({"params": loaded.params}, TOKENS)
    with torch.no_grad():
        said = peer(torch.tensor(np.array(TOKENS)), output_hidden_states=True)
    theirs, hidden = said.logits.numpy(), said.hidden_states[1].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
    lm = compiled(decoder.language_model(loaded.config, taps=(0,)))
    forward, _ = lm.prefill(loaded.params, Prompt(TOKENS, jnp.array([9, 9])), Room(12))
    np.testing.assert_allclose(forward.taps, hidden, atol=2e-5 * np.abs(hidden).max())
    again = jaxspec.load(huggingface.save(loaded, tmp_path / "again"))
    assert again.config == loaded.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
