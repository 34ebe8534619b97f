"""Hugging Face folders: every format they come in, what is wrong with some, and folders of our own making."""

import dataclasses
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import traceback
import types
import weakref
import zipfile
from pathlib import Path

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import sentencepiece
import transformers
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import jaxspec
from jaxspec import Model, sharding
from jaxspec.core import token_ids
from jaxspec.nets import gpt, net_of, t5
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import huggingface, int8, tensors
from jaxspec.weights.hf_families import gemma, lamda
from jaxspec.weights.orbax import CheckpointError

LLAMA = DecoderConfig(24, dim=16, ff_dim=24, layers=2, heads=4, kv_heads=2, head_dim=4, epsilon=1e-5, max_positions=32)
T5 = T5Config(24, dim=16, ff_dim=24, heads=2, head_dim=4, encoder_layers=1, decoder_layers=2)
GPT = GPTConfig(24, dim=16, ff_dim=24, layers=2, heads=2, max_positions=16)
RESIDENT_SHARD = 20 * 10**6
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"


def tokenizer():
    words = ["<pad>", "</s>", "<unk>", "the", "old", "dog"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE, **special)


def model_of(config, seed=0, words=None) -> Model:
    net = net_of(config)
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.array(rng.standard_normal(x.shape, np.float32)), shapes)
    return Model(net.language_model(config), params, words, config, "it")


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a Llama and its tokenizer."""
    return huggingface.save(model_of(LLAMA, words=tokenizer()), tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


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
    """What one file would be is written as several, with an index, and read as one."""
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 4000)
    model = jaxspec.load(folder)
    huggingface.save(model, tmp_path / "several")
    files = sorted(file.name for file in (tmp_path / "several").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 3
    largest = max(x.nbytes for x in load_file(folder / "model.safetensors").values())
    assert max(file.stat().st_size for file in (tmp_path / "several").glob("*.safetensors")) < max(4000, largest) + 2000
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
    """As Llama 2's files are."""
    found = {name: x.astype(np.float16) for name, x in load_file(folder / "model.safetensors").items()}
    before = jaxspec.load(folder).params
    save_file(found, folder / "model.safetensors")
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
    assert_same(narrow.params, int8.quantise(model.params))
    huggingface.save(narrow, tmp_path / "again")
    assert_same(jaxspec.load(tmp_path / "again").params, int8.dequantise(narrow.params))
    assert_same(jaxspec.load(tmp_path / "again", dtype="int8").params, narrow.params)


