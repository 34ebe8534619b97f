"""Checkpoints with int8 matrices as compressed-tensors packs them (W8A16), written here by hand."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.nets import decoder
from jaxspec.weights import compressed_tensors, huggingface, int8
from jaxspec.weights.huggingface import CheckpointError

CONFIG = decoder.DecoderConfig(24, 18, 22, layers=1, heads=2, kv_heads=1, head_dim=10)  # columns no multiple of four
GROUP = {
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": None,
    "output_activations": None,
    "targets": ["Linear"],
}
QUANTISED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def pack(entries: np.ndarray) -> np.ndarray:
    """Four columns to a number, the first in the lowest byte, 128 added: by arithmetic; the reader looks at bytes."""
    rows, columns = entries.shape
    unsigned = np.pad(entries.astype(np.int64) + 128, ((0, 0), (0, -columns % 4))).reshape(rows, -1, 4)
    return (unsigned * 256 ** np.arange(4)).sum(axis=-1).astype(np.uint32).view(np.int32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder, and the entries and scales of its layers' matrices, by name."""
    folder = tmp_path_factory.mktemp("w8a16") / "it"
    model = jaxspec.Model(decoder.language_model(CONFIG), decoder.init(CONFIG, jax.random.key(0)), config=CONFIG)
    huggingface.save(model, folder)
    random, stored, kept = np.random.default_rng(0), {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = x
            continue
        entries = random.integers(-128, 128, x.shape).astype(np.int8)  # -128 is used, and 127 need not be
        scale = jnp.asarray(random.uniform(0.001, 0.002, (len(x), 1)), jnp.bfloat16)
        kept[name] = entries, np.asarray(scale, np.float32)
        layer = name.removesuffix(".weight")
        stored |= {f"{layer}.weight_packed": pack(entries), f"{layer}.weight_scale": np.asarray(scale)}
        stored[f"{layer}.weight_shape"] = np.array(x.shape, np.int64)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"quantization_config": QUANTISED}))
    return folder, kept


@pytest.mark.parametrize("mesh", [None, "data=1,model=1"])
def test_entries_and_scales_are_taken_as_they_are(packed, mesh):
    folder, kept = packed
    params = jaxspec.load(folder, dtype="int8", mesh=mesh).params
    layer = params["layers_0"]
    for name, ours in (("mlp.down_proj", layer["ff"]["out"]), ("self_attn.q_proj", layer["attention"]["query"])):
        entries, scale = kept[f"model.layers.0.{name}.weight"]
        np.testing.assert_array_equal(ours["weight"]["int8"], entries)
        np.testing.assert_array_equal(ours["weight"]["scale"], scale)
    assert len(kept) == 7 and int8.is_quantised(params["head"]["weight"])  # which is rounded here


def test_wider_dtypes_are_what_they_stand_for(packed):
    folder, _ = packed
    wide, narrow = jaxspec.load(folder), jaxspec.load(folder, dtype="int8")
    jax.tree.map(np.testing.assert_array_equal, wide.params["layers_0"], int8.dequantise(narrow.params["layers_0"]))
    half = jaxspec.load(folder, dtype="bfloat16").params["layers_0"]["ff"]["wi"]["weight"]
    np.testing.assert_array_equal(half, wide.params["layers_0"]["ff"]["wi"]["weight"].astype(jnp.bfloat16))
    assert huggingface.stored_dtype(folder) == "int8"


def test_what_scales_and_shapes_do_not_fit_is_refused(packed, tmp_path):
    folder, _ = packed
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    stored, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj.weight_scale"
    for change, message in (
        (stored | {name: np.ones((3, 1), np.float32)}, r"scales \(3, 1\): expected"),
        ({}, "without"),
    ):
        left = change or {key: x for key, x in stored.items() if key != name}
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            jaxspec.load(tmp_path)


def changed(**weights):
    return QUANTISED | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "awq, 4 bits"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        (changed(num_bits=4), "compressed-tensors, pack-quantized, int, 4 bits, channel"),
        (changed(strategy="group"), "int, 8 bits, group"),
        (changed(symmetric=False), "asymmetric"),
        (changed(actorder="group"), "in another order"),
        (
            QUANTISED | {"config_groups": {"group_0": GROUP | {"input_activations": {"num_bits": 8}}}},
            "activations, too",
        ),
        (QUANTISED | {"format": "int-quantized"}, "int-quantized"),
        (QUANTISED | {"kv_cache_scheme": {"num_bits": 8}}, "a quantised cache"),
        ({}, "of no method that it names"),
    ],
)
def test_other_quantisations_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=rf"\(quantization_config\): .*{message}.* with dtype=\"int8\", or a GGUF"):
        compressed_tensors.check({"quantization_config": config})
