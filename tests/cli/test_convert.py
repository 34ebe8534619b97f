"""`jaxspec convert`: there and back, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import jaxspec
from jaxspec import Model
from jaxspec.cli import names
from jaxspec.cli import pair as pairs
from jaxspec.cli.main import app
from jaxspec.nets import decoder, t5
from jaxspec.weights import huggingface, orbax, quantisation, source
from tests.small import tiny_t5

runner = CliRunner()
MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "sliding_window": 4,
}
SOURCE, CONFIG = source.from_toml({"model": MISTRAL})
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def run(*arguments: object):
    return runner.invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, words) -> Path:
    """A Mistral as a Hugging Face folder."""
    params = decoder.init(CONFIG, jax.random.key(0))
    model = Model(decoder.language_model(CONFIG), params, words, CONFIG, "tiny", SOURCE)
    return huggingface.save(model, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def words():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(
        models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "dog": 3}, unk_token="<unk>")
    )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE, **special)


@pytest.mark.slow
def test_adapters_are_merged_on_the_command_line(theirs, tmp_path):
    """As `load` merges them: into a folder that is written, and into the target of commands that
    generate.
    """
    query = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}'
    )
    ones = {
        f"{query}A.weight": np.ones((2, 16), np.float32),
        f"{query}B.weight": np.ones((16, 2), np.float32),
    }
    save_file(ones, adapter / "adapter_model.safetensors")
    merged = jaxspec.load(theirs, adapter=adapter).params
    changed = merged["layers_0"]["attention"]["query"]["weight"]
    plain = jaxspec.load(theirs).params["layers_0"]["attention"]["query"]["weight"]
    np.testing.assert_allclose(changed - plain, 4.0, atol=1e-5)
    assert run(theirs, tmp_path / "to", "--adapter", adapter).exit_code == 0
    assert orbax.read_manifest(tmp_path / "to").about["adapter"] == str(adapter)
    target, _ = pairs.load(pairs.Pair(str(theirs), adapter=str(adapter)))
    for params in (jaxspec.load(tmp_path / "to").params, target.params):
        jax.tree.map(np.testing.assert_array_equal, params, merged)
    help_of = {
        name: runner.invoke(app, [name, "--help"]).output
        for name in ("generate", "batch", "chat", "convert")
    }
    assert all("--adapter" in text for text in help_of.values())
    with pytest.raises(ValueError, match="--adapter is x, and random:t5-small has random weights"):
        names.model("random:t5-small", adapter="x")


@pytest.mark.slow
def test_there_and_back_is_bit_equal(theirs, tmp_path):
    """The default is the other format, in the dtype that is there; the chat template comes
    along.
    """
    result = run(theirs, tmp_path / "ours", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["format"], report["dtype"]) == ("jaxspec", "float32")
    assert orbax.read_manifest(tmp_path / "ours").about == {"converted_from": "tiny"}
    ends = dataclasses.replace(CONFIG, end_tokens=(1,))  # which config.json names
    assert jaxspec.load(tmp_path / "ours").config == ends
    back = run(tmp_path / "ours", tmp_path / "back")
    assert back.exit_code == 0 and "float32" in back.stdout and "huggingface" in back.stdout
    first, second = (
        load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back")
    )
    assert first.keys() == second.keys()
    for name, x in first.items():
        np.testing.assert_array_equal(second[name], x)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["sliding_window"] == 4
    assert jaxspec.load(tmp_path / "back").tokenizer.chat_template == TEMPLATE


@pytest.mark.slow
def test_a_dtype_is_converted_or_stays_as_it_was(theirs, tmp_path):
    assert (
        run(theirs, tmp_path / "half", "--format", "huggingface", "--dtype", "bfloat16").exit_code
        == 0
    )
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    report = json.loads(run(tmp_path / "half", tmp_path / "ours", "--json").stdout)
    assert report["dtype"] == "bfloat16"  # as it was
    small = json.loads(
        run(tmp_path / "half", tmp_path / "small", "--dtype", "int8", "--json").stdout
    )
    assert orbax.read_manifest(tmp_path / "small").dtype == "int8"
    assert small["parameters"] == report["parameters"]
    report = json.loads(run(tmp_path / "small", tmp_path / "wide", "--json").stdout)
    # transformers knows no int8 of ours
    assert (report["format"], report["dtype"]) == ("huggingface", "float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "gguf"], "--format is 'gguf': expected one of huggingface, jaxspec"),
        (
            ["--dtype", "int3"],
            "--dtype for jaxspec is 'int3': expected one of float32, bfloat16, int8, int4",
        ),
        (
            ["--format", "huggingface", "--dtype", "int8"],
            "--dtype is 'int8', and a Hugging Face folder holds float32 or bfloat16: add --format "
            "jaxspec",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_and_nothing_written(
    theirs, tmp_path, options, message
):
    result = run(theirs, tmp_path / "to", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "to").exists()


def test_nothing_is_replaced_unasked(theirs, tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "manifest.toml").write_text("")
    result = run(theirs, tmp_path / "to")
    assert result.exit_code == 2 and "exists: give --overwrite" in result.stderr
    assert run(theirs, tmp_path / "to", "--overwrite").exit_code == 0
    # config.json names it
    assert jaxspec.load(tmp_path / "to").config == dataclasses.replace(CONFIG, end_tokens=(1,))


def test_a_model_without_a_tokenizer(tmp_path):
    params = decoder.init(CONFIG, jax.random.key(0))
    model = Model(decoder.language_model(CONFIG), params, None, CONFIG, source=SOURCE)
    huggingface.save(model, tmp_path / "bare")
    result = run(tmp_path / "bare", tmp_path / "to")
    assert result.exit_code == 2 and "or give --format huggingface\n" in result.stderr
    narrow = run(tmp_path / "bare", tmp_path / "to", "--dtype", "int8")
    assert (
        narrow.exit_code == 2
        and "or give --format huggingface without that --dtype" in narrow.stderr
    )


def test_a_checkpoint_of_ours_in_fewer_bits_stays_one_of_ours(tmp_path):
    """The default is the other format, which has no int8: the error names the option that helps."""
    result = run("debian-t5-small", tmp_path / "to", "--dtype", "int8")
    assert result.exit_code == 2 and "add --format jaxspec" in result.stderr
    assert (
        run("debian-t5-small", tmp_path / "to", "--dtype", "int8", "--format", "jaxspec").exit_code
        == 0
    )
    assert orbax.read_manifest(tmp_path / "to").dtype == "int8"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_matrices_are_made_in_reading(theirs, tmp_path, monkeypatch, dtype):
    """Tensor by tensor: no float32 model is held."""
    dtypes, load = [], jaxspec.weights.loading.load

    def watched(source, dtype, **options):
        dtypes.append(dtype)
        return load(source, dtype=dtype, **options)

    monkeypatch.setattr(jaxspec.weights.loading, "load", watched)
    assert run(theirs, tmp_path / "small", "--dtype", dtype).exit_code == 0
    assert dtypes == [dtype]
    expected = quantisation.quantise(load(theirs).params, dtype)
    jax.tree.map(
        np.testing.assert_array_equal, load(tmp_path / "small", dtype=dtype).params, expected
    )


@pytest.mark.slow
def test_a_tokenizer_of_bytes(tmp_path):
    """ByT5's has no tokenizer.json."""
    from transformers import ByT5Tokenizer

    config = tiny_t5(384)
    model = Model(
        t5.language_model(config),
        t5.init(config, jax.random.key(0)),
        ByT5Tokenizer(),
        config,
        "byt5",
    )
    huggingface.save(model, tmp_path / "theirs")
    result = run(tmp_path / "theirs", tmp_path / "ours")
    assert result.exit_code == 0, result.output
    assert set(orbax.BYTES) < set(orbax.read_manifest(tmp_path / "ours").files)
    theirs, ours = (jaxspec.load(tmp_path / name) for name in ("theirs", "ours"))
    assert (
        ours.tokenizer("häus <extra_id_3>")["input_ids"]
        == theirs.tokenizer("häus <extra_id_3>")["input_ids"]
    )
    texts = [
        jaxspec.generate(model, ["häus"], drafter=model, max_new_tokens=8).texts
        for model in (theirs, ours)
    ]
    assert texts[0] == texts[1]
    again = tmp_path / "again"
    assert run(tmp_path / "ours", again, "--format", "jaxspec").exit_code == 0
    added = again / orbax.BYTES[0]
    added.write_text(added.read_text().replace("259", "260"))
    with pytest.raises(orbax.CheckpointError, match=r"added_tokens\.json is altered"):
        jaxspec.load(again)


def test_a_tokenizer_with_more_ids_than_the_model(theirs, tmp_path):
    """It would be refused in loading."""
    model = jaxspec.load(theirs)
    model.tokenizer.add_tokens([f"<{i}>" for i in range(40)])
    huggingface.save(model, tmp_path / "more")
    result = run(tmp_path / "more", tmp_path / "ours")
    assert result.exit_code == 2
    assert (
        "the tokenizer has ids up to 43, the model only up to 31: take added tokens"
        in result.stderr
    )
    assert not (tmp_path / "ours").exists()
    assert run(tmp_path / "more", tmp_path / "copy", "--format", "huggingface").exit_code == 0