def test_int8_on_a_mesh(saved):
    """Entries and scales lie where the table has them."""
    placed, alone = (jaxspec.load(saved, dtype="int8", mesh=mesh).params for mesh in ("data=1,model=1", None))
    expected = sharding.parameters(alone, LLAMA, sharding.mesh("data=1,model=1"))
    assert [x.sharding for x in jax.tree.leaves(placed)] == jax.tree.leaves(expected)
    assert_same(placed, alone)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_host_holds_a_tensor_at_a_time(saved, monkeypatch, dtype):
    """A tensor is let go of before the next but one is read."""
    alive, most = set(), [0]
    shards = tensors.shards

    def watched(shard):
        for name, x in shard.read():
            alive.add(name)
            weakref.finalize(x, alive.discard, name)
            most[0] = max(most[0], len(alive))
            yield name, x
            del x

    monkeypatch.setattr(
        tensors, "shards", lambda folder: [s._replace(read=lambda s=s: watched(s)) for s in shards(folder)]
    )
    huggingface.restore(saved, dtype)
    assert most[0] == 2


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A Llama of 160 MB in files of 20 MB."""
    config = DecoderConfig(1024, dim=512, ff_dim=1024, layers=15, heads=8, kv_heads=8, head_dim=64)
    shapes = jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    folder = tmp_path_factory.mktemp("large") / "llama"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "SHARD_BYTES", RESIDENT_SHARD)
        return huggingface.save(Model(net_of(config).language_model(config), params, None, config, "large"), folder)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says how much was resident")
@pytest.mark.parametrize(
    ("form", "most"),
    [("safetensors", 1.0), ("bin", 1.5)],  # a few tensors, no whole file; a file, all of it mapped, and a few tensors
)
def test_how_much_the_host_holds_besides_the_parameters(large, form, most, tmp_path):
    """By what the system says was resident; reading everything first, as a control, takes as much again."""
    folder = large
    if form == "bin":
        torch = pytest.importorskip("torch")
        folder = tmp_path / "bin"
        folder.mkdir()
        shutil.copy(large / "config.json", folder)
        index = json.loads((large / "model.safetensors.index.json").read_text())
        names = {file: file.replace("safetensors", "bin") for file in index["weight_map"].values()}
        for file, name in names.items():
            torch.save({key: torch.tensor(x) for key, x in load_file(large / file).items()}, folder / name)
        index["weight_map"] = {key: names[file] for key, file in index["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    said = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "scripts" / "host_memory.py", folder],
        # glibc would keep what is freed for later, more or less of it from run to run.
        env=os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "500000"},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["parameters"] > 7 * RESIDENT_SHARD
    assert found["loaded"] < found["parameters"] + most * RESIDENT_SHARD
    assert found["control"] > found["parameters"] + 4 * RESIDENT_SHARD


def flax_tree(found: dict) -> dict:
    """Tensors as transformers' Flax models named and stored them.

    The kernels of GPT-2's FlaxConv1D are [out, in], so that, as elsewhere, PyTorch's tensor is the transpose.
    """
    embeddings, norms = ("shared", "relative_attention_bias", "wte", "wpe"), ("ln_1", "ln_2", "ln_f")
    flat = {}
    for name, x in found.items():
        stem, _, last = name.rpartition(".")
        if last == "bias" or stem.endswith("layer_norm"):
            flat[name] = x
        elif stem.endswith(embeddings):
            flat[f"{stem}.embedding"] = x
        elif stem.endswith(norms):
            flat[f"{stem}.scale"] = x
        else:
            flat[f"{stem}.kernel"] = x.T
    return flax.traverse_util.unflatten_dict(flat, sep=".")


@pytest.fixture
def t5_folder(tmp_path):
    """A T5 as safetensors, and its parameters; tests make another format of it."""
    model = model_of(T5)
    return huggingface.save(model, tmp_path / "t5"), model.params


def replace_weights(folder: Path) -> dict[str, np.ndarray]:
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return found


@pytest.mark.parametrize("config", [T5, GPT])
@pytest.mark.parametrize("style", ["one", "several", "bfloat16"])
def test_a_flax_msgpack_folder_is_read(tmp_path, config, style):
    model = model_of(config)
    folder, expected = huggingface.save(model, tmp_path / "it"), model.params
    tree = flax_tree(replace_weights(folder))
    if style == "bfloat16":
        tree = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), tree)
        expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), expected)
    if style == "several":
        flat = flax.traverse_util.flatten_dict(tree, sep="/")
        weight_map = {name: f"flax_model-0000{1 + i % 2}-of-00002.msgpack" for i, name in enumerate(flat)}
        for file in set(weight_map.values()):
            part = {name: x for name, x in flat.items() if weight_map[name] == file}
            content = flax.serialization.to_bytes(flax.traverse_util.unflatten_dict(part, sep="/"))
            (folder / file).write_bytes(content)
        (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    assert_same(jaxspec.load(folder).params, expected)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["zip", "legacy", "several", "bfloat16"])
def test_a_pytorch_bin_folder_is_read(t5_folder, style):
    """With the copies of the embedding that such files hold."""
    torch = pytest.importorskip("torch")
    folder, params = t5_folder
    state = {name: torch.tensor(x) for name, x in replace_weights(folder).items()}
    state["encoder.embed_tokens.weight"] = state["decoder.embed_tokens.weight"] = state["shared.weight"]
    if style == "several":
        names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
        for i, name in enumerate(names):
            torch.save({key: x for j, (key, x) in enumerate(state.items()) if j % 2 == i}, folder / name)
        weight_map = {key: names[j % 2] for j, key in enumerate(state)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        if style == "bfloat16":
            state = {name: x.bfloat16() for name, x in state.items()}
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=style != "legacy")
    assert_same(jaxspec.load(folder).params, params)


def test_pytorch_bin_without_pytorch(t5_folder, monkeypatch):
    folder, _ = t5_folder
    replace_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin can only be read with PyTorch.*pip install torch"):
        jaxspec.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124", "2.6.0", "2.10.0"])
def test_a_pytorch_that_may_run_a_pickle_is_not_used(t5_folder, monkeypatch, version):
    torch = pytest.importorskip("torch")
    folder, _ = t5_folder
    replace_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    refused = r"not read with PyTorch [12]\..* \(CVE-2025-32434\): expected 2\.6 or newer\. pip install -U torch"
    message = refused if version in ("1.13.1", "2.5.1+cu124") else "is no file of weights, or damaged"
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(folder)


class Malicious:
    """A pickle that runs a command when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a call", "a call beside tensors", "a function", "a zip bomb"])
