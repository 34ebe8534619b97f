"""Hugging Face folders and the hub: what is saved is loaded, in every dtype, and nothing is lost on
the way.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import nets, sharding
from jaxspec.draft_heads.save import save_parallel
from jaxspec.nets import axes_of, decoder, t5
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import hub, huggingface, quantisation
from jaxspec.weights.orbax import CheckpointError
from tests.weights.folders import GPT, LLAMA, T5, assert_same, model_from, model_of

ENDS = [dataclasses.replace(config, end_tokens=(1, 5, 7)) for config in (LLAMA, T5, GPT)]


@pytest.mark.parametrize("config", [LLAMA, T5, GPT, dataclasses.replace(T5, tied_head=True), *ENDS])
def test_what_is_saved_is_loaded_bit_for_bit(config, tmp_path):
    model = model_of(config)
    huggingface.save(model, tmp_path / "it")
    again = jaxspec.load(tmp_path / "it")
    assert (again.config, again.name, again.tokenizer) == (config, "it", None)
    assert_same(again.params, model.params)
    assert [file.name for file in tmp_path.iterdir()] == ["it"]


def test_what_is_saved_in_several_files_is_read_as_one(tmp_path, monkeypatch, folder):
    """The weights of one file are written as several, with an index, and read as one."""
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4000)
    model = jaxspec.load(folder)
    huggingface.save(model, tmp_path / "several")
    files = sorted(file.name for file in (tmp_path / "several").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 3
    largest = max(x.nbytes for x in load_file(folder / "model.safetensors").values())
    assert (
        max(file.stat().st_size for file in (tmp_path / "several").glob("*.safetensors"))
        < max(4000, largest) + 2000
    )
    assert_same(jaxspec.load(tmp_path / "several").params, model.params)


def test_bfloat16_comes_back_bit_for_bit(tmp_path, saved):
    """Matrices in bfloat16, the rest in float32; a bfloat16 file comes back bit for bit."""
    narrow = jaxspec.load(saved, dtype="bfloat16")
    assert narrow.config.dtype == "bfloat16"
    types = {x.dtype.name for x in jax.tree.leaves(narrow.params["layers_0"]["attention"])}
    assert types == {"bfloat16"} and narrow.params["norm"]["scale"].dtype == jnp.float32
    huggingface.save(narrow, tmp_path / "narrow")
    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    huggingface.save(jaxspec.load(tmp_path / "narrow", dtype="bfloat16"), tmp_path / "again")
    for name, x in load_file(tmp_path / "again" / "model.safetensors").items():
        np.testing.assert_array_equal(x.view(np.int16), stored[name].view(np.int16))
    wide = jaxspec.load(tmp_path / "narrow").params
    assert_same(wide["head"], jax.tree.map(lambda x: x.astype(jnp.float32), narrow.params["head"]))


def test_float16_files_are_read_as_float32_and_bfloat16(folder):
    """Llama 2's files are of float16."""
    weights = {
        name: x.astype(np.float16) for name, x in load_file(folder / "model.safetensors").items()
    }
    before = jaxspec.load(folder).params
    save_file(weights, folder / "model.safetensors")
    expected = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), before)
    assert_same(jaxspec.load(folder).params, expected)
    narrow = jaxspec.load(folder, dtype="bfloat16").params
    assert_same(narrow["head"], jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected["head"]))


@pytest.mark.parametrize("config", [LLAMA, T5, GPT])
def test_int8_of_a_folder_is_quantised_and_saved_as_its_values(config, tmp_path):
    """Quantised as it comes, and written as what it stands for, of which int8 is the same again."""
    model = model_of(config)
    huggingface.save(model, tmp_path / "it")
    narrow = jaxspec.load(tmp_path / "it", dtype="int8")
    assert narrow.config == config
    assert_same(narrow.params, quantisation.quantise(model.params))
    huggingface.save(
        narrow._replace(config=dataclasses.replace(config, dtype="bfloat16")), tmp_path / "again"
    )
    assert_same(jaxspec.load(tmp_path / "again").params, quantisation.dequantise(narrow.params))
    assert_same(jaxspec.load(tmp_path / "again", dtype="int8").params, narrow.params)


