"""The JSON files that a model keeps, and what is written of them."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli.main import app
from jaxspec.weights import huggingface, orbax, source
from jaxspec.weights.hf_families import FamilyError
from jaxspec.weights.tensors import CheckpointError
from tests.weights.folders import model_from, tokenizer

GLM = {  # of a family that writes no config.json, with a key that nobody reads
    "model_type": "glm",
    "architectures": ["GlmForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "sliding_window": None,
    "eos_token_id": [1, 2],
    "note": {"of": ["a trainer", None]},
    "torch_dtype": "float32",
}
GENERATION = {"temperature": 0.6, "eos_token_id": [1, 2]}


@pytest.fixture
def folder(tmp_path):
    """A folder with both files, and a tokenizer."""
    model = model_from(GLM)._replace(tokenizer=tokenizer())
    written = huggingface.save(model, tmp_path / "glm")
    (written / source.GENERATION).write_text(json.dumps(GENERATION))
    return written


def tables(folder):
    return {
        name: json.loads((folder / name).read_text()) for name in (source.CONFIG, source.GENERATION)
    }


def test_a_folder_is_written_with_the_config_that_it_had_and_what_changed(folder, tmp_path):
    before = tables(folder)
    model = jaxspec.load(folder, dtype="bfloat16")
    assert model.source == before
    after = tables(huggingface.save(model, tmp_path / "again"))
    assert after[source.CONFIG] == before[source.CONFIG] | {"torch_dtype": "bfloat16"}
    assert after[source.GENERATION].items() >= GENERATION.items()
    assert before[source.CONFIG]["note"] == GLM["note"]
    ended = model._replace(config=dataclasses.replace(model.config, end_tokens=(7,)))
    after = tables(huggingface.save(ended, tmp_path / "ended"))
    assert after[source.GENERATION]["eos_token_id"] == [7]
    assert after[source.GENERATION]["temperature"] == 0.6


def test_a_checkpoint_keeps_the_config_of_the_folder_that_it_was_converted_from(folder, tmp_path):
    for origin, to in ((folder, "ours"), (tmp_path / "ours", "theirs")):
        result = CliRunner().invoke(app, ["convert", str(origin), str(tmp_path / to)])
        assert result.exit_code == 0, result.output
    ours, theirs = jaxspec.load(tmp_path / "ours"), jaxspec.load(tmp_path / "theirs")
    assert orbax.read_manifest(tmp_path / "ours").source == ours.source
    assert ours.config == theirs.config == jaxspec.load(folder).config
    assert tables(tmp_path / "theirs")[source.CONFIG] == tables(folder)[source.CONFIG]


def test_a_configuration_that_its_tables_cannot_express_is_not_saved(folder, tmp_path):
    model = jaxspec.load(folder)
    other = model._replace(config=dataclasses.replace(model.config, logits_cap=2.0))
    with pytest.raises(
        CheckpointError, match=r"cannot be saved .* no family writes a config\.json"
    ):
        huggingface.save(other, tmp_path / "it")
    with pytest.raises(FamilyError, match=r"no family writes a config\.json"):
        source.written(other.config, other.source, {})


def test_the_text_half_of_a_model_that_also_sees_is_written_alone():
    text = {"model_type": "gemma3_text", "hidden_size": 16, "num_hidden_layers": 1}
    both = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    kept = {source.CONFIG: both}
    _, config = source.configured(kept)
    assert config.end_tokens == (1, 106)
    _, written = source.written(config, kept, {"pad_token_id": 0})
    expected = {"architectures": ["Gemma3ForCausalLM"], **text, "pad_token_id": 0}
    assert written[source.CONFIG] == expected
    assert written[source.GENERATION] == {"pad_token_id": 0, "eos_token_id": [1, 106]}


def test_another_models_name_for_a_network_becomes_that_of_its_family():
    """transformers has no MiMo, and reads one without its module as a Qwen 2."""
    table = {key: x for key, x in GLM.items() if key not in source.DROPPED}
    kept = {source.CONFIG: table | {"model_type": "mimo", "auto_map": {"AutoModel": "mimo.MiMo"}}}
    _, written = source.written(source.configured(kept)[1], kept, {})
    qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert written == {source.CONFIG: table | qwen}


def test_a_new_generation_config_has_the_ids_of_the_config():
    """transformers then takes them from nowhere else."""
    table = {
        **{"model_type": "t5", "vocab_size": 24, "d_model": 8, "d_ff": 8, "d_kv": 4},
        **{"num_heads": 2, "num_layers": 1, "eos_token_id": 1, "decoder_start_token_id": 0},
    }
    kept = {source.CONFIG: table}
    config = dataclasses.replace(source.configured(kept)[1], begin_tokens=(9,))
    _, tables = source.written(config, kept, {})
    ids = {"eos_token_id": 1, "decoder_start_token_id": 0, "forced_bos_token_id": 9}
    assert tables[source.GENERATION] == ids
    assert source.configured(tables)[1] == config


def test_keys_that_a_family_does_not_read_are_found():
    table = GLM | {"rope_parameters": {"rope_theta": 1.0, "rope_base": 2.0}}
    expected = ["architectures", "note", "torch_dtype", "rope_base"]
    assert list(source.unread({source.CONFIG: table})) == expected


def test_a_manifest_has_fields_that_config_json_lacks():
    table = {"model": {key: x for key, x in GLM.items() if key != "sliding_window"}}
    _, config = source.from_toml(table | {"fields": {"dtype": "bfloat16"}})
    assert config.dtype == "bfloat16"
    for fields, message in (
        ({"dim": 8}, r"\[fields\] has dim: expected some of dtype, end_tokens, for which"),
        ({"dtype": 3}, r"\[fields\] dtype must be of type str, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            source.from_toml(table | {"fields": fields})