def test_a_malicious_file_runs_nothing(t5_folder, tmp_path, kind):
    torch = pytest.importorskip("torch")
    folder, _ = t5_folder
    replace_weights(folder)
    evil, path = Malicious(tmp_path / "was here"), folder / "pytorch_model.bin"
    if kind == "a call beside tensors":
        torch.save({"shared.weight": torch.ones(2), "more": evil}, path)
    elif kind == "a zip bomb":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(200_000_000))
    else:
        path.write_bytes(pickle.dumps(evil if kind == "a call" else {"shared.weight": os.mkdir}, protocol=2))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin .* is no file of weights, or damaged") as found:
        jaxspec.load(folder)
    assert not (tmp_path / "was here").exists()
    shown = "".join(traceback.format_exception(found.value))
    assert "Re-running" not in shown  # with what PyTorch advises: without its checks


@pytest.mark.parametrize("end", [0, 7, 500, -1])
def test_a_truncated_file(folder, end):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(CheckpointError, match=r"model\.safetensors \(\d+ bytes\) is no file of weights, or damaged: "):
        jaxspec.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 7, 500, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pytorch_bin(t5_folder, end, zipped):
    torch = pytest.importorskip("torch")
    folder, _ = t5_folder
    state = {name: torch.tensor(x) for name, x in replace_weights(folder).items()}
    path = folder / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin \(\d+ bytes\) is no file of weights, or damaged: "):
        jaxspec.load(folder)


@pytest.mark.parametrize(
    "content", [b"", b"no msgpack at all", flax.serialization.msgpack_serialize({"a": np.ones(3)})[:-2]]
)
def test_a_damaged_msgpack(folder, content):
    replace_weights(folder)
    (folder / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"flax_model\.msgpack .* is no file of weights, or damaged"):
        jaxspec.load(folder)


def test_an_unfinished_download(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    weight_map = {str(i): f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError, match=r"of the 3 files .* 2 are not there \(model-00002-of.*Finish the download"
    ):
        jaxspec.load(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"names '\.\./elsewhere\.safetensors': expected files of the same folder"
    ):
        jaxspec.load(folder)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="is no index of weights"):
        jaxspec.load(folder)
    index.unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: expected model\.safetensors, flax_model\.msgpack"):
        jaxspec.load(folder)