def test_int8_on_a_mesh(saved):
    """Entries and scales lie where the table has them."""
    placed, alone = (
        jaxspec.load(saved, dtype="int8", mesh=mesh).params for mesh in ("data=1,model=1", None)
    )
    expected = sharding.parameters(alone, axes_of(LLAMA), sharding.mesh("data=1,model=1"))
    assert [x.sharding for x in jax.tree.leaves(placed)] == jax.tree.leaves(expected)
    assert_same(placed, alone)


def test_written_files_may_be_read_as_others_are(folder):
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert len(modes) == 1


def test_hub_ids_go_through_huggingface_hub(saved, monkeypatch, tmp_path):
    downloads = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        downloads.append((name, revision, allow_patterns[-1], ignore_patterns))
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert jaxspec.load("someone/llama").name == "someone/llama"
    assert jaxspec.load("someone/llama", revision="v2").name == "someone/llama"
    assert downloads == [
        ("someone/llama", revision, "model*.safetensors", "*/*") for revision in (None, "v2")
    ]


def test_older_formats_are_asked_for_where_there_is_no_other(monkeypatch, tmp_path):
    patterns = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        patterns.append(allow_patterns[-1])
        if patterns[-1] == available:
            (tmp_path / available.replace("*", "")).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    available = ""
    with pytest.raises(
        CheckpointError, match="google/t5-v1_1-small has no weights on the Hugging Face hub"
    ):
        hub.download("google/t5-v1_1-small")
    assert patterns == ["model*.safetensors", "flax_model*.msgpack", "pytorch_model*.bin"]
    patterns, available = [], "flax_model*.msgpack"
    assert hub.download("google/t5-v1_1-small") == tmp_path
    assert patterns == ["model*.safetensors", "flax_model*.msgpack"]


@pytest.fixture
def cached(saved, tmp_path, monkeypatch):
    """The cache of huggingface_hub: a Llama in several files as main, another one as v2; links to
    blobs.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4000)
    root = tmp_path / "hub" / "models--someone--llama"
    (root / "refs").mkdir(parents=True)
    (root / "blobs").mkdir()
    models = {"main": jaxspec.load(saved), "v2": model_of(LLAMA, seed=1)}
    for digit, (revision, model) in enumerate(models.items()):
        commit = str(digit) * 40
        (root / "refs" / revision).write_text(commit)
        snapshot = huggingface.save(model, root / "snapshots" / commit)
        for file in snapshot.iterdir():
            blob = root / "blobs" / f"{digit}-{file.name}"
            file.rename(blob)
            file.symlink_to(Path("..", "..", "blobs", blob.name))
    return root, models


def test_the_cache_of_the_hub_offline(cached):
    """conftest.py sets HF_HUB_OFFLINE."""
    root, models = cached
    for revision, expected in (
        (None, models["main"]),
        ("v2", models["v2"]),
        ("1" * 40, models["v2"]),
    ):
        loaded = jaxspec.load("someone/llama", revision=revision)
        assert loaded.name == "someone/llama"
        assert_same(loaded.params, expected.params)
    assert jaxspec.load("someone/llama").tokenizer("the old dog")["input_ids"] == [3, 4, 5]
    with pytest.raises(CheckpointError, match=r"someone/llama cannot be had from the .* hub: "):
        jaxspec.load("someone/llama", revision="v3")
    gone, *_ = sorted((root / "snapshots" / ("0" * 40)).glob("model-*.safetensors"))
    gone.unlink()
    with pytest.raises(
        CheckpointError, match=rf"is incomplete: of .* 1 are not there \({gone.name}\)\. Finish the"
    ):
        jaxspec.load("someone/llama")


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    """conftest.py sets HF_HUB_OFFLINE."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint at nobody/nothing.*cannot be had from the .* hub: .*HF_TOKEN",
    ):
        jaxspec.load("nobody/nothing")


def test_nothing_is_overwritten_unasked(saved, tmp_path):
    model = model_of(LLAMA, seed=1)
    with pytest.raises(CheckpointError, match="exists: give overwrite"):
        huggingface.save(model, saved)
    (tmp_path / "notes").mkdir()
    with pytest.raises(
        CheckpointError, match=r"is not a Hugging Face model \(it has no config\.json\)"
    ):
        huggingface.save(model, tmp_path / "notes", overwrite=True)
    huggingface.save(model_of(LLAMA), tmp_path / "it")
    huggingface.save(model, tmp_path / "it", overwrite=True)
    assert_same(jaxspec.load(tmp_path / "it").params, model.params)


