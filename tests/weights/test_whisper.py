"""What config.json and generation_config.json of a Whisper say, and what is refused."""

import dataclasses
import json

import pytest

from jaxspec.nets.whisper import SIZES, Speech
from jaxspec.weights import hf_families, huggingface
from jaxspec.weights.tensors import CheckpointError

TURBO = {  # as openai/whisper-large-v3-turbo has it, without what does not concern the network
    "model_type": "whisper",
    "activation_function": "gelu",
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layers": 4,
    "decoder_start_token_id": 50258,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "eos_token_id": 50257,
    "is_encoder_decoder": True,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 128,
    "pad_token_id": 50257,
    "scale_embedding": False,
    "vocab_size": 51866,
}
GENERATION = {
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
    "begin_suppress_tokens": [220, 50257],
    "suppress_tokens": [1, 2, 7],
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259, "<|zh|>": 50260},
    "task_to_id": {"transcribe": 50360, "translate": 50359},
    "no_timestamps_token_id": 50364,
    "max_initial_timestamp_index": 50,
}


def test_a_published_folder_is_read_without_a_warning(tmp_path, caplog):
    (tmp_path / "config.json").write_text(json.dumps(TURBO))
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    family, config = huggingface.read_config(tmp_path)
    assert family.title == "Whisper, distil-whisper" and not caplog.records
    speech = Speech(
        ("en", "zh"),
        (50259, 50260),
        ("transcribe", "translate"),
        (50360, 50359),
        50364,
        (1, 2, 7),
        (220, 50257),
        50,
    )
    assert config == dataclasses.replace(
        SIZES["whisper-large-v3-turbo"], end_tokens=(50257,), speech=speech
    )
    written = family.write_generation(config)
    assert {key: GENERATION[key] for key in written} == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_embedding": True}, "scale_embedding is True: only False"),
        ({"decoder_attention_heads": 16}, "decoder_attention_heads is 16: only 20"),
        ({"decoder_ffn_dim": 64}, "decoder_ffn_dim is 64: only 5120"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"activation_function": "tanh"}, "activation is 'tanh'"),
        ({"num_mel_bins": 0}, "num_mel_bins is 0: expected a positive integer"),
        ({"d_model": 1290}, "dim is 1290"),
    ],
)
def test_what_would_compute_something_else_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        hf_families.of(TURBO | change).read(TURBO | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lang_to_id": {"<|en|>": 99_999}}, "lang_to_id has ids that the model lacks"),
        ({"lang_to_id": [1]}, "lang_to_id is of type list: expected an object"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens is .* expected ids of tokens"),
    ],
)
def test_wrong_tokens_are_refused(change, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TURBO))
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION | change))
    with pytest.raises(CheckpointError, match=message):
        huggingface.read_config(tmp_path)