def test_weights_of_another_model_are_listed(folder):
    found = load_file(folder / "model.safetensors")
    del found["model.layers.1.mlp.up_proj.weight"]
    found["model.layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        jaxspec.load(folder)
    message = str(caught.value)
    assert "the weights are not those of the Llama of its config.json" in message
    assert "missing (1): model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected (1): model.layers.0.self_attn.q_proj.bias" in message


def test_weights_of_another_shape_are_listed(folder):
    found = load_file(folder / "model.safetensors")
    found["model.norm.weight"] = np.ones(17, np.float32)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"wrong \(1\): model.norm.weight is \[17\], expected \[16\]"):
        jaxspec.load(folder)


def test_quantised_tensors_are_refused(folder):
    found = load_file(folder / "model.safetensors")
    found["model.norm.weight"] = found["model.norm.weight"].astype(np.int8)
    save_file(found, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is int8, expected one of float32, bfloat16"):
        jaxspec.load(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json describes no model that can be loaded"),
        ("[]", "it is of type list, expected an object"),
        ("[" * 100_000, "describes no model that can be loaded: ValueError: it is nested too deeply"),
        ("{}", "model_type is None, expected one of t5"),
        ('{"model_type": "llama"}', "it lacks 'hidden_size'"),
        ('{"model_type": "llama", "hidden_size": "x", "num_attention_heads": 2}', "describes no model"),
    ],
)
def test_a_config_that_cannot_be_used(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(folder)


WRONG = [  # of a Llama's config.json: what is changed, and what is said of it
    ({"num_attention_heads": 0}, "num_attention_heads is 0: expected a positive integer"),
    ({"num_key_value_heads": 3}, "heads"),
    ({"hidden_size": "16"}, "hidden_size is '16': expected a positive integer"),
    ({"hidden_size": -16}, "hidden_size is -16: expected a positive integer"),
    ({"hidden_size": 16.5}, "hidden_size is 16.5: expected a positive integer"),
    ({"vocab_size": True}, "vocab_size is True: expected a positive integer"),
    ({"intermediate_size": 2**62}, "intermediate_size is 4611686018427387904: expected a positive integer"),
    ({"intermediate_size": 2**30}, "wrong"),
    ({"vocab_size": []}, r"vocab_size is \[\]: expected a positive integer"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny': expected a positive number"),
    ({"rope_theta": float("nan")}, "rope_theta is nan: expected a positive number"),
    ({"rope_scaling": "linear"}, "rope_scaling is of type str: expected an object"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1: expected a positive number"),
    ({"head_dim": 10**9}, "head_dim is 1000000000: expected at most 65,536"),
    ({"relative_attention_max_distance": 10**9}, "relative_attention_max_distance is 1000000000: expected at most"),
    ({"head_dim": 3}, "self_attn.q_proj.weight is .*, expected|describes no"),
    ({"hidden_act": ["silu"]}, "describes no model that can be loaded: TypeError"),
    ({"num_hidden_layers": 5000}, "says 5000 layers, but there are only 21 tensors"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected at most 10,000"),
    ({"num_hidden_layers": 10**6, "model_type": "gemma2"}, "expected at most 10,000"),
    ({"num_hidden_layers": 10**6, "model_type": "qwen2", "use_sliding_window": True}, "expected at most 10,000"),
    ({"num_hidden_layers": 3}, r"missing \(9\): model.layers.2"),
    ({"model_type": "gpt2"}, "it lacks 'n_embd'"),
    ({"model_type": {}}, r"model_type is \{\}"),
    ({"model_type": "t5"}, "it lacks 'num_layers'"),
    ({"text_config": 3, "model_type": "gemma3"}, "text_config is of type int: expected an object"),
    ({"layer_types": 7, "model_type": "gemma2"}, "describes no model"),
]


def test_wrong_values_in_a_config(folder):
    """Each is told before any weights are read; none takes long, or fails in another way."""
    right = json.loads((folder / "config.json").read_text())
    for change, message in WRONG:
        (folder / "config.json").write_text(json.dumps(right | change))
        with pytest.raises(CheckpointError, match=message):
            jaxspec.load(folder)


def test_written_files_may_be_read_as_others_are(folder):
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert len(modes) == 1


def test_first_gpt2_files_have_other_names_and_more_tensors(tmp_path):
    model = model_of(GPT)
    folder = huggingface.save(model, tmp_path / "gpt2")
    found = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    found["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    save_file(found, folder / "model.safetensors")
    assert_same(jaxspec.load(folder).params, model.params)


def test_the_text_half_of_a_model_that_also_sees(tmp_path):
    shape = {"dim": 16, "ff_dim": 24, "layers": 6, "heads": 2, "kv_heads": 1, "head_dim": 4, "vocab_size": 24}
    model = model_of(dataclasses.replace(gemma.SIZES_3["gemma-3-4b"], **shape))
    folder = huggingface.save(model, tmp_path / "gemma")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    found = {f"language_model.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    found["vision_tower.vision_model.post_layernorm.bias"] = np.ones(3, np.float32)
    save_file(found, folder / "model.safetensors")
    loaded = jaxspec.load(folder)
    assert loaded.config == model.config
    assert_same(loaded.params, model.params)


def test_tokenizer_and_chat_template(folder):
    found = jaxspec.load(folder).tokenizer
    assert found("the old dog")["input_ids"] == [3, 4, 5]
    assert found.eos_token_id == 1
    assert found.apply_chat_template([{"role": "user", "content": "the dog"}], tokenize=False) == "user: the dog</s>"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1


def test_a_tokenizer_that_is_a_sentencepiece_model(tmp_path):
    """As in the repositories of T5 v1.1, which hold no tokenizer.json."""
    texts = ["the old dog saw a new cat", "a cat saw the new dog", "an old cat, a new dog", "the cat and the dog"]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 50),
        model_writer=made,
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "spiece.model").write_bytes(made.getvalue())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 0}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    pieces = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    found = huggingface.tokenizer(tmp_path)
    for text in texts:
        assert found(text)["input_ids"] == [*pieces.encode(text), 1]
        assert found.decode(pieces.encode(text)) == text


PLACES = {  # from an id to what config.json, and generation_config.json if there is one, say
    "a number": lambda end: ({}, {"eos_token_id": end}),
    "a list": lambda end: ({}, {"eos_token_id": [99, -1, end]}),
    "a number in config.json": lambda end: ({"eos_token_id": end}, None),
    "a list in config.json": lambda end: ({"eos_token_id": [end, 99]}, None),
    "another one in config.json": lambda end: ({"eos_token_id": 1}, {"eos_token_id": end}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("config", "words"), [(LLAMA, tokenizer()), (GPT, None), (T5, tokenizer())])
def test_texts_end_where_the_files_say(tmp_path, config, words, place):
    """Whether the tokenizer has another end or there is none; ids that the model lacks are no reason to refuse it."""
    folder = huggingface.save(model_of(config, words=words), tmp_path / "it")
    prompt = jaxspec.Prompt(jnp.array([[3, 4]]), jnp.array([2]))
    plain = jaxspec.generate(jaxspec.load(folder), prompt, eos_ids=(), max_new_tokens=6).tokens[0].tolist()
    end = plain[2]
    changed, generation = PLACES[place](end)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | changed))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    out = jaxspec.generate(jaxspec.load(folder), prompt, max_new_tokens=6)
    assert out.tokens[0].tolist() == plain[: plain.index(end) + 1]


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [2, 3]}, {"temperature": 0.7}, ()),
        ({"eos_token_id": 2}, {"eos_token_id": None}, ()),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 5}}, None, (5,)),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": 5}}, None, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_which_file_says_where_texts_end_is_as_in_transformers(folder, config, generation, ends):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert huggingface.read_config(folder)[1].end_tokens == ends
    source = "config.json" if generation is None else "generation_config.json"
    theirs = transformers.GenerationConfig.from_pretrained(folder, source, _from_model_config=generation is None)
    assert theirs.eos_token_id in (list(ends), *(ends or [None]))


