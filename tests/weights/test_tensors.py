"""The formats of weights in Hugging Face folders, and files of them that are damaged or do harm."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import traceback
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
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import Model, nets
from jaxspec.nets import net_of
from jaxspec.nets.decoder import decoder_config
from jaxspec.weights import huggingface, tensors
from jaxspec.weights.hf_families import gemma
from jaxspec.weights.orbax import CheckpointError
from tests.weights.folders import GPT, T5, assert_same, model_of, replace_weights

RESIDENT_SHARD = 20 * 10**6


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_host_holds_a_tensor_at_a_time(saved, monkeypatch, dtype):
    """A tensor is let go of before the next but one is read."""
    alive, most = set(), [0]
    shards = tensors.shards

    def watched(shard, names):
        for name, x in shard.load(names):
            alive.add(name)
            weakref.finalize(x, alive.discard, name)
            most[0] = max(most[0], len(alive))
            yield name, x
            del x

    monkeypatch.setattr(
        tensors,
        "shards",
        lambda folder: [
            s._replace(load=lambda names, s=s: watched(s, names)) for s in shards(folder)
        ],
    )
    huggingface.restore(saved, dtype)
    assert most[0] == 2


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A Llama of 160 MB in files of 20 MB."""
    config = decoder_config(1024, dim=512, ff_dim=1024, layers=15, heads=8, kv_heads=8, head_dim=64)
    shapes = jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)
    folder = tmp_path_factory.mktemp("large") / "llama"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "SHARD_BYTES", RESIDENT_SHARD)
        return huggingface.save(
            Model(net_of(config).language_model(config), params, None, config, "large"), folder
        )


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux says how much was resident"
)
@pytest.mark.parametrize(
    ("form", "most"),
    # a few tensors, no whole file; a file, all of it mapped, and a few tensors
    [("safetensors", 1.0), ("bin", 1.5)],
)
def test_how_much_the_host_holds_besides_the_parameters(large, form, most, tmp_path):
    """By what the system says was resident; reading everything first, as a control, takes as much
    again.
    """
    folder = large
    if form == "bin":
        import torch

        folder = tmp_path / "bin"
        folder.mkdir()
        shutil.copy(large / "config.json", folder)
        index = json.loads((large / "model.safetensors.index.json").read_text())
        names = {file: file.replace("safetensors", "bin") for file in index["weight_map"].values()}
        for file, name in names.items():
            torch.save(
                {key: torch.tensor(x) for key, x in load_file(large / file).items()}, folder / name
            )
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
    resident = json.loads(said.stdout)
    assert resident["parameters"] > 7 * RESIDENT_SHARD
    assert resident["loaded"] < resident["parameters"] + most * RESIDENT_SHARD
    assert resident["control"] > resident["parameters"] + 4 * RESIDENT_SHARD


