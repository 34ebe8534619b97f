"""Whisper against transformers' implementation, its cache against its own full pass, and its
folders.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Prompt, Room
from jaxspec.nets import encoder_decoder, whisper
from jaxspec.weights import huggingface
from tests.small import random_params

SPEECH = whisper.Speech(("en", "de"), (42, 43), ("transcribe",), (45,), 47, (3, 5), (7,), 20)
CONFIG = whisper.WhisperConfig(
    61,
    32,
    48,
    4,
    2,
    3,
    mels=8,
    source_positions=10,
    max_positions=24,
    start_token=41,
    end_tokens=(40,),
    speech=SPEECH,
)
SOUND = np.random.RandomState(0).normal(size=(2, 8, 20)).astype(np.float32)
TOKENS = np.random.RandomState(1).randint(0, 61, (2, 7))


@pytest.fixture(scope="module")
def params():
    # biases and norms, too, are other than 0 and 1
    return random_params(whisper.init, CONFIG, noise=0.1)


@pytest.mark.slow
def test_cache_equals_full_pass(params, compiled):
    """Rows that begin with several tokens, fed in ragged pieces, have the logits of the full
    pass.
    """
    lm = compiled(whisper.language_model(CONFIG))
    full = jax.jit(whisper.Whisper(CONFIG).apply)(
        {"params": params}, jnp.asarray(SOUND), jnp.asarray(TOKENS)
    )
    prompt = Prompt(jnp.asarray(TOKENS[:, :4]), jnp.array([4, 2]), jnp.asarray(SOUND))
    forward, cache = lm.prefill(params, prompt, Room(12))
    assert cache.decoder.length.tolist() == [4, 2] and forward.features.shape == (2, 4, 32)
    for row, last in enumerate((3, 1)):
        np.testing.assert_allclose(forward.logits[row, 0], full[row, last], atol=2e-5)
    fed = jnp.stack([jnp.asarray(TOKENS[0, 4:7]), jnp.asarray(TOKENS[1, 2:5])])
    forward, _ = lm.extend(params, cache, fed)
    np.testing.assert_allclose(forward.logits[0], full[0, 4:7], atol=2e-5)
    np.testing.assert_allclose(forward.logits[1], full[1, 2:5], atol=2e-5)


TABLE = {  # the config.json of these sizes
    "model_type": "whisper",
    "vocab_size": 61,
    "d_model": 32,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 24,
    "decoder_start_token_id": 41,
    # transformers' defaults are not in this vocabulary
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 40),
}


@pytest.mark.needs_torch
@pytest.mark.slow
def test_a_saved_folder_is_transformers_model(params, tmp_path):
    """Float32 logits of transformers' Whisper with the same weights; what is loaded is what was
    saved.
    """
    import torch
    import transformers

    lm = whisper.language_model(CONFIG)
    model = jaxspec.Model(lm, params, config=CONFIG, source={"config.json": TABLE})
    huggingface.save(model, tmp_path / "it")
    peer = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "it").eval()
    assert peer.generation_config.lang_to_id == {"<|en|>": 42, "<|de|>": 43}
    assert peer.generation_config.suppress_tokens == [3, 5]
    with torch.no_grad():
        theirs = peer(
            input_features=torch.tensor(SOUND), decoder_input_ids=torch.tensor(TOKENS)
        ).logits.numpy()
    ours = jax.jit(whisper.Whisper(CONFIG).apply)(
        {"params": params}, jnp.asarray(SOUND), jnp.asarray(TOKENS)
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())
    loaded = jaxspec.load(tmp_path / "it")
    assert loaded.config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_a_drafter_shares_the_encoder_and_not_the_embedding(params):
    names = set(encoder_decoder.encoder_params(params, source_vocab=0))
    assert {
        "encoder_conv1",
        "encoder_conv2",
        "encoder_positions",
        "encoder_0",
        "encoder_norm",
    } <= names
    assert not names & {"embedding", "position", "decoder_norm", "decoder_0"}
    assert encoder_decoder.same_encoder(dataclasses.replace(CONFIG, decoder_layers=1), CONFIG)
    assert not encoder_decoder.same_encoder(dataclasses.replace(CONFIG, mels=9), CONFIG)


def test_features_of_another_shape_are_refused(params):
    lm = whisper.language_model(CONFIG)
    row = jnp.full((1, 1), 41, jnp.int32), jnp.ones((1,), jnp.int32)
    with pytest.raises(ValueError, match=r"shape is \[1, 8, 21\]: expected \[batch, 8, 20\]"):
        lm.prefill(params, Prompt(*row, jnp.zeros((1, 8, 21))), Room(4))
    with pytest.raises(ValueError, match="given token ids: expected features of sound"):
        lm.prefill(params, Prompt(*row), Room(4))
    with pytest.raises(ValueError, match="dim is 10: expected a multiple of the 4 heads"):
        dataclasses.replace(CONFIG, dim=10)
    with pytest.raises(ValueError, match="the start of a row has 61: expected ids from 0 to 60"):
        dataclasses.replace(CONFIG, start_token=61)


@pytest.mark.parametrize(
    ("name", "count"),
    [  # counted from the models that transformers builds from the published configurations
        ("whisper-tiny", 37_760_640),
        ("whisper-large-v3", 1_543_490_560),
        ("whisper-large-v3-turbo", 808_878_080),
        ("distil-large-v3", 756_405_760),
    ],
)
def test_published_sizes_have_their_parameter_counts(name, count):
    shapes = jax.eval_shape(lambda key: whisper.init(whisper.SIZES[name], key), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count