def test_a_model_without_the_tokens_that_should_end_its_texts_goes_on(folder, caplog):
    (folder / "generation_config.json").write_text('{"eos_token_id": 99}')
    model = jaxspec.load(folder)
    assert caplog.messages == [
        f"{folder}: eos_token_id is [99], and the model has ids from 0 to 23: texts go on to max_new_tokens"
    ]
    assert token_ids.ends(model) == []
    unnamed = model._replace(config=dataclasses.replace(model.config, end_tokens=()))
    for end, ends in ((5, [5]), (99, []), (None, [])):
        assert token_ids.ends(unnamed._replace(tokenizer=types.SimpleNamespace(eos_token_id=end))) == ends


def test_what_generation_config_json_asks_for_and_is_not_done_is_said(folder, caplog):
    table = {"repetition_penalty": 1.1, "num_beams": 1, "forced_bos_token_id": 3, "min_length": 0, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(table))
    huggingface.read_config(folder)
    (said,) = caplog.messages
    assert "generation_config.json asks for repetition_penalty=1.1, forced_bos_token_id=3, which" in said


@pytest.mark.parametrize(
    ("config", "generation", "start"),
    [
        ({"decoder_start_token_id": 0}, {"decoder_start_token_id": 5}, 5),
        ({"decoder_start_token_id": 7}, None, 7),
        ({"decoder_start_token_id": None, "bos_token_id": 4}, None, 4),
        ({"decoder_start_token_id": 7}, {"bos_token_id": 4}, 4),
        ({"decoder_start_token_id": 7}, {"eos_token_id": 1}, 7),  # transformers' generate has none, and refuses
        ({"decoder_start_token_id": None, "pad_token_id": 6}, None, 6),  # the same
    ],
)
def test_a_decoder_starts_with_the_token_that_transformers_takes(tmp_path, config, generation, start):
    folder = huggingface.save(model_of(T5), tmp_path / "t5")
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert jaxspec.load(folder).lm.start_token == start