def flax_tree(weights: dict) -> dict:
    """Tensors as transformers' Flax models named and stored them.

    The kernels of GPT-2's FlaxConv1D are [out, in], so that, as elsewhere, PyTorch's tensor is the
    transpose.
    """
    embeddings, norms = (
        ("shared", "relative_attention_bias", "wte", "wpe"),
        ("ln_1", "ln_2", "ln_f"),
    )
    flat = {}
    for name, x in weights.items():
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
        weight_map = {
            name: f"flax_model-0000{1 + i % 2}-of-00002.msgpack" for i, name in enumerate(flat)
        }
        for file in set(weight_map.values()):
            part = {name: x for name, x in flat.items() if weight_map[name] == file}
            content = flax.serialization.to_bytes(flax.traverse_util.unflatten_dict(part, sep="/"))
            (folder / file).write_bytes(content)
        (folder / "flax_model.msgpack.index.json").write_text(
            json.dumps({"weight_map": weight_map})
        )
    else:
        (folder / "flax_model.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    assert_same(jaxspec.load(folder).params, expected)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("style", ["zip", "legacy", "several", "bfloat16"])
def test_a_pytorch_bin_folder_is_read(t5_folder, style):
    """With the copies of the embedding that such files hold."""
    import torch

    folder, params = t5_folder
    state = {name: torch.tensor(x) for name, x in replace_weights(folder).items()}
    state["encoder.embed_tokens.weight"] = state["decoder.embed_tokens.weight"] = state[
        "shared.weight"
    ]
    if style == "several":
        names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
        for i, name in enumerate(names):
            torch.save(
                {key: x for j, (key, x) in enumerate(state.items()) if j % 2 == i}, folder / name
            )
        weight_map = {key: names[j % 2] for j, key in enumerate(state)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        if style == "bfloat16":
            state = {name: x.bfloat16() for name, x in state.items()}
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
        torch.save(
            state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=style != "legacy"
        )
    assert_same(jaxspec.load(folder).params, params)


def test_pytorch_bin_without_pytorch(t5_folder, monkeypatch):
    folder, _ = t5_folder
    replace_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        CheckpointError,
        match=r"pytorch_model\.bin can only be read with PyTorch.*pip install torch",
    ):
        jaxspec.load(folder)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.13.1", "2.5.1+cu124", "2.6.0", "2.10.0"])
def test_a_pytorch_that_may_run_a_pickle_is_not_used(t5_folder, monkeypatch, version):
    import torch

    folder, _ = t5_folder
    replace_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    refused = r"not read with PyTorch [12]\..* \(CVE-2025-32434\): expected 2\.6 or newer\. pip install -U torch"
    message = (
        refused if version in ("1.13.1", "2.5.1+cu124") else "is not a file of weights, or damaged"
    )
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(folder)


class Malicious:
    """A pickle that runs a command when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a call", "a call beside tensors", "a function", "a zip bomb"])
def test_a_malicious_file_runs_nothing(t5_folder, tmp_path, kind):
    import torch

    folder, _ = t5_folder
    replace_weights(folder)
    evil, path = Malicious(tmp_path / "was here"), folder / "pytorch_model.bin"
    if kind == "a call beside tensors":
        torch.save({"shared.weight": torch.ones(2), "more": evil}, path)
    elif kind == "a zip bomb":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(200_000_000))
    else:
        path.write_bytes(
            pickle.dumps(evil if kind == "a call" else {"shared.weight": os.mkdir}, protocol=2)
        )
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin .* is not a file of weights, or damaged"
    ) as caught:
        jaxspec.load(folder)
    assert not (tmp_path / "was here").exists()
    shown = "".join(traceback.format_exception(caught.value))
    assert "Re-running" not in shown  # with what PyTorch advises: without its checks


@pytest.mark.parametrize("end", [0, 7, 500, -1])
def test_a_truncated_file(folder, end):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors \(\d+ bytes\) is not a file of weights, or damaged: ",
    ):
        jaxspec.load(folder)


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 7, 500, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pytorch_bin(t5_folder, end, zipped):
    import torch

    folder, _ = t5_folder
    state = {name: torch.tensor(x) for name, x in replace_weights(folder).items()}
    path = folder / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(
        CheckpointError,
        match=r"pytorch_model\.bin \(\d+ bytes\) is not a file of weights, or damaged: ",
    ):
        jaxspec.load(folder)


@pytest.mark.parametrize(
    "content",
    [b"", b"no msgpack at all", flax.serialization.msgpack_serialize({"a": np.ones(3)})[:-2]],
)
def test_a_damaged_msgpack(folder, content):
    replace_weights(folder)
    (folder / "flax_model.msgpack").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"flax_model\.msgpack .* is not a file of weights, or damaged"
    ):
        jaxspec.load(folder)


def test_an_unfinished_download(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    weight_map = {str(i): f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError,
        match=r"of the 3 files .* 2 are not there \(model-00002-of.*Finish the download",
    ):
        jaxspec.load(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(
        CheckpointError,
        match=r"names '\.\./elsewhere\.safetensors': expected files of the same folder",
    ):
        jaxspec.load(folder)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        jaxspec.load(folder)
    index.unlink()
    with pytest.raises(
        CheckpointError, match=r"has no weights: expected model\.safetensors, flax_model\.msgpack"
    ):
        jaxspec.load(folder)


def write_parts(folder, form, parts, weight_map):
    """Writes files of tensors in one of the formats, and their index; the tensors are named as
    PyTorch names them.
    """
    base = {
        "safetensors": "model.safetensors",
        "bin": "pytorch_model.bin",
        "msgpack": "flax_model.msgpack",
    }[form]
    for file, part in parts.items():
        if form == "safetensors":
            save_file(part, folder / file)
        elif form == "bin":
            import torch

            torch.save({name: torch.tensor(x) for name, x in part.items()}, folder / file)
        else:
            (folder / file).write_bytes(flax.serialization.to_bytes(flax_tree(part)))
    if form == "msgpack":
        names = {
            name: next(
                iter(flax.traverse_util.flatten_dict(flax_tree({name: np.zeros((1, 1))}), sep="/"))
            )
            for name in weight_map
        }
        weight_map = {names[name]: file for name, file in weight_map.items()}
    (folder / f"{base}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    "form", ["safetensors", "msgpack", pytest.param("bin", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("stale", ["first", "second"])
def test_the_index_decides_where_two_files_hold_one_tensor(t5_folder, form, stale):
    """As in a folder whose overlay file replaces a tensor of an older one, whichever name comes
    first.
    """
    folder, params = t5_folder
    weights = replace_weights(folder)
    name = "decoder.block.1.layer.0.SelfAttention.q.weight"
    old, new = (f"{part}.{form}" for part in (("a", "b") if stale == "first" else ("b", "a")))
    parts = {old: weights | {name: weights[name] + 1}, new: {name: weights[name]}}
    weight_map = dict.fromkeys(weights, old) | {name: new}
    write_parts(folder, form, parts, weight_map)
    assert_same(jaxspec.load(folder).params, params)
    write_parts(
        folder,
        form,
        parts,
        {key: file for key, file in weight_map.items() if key != name} | {"other": new},
    )
    with pytest.raises(
        CheckpointError,
        match=rf"a.{form} and b.{form} both hold {name}, and .*index.json does not list",
    ):
        jaxspec.load(folder)
    parts[new] = {"shared.weight": weights["shared.weight"]}
    write_parts(folder, form, parts, weight_map)
    with pytest.raises(
        CheckpointError, match=rf"lists {name} as a tensor of {new}, and only {old} holds it"
    ):
        jaxspec.load(folder)


def test_weights_of_another_model_are_listed(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        jaxspec.load(folder)
    message = str(caught.value)
    assert "the weights are not those of the Llama of its config.json" in message
    assert "missing (1): model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected (1): model.layers.0.self_attn.q_proj.bias" in message


def test_weights_of_another_shape_are_listed(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = np.ones(17, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"wrong \(1\): model.norm.weight is \[17\], expected \[16\]"
    ):
        jaxspec.load(folder)


def test_quantised_tensors_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"model\.norm\.weight is int8, so it is quantised.*: expected one of float32, bf",
    ):
        jaxspec.load(folder)


def test_first_gpt2_files_have_other_names_and_more_tensors(tmp_path):
    model = model_of(GPT)
    folder = huggingface.save(model, tmp_path / "gpt2")
    weights = {
        name.removeprefix("transformer."): x
        for name, x in load_file(folder / "model.safetensors").items()
    }
    weights["h.0.attn.bias"] = np.ones((1, 1, 16, 16), np.float32)
    save_file(weights, folder / "model.safetensors")
    assert_same(jaxspec.load(folder).params, model.params)


def test_the_text_half_of_a_model_that_also_sees(tmp_path):
    shape = {
        "dim": 16,
        "ff_dim": 24,
        "layers": 6,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "vocab_size": 24,
    }
    model = model_of(nets.replace(gemma.SIZES_3["gemma-3-4b"], **shape))
    folder = huggingface.save(model, tmp_path / "gemma")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    weights = {
        f"language_model.{name}": x for name, x in load_file(folder / "model.safetensors").items()
    }
    weights["vision_tower.vision_model.post_layernorm.bias"] = np.ones(3, np.float32)
    save_file(weights, folder / "model.safetensors")
    loaded = jaxspec.load(folder)
    assert loaded.config == model.config
    assert_same(loaded.params, model.params)