def test_interrupted_saving_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "write_weights", fail)
    with pytest.raises(KeyboardInterrupt):
        huggingface.save(model_of(LLAMA), tmp_path / "it")
    assert list(tmp_path.iterdir()) == []


def test_what_transformers_lacks_is_not_saved(tmp_path):
    model = model_of(nets.replace(LLAMA, positions="relative"))
    with pytest.raises(
        CheckpointError,
        match=r"it cannot be saved for transformers: no family writes a config\.json of this",
    ):
        huggingface.save(model, tmp_path / "relative")


def test_a_trimmed_vocabulary_is_not_saved(tmp_path):
    """As debian-t5-draft has it."""
    model = jaxspec.trim_vocabulary(model_of(LLAMA), ids=[3, 5])
    with pytest.raises(
        CheckpointError, match="its parameters lack 'embedding/embedding', as those of a"
    ):
        huggingface.save(model, tmp_path / "trimmed")
    with pytest.raises(
        CheckpointError, match="cannot be saved for transformers: its parameters lack"
    ):
        save_parallel(model, 7, tmp_path / "trimmed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", ["debian-t5-small", "debian-gpt-small"])
def test_the_shipped_models_can_be_exported(name, tmp_path):
    """transformers says what ours say."""
    import torch

    ours = jaxspec.load(name)
    folder = huggingface.save(ours, tmp_path / name)
    tokens = np.array([[5, 17, 33, 2, 1]])
    if isinstance(ours.config, T5Config):
        peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        prompt = jaxspec.Prompt(jnp.array(tokens), jnp.array([5]))
        logits = jax.jit(t5.T5(ours.config).apply)(
            {"params": ours.params}, prompt, jnp.array([[0, 7, 9]])
        )
        inputs = {"decoder_input_ids": torch.tensor([[0, 7, 9]])}
    else:
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits = jax.jit(decoder.DecoderNet(ours.config).apply)(
            {"params": ours.params}, jnp.array(tokens)
        )
        inputs = {}
    with torch.no_grad():
        theirs = peer(torch.tensor(tokens), **inputs).logits.numpy()
    assert np.abs(np.asarray(logits) - theirs).max() < 2e-5 * np.abs(theirs).max()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    text = "This package contains the documentation."
    assert words(text)["input_ids"] == ours.tokenizer(text)["input_ids"]


SIZES = {
    "hidden_size": 512,
    "vocab_size": 8000,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SIZES |= {
    "num_hidden_layers": 1,
    "intermediate_size": 2048,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
MIXTURE = SIZES | {
    "num_experts_per_tok": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "moe_intermediate_size": 2048,
}
GEMMA4 = SIZES | {"model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 64}
GEMMA4 |= {"vocab_size_per_layer_input": 8000}
NO_SIDE = {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2}
LARGE = {
    "llama": SIZES | {"num_hidden_layers": 6},
    "gemma4": GEMMA4
    | {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "intermediate_size": 1024},
    "gemma4, experts": MIXTURE | GEMMA4 | NO_SIDE,
    "qwen3_5": SIZES
    | {"model_type": "qwen3_5_text", "num_hidden_layers": 6, "linear_num_value_heads": 16},
    "qwen3_moe": MIXTURE,
    "mixtral": MIXTURE,
    "gpt_oss": MIXTURE,
}
MEMORY = """
import json, sys
from pathlib import Path
from jaxspec.weights import huggingface
import jax
jax.numpy.zeros(1).block_until_ready()
def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(name))
huggingface.read_config(Path(sys.argv[1]))
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
params, _ = huggingface.restore(sys.argv[1])
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", LARGE)
def test_loading_takes_little_more_memory_than_the_folder(kind, tmp_path, monkeypatch):
    """Of several files, in a process of its own."""
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 40_000_000)
    table = {"model_type": kind, **LARGE[kind]}
    huggingface.save(model_from(table), tmp_path / "folder")
    sizes = [file.stat().st_size for file in (tmp_path / "folder").glob("*.safetensors")]
    assert len(sizes) > 1 and sum(sizes) > 80e6
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "folder")]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert 0.85 * sum(sizes) <= grown < 1.2 * sum(sizes)