def test_a_saved_t5_with_end_tokens_starts_and_ends_alike_in_transformers(tmp_path):
    config = dataclasses.replace(T5, start_token=3, end_tokens=(5, 7))
    theirs = transformers.GenerationConfig.from_pretrained(huggingface.save(model_of(config), tmp_path / "t5"))
    assert (theirs.decoder_start_token_id, theirs.eos_token_id) == (3, [5, 7])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "cannot be used: it is of type list, expected an object"),
        ("{", "cannot be used: "),
        ('{"eos_token_id": [1, "</s>"]}', "eos_token_id has '</s>': expected an id, or a list of ids"),
        ('{"eos_token_id": true}', "eos_token_id has True: expected an id, or a list of ids"),
        ('{"decoder_start_token_id": 24}', "decoder_start_token_id is 24: expected an id from 0 to 23"),
        ('{"decoder_start_token_id": [0]}', r"decoder_start_token_id is \[0\]: expected an id from 0 to 23"),
    ],
)
def test_a_generation_config_that_cannot_be_used(folder, content, message):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json:? {message}"):
        huggingface.restore(folder)


def test_a_tokenizer_that_brings_code_is_refused(folder, tmp_path):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'was here')!r})\n")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be loaded"):
        jaxspec.load(folder)
    assert not (tmp_path / "was here").exists()


def test_hub_ids_go_through_huggingface_hub(saved, monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        asked.append((name, revision, allow_patterns[-1], ignore_patterns))
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    assert jaxspec.load("someone/llama").name == "someone/llama"
    assert jaxspec.load("someone/llama", revision="v2").name == "someone/llama"
    assert asked == [("someone/llama", revision, "model*.safetensors", "*/*") for revision in (None, "v2")]


def test_older_formats_are_asked_for_where_there_is_no_other(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, revision, allow_patterns, ignore_patterns):
        asked.append(allow_patterns[-1])
        if asked[-1] == there:
            (tmp_path / there.replace("*", "")).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    there = ""
    with pytest.raises(CheckpointError, match="google/t5-v1_1-small has no weights on the Hugging Face hub"):
        huggingface.download("google/t5-v1_1-small")
    assert asked == ["model*.safetensors", "flax_model*.msgpack", "pytorch_model*.bin"]
    asked, there = [], "flax_model*.msgpack"
    assert huggingface.download("google/t5-v1_1-small") == tmp_path
    assert asked == ["model*.safetensors", "flax_model*.msgpack"]


@pytest.fixture
def cached(saved, tmp_path, monkeypatch):
    """The cache of huggingface_hub: a Llama in several files as main, another one as v2; links to blobs."""
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
    for revision, expected in ((None, models["main"]), ("v2", models["v2"]), ("1" * 40, models["v2"])):
        found = jaxspec.load("someone/llama", revision=revision)
        assert found.name == "someone/llama"
        assert_same(found.params, expected.params)
    assert jaxspec.load("someone/llama").tokenizer("the old dog")["input_ids"] == [3, 4, 5]
    with pytest.raises(CheckpointError, match=r"someone/llama cannot be had from the .* hub: "):
        jaxspec.load("someone/llama", revision="v3")
    gone, *_ = sorted((root / "snapshots" / ("0" * 40)).glob("model-*.safetensors"))
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"is incomplete: of .* 1 are not there \({gone.name}\)\. Finish the"):
        jaxspec.load("someone/llama")


def test_a_hub_that_cannot_be_reached(monkeypatch, tmp_path):
    """conftest.py sets HF_HUB_OFFLINE."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint at nobody/nothing.*cannot be had from the .* hub: .*HF_TOKEN"
    ):
        jaxspec.load("nobody/nothing")


def test_nothing_is_overwritten_unasked(saved, tmp_path):
    model = model_of(LLAMA, seed=1)
    with pytest.raises(CheckpointError, match="exists: pass overwrite=True"):
        huggingface.save(model, saved)
    (tmp_path / "notes").mkdir()
    with pytest.raises(CheckpointError, match=r"is no Hugging Face model \(it has no config\.json\)"):
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
    shape = {"dim": 16, "ff_dim": 24, "layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 4, "vocab_size": 24}
    model = model_of(dataclasses.replace(lamda.SIZES["lamda-100m"], **shape))
    with pytest.raises(CheckpointError, match="it cannot be saved for transformers: transformers has no model of this"):
        huggingface.save(model, tmp_path / "lamda")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debian-t5-small", "debian-gpt-small"])
def test_the_shipped_models_can_be_exported(name, tmp_path):
    """transformers says what ours say."""
    torch = pytest.importorskip("torch")
    ours = jaxspec.load(name)
    folder = huggingface.save(ours, tmp_path / name)
    tokens = np.array([[5, 17, 33, 2, 1]])
    if isinstance(ours.config, T5Config):
        peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        prompt = jaxspec.Prompt(jnp.array(tokens), jnp.array([5]))
        logits = jax.jit(t5.T5(ours.config).apply)({"params": ours.params}, prompt, jnp.array([[0, 7, 9]]))
        given = {"decoder_input_ids": torch.tensor([[0, 7, 9]])}
    else:
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        logits = jax.jit(gpt.GPT(ours.config).apply)({"params": ours.params}, jnp.array(tokens))
        given = {}
    with torch.no_grad():
        theirs = peer(torch.tensor(tokens), **given).logits.numpy()
    assert np.abs(np.asarray(logits) - theirs).max() < 2e-5 * np.abs(theirs).max()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    text = "This package contains the documentation."
    assert words(text)["input_ids"] == ours.tokenizer(text)["input_ids"]
