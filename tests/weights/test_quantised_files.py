"""Checkpoints with quantised matrices as people publish them, written here by hand from the
formats' definitions.
"""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import nets
from jaxspec.core import Room
from jaxspec.nets import decoder
from jaxspec.weights import huggingface, orbax, quantisation, quantised_files
from jaxspec.weights.huggingface import CheckpointError

# columns no multiple of four
CONFIG = decoder.decoder_config(24, 18, 22, layers=1, heads=2, kv_heads=1, head_dim=10)
GROUP = {
    "weights": {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    },
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
    """Four columns to a number, the first in the lowest byte, 128 added: by arithmetic; the reader
    looks at bytes.
    """
    rows, columns = entries.shape
    unsigned = np.pad(entries.astype(np.int64) + 128, ((0, 0), (0, -columns % 4))).reshape(
        rows, -1, 4
    )
    return (unsigned * 256 ** np.arange(4)).sum(axis=-1).astype(np.uint32).view(np.int32)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder, and the entries and scales of its layers' matrices, by name."""
    folder = tmp_path_factory.mktemp("w8a16") / "it"
    model = jaxspec.Model(
        decoder.language_model(CONFIG), decoder.init(CONFIG, jax.random.key(0)), config=CONFIG
    )
    huggingface.save(model, folder)
    random, stored, kept = np.random.default_rng(0), {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = x
            continue
        # -128 is used, and 127 need not be
        entries = random.integers(-128, 128, x.shape).astype(np.int8)
        scale = jnp.asarray(random.uniform(0.001, 0.002, (len(x), 1)), jnp.bfloat16)
        kept[name] = entries, np.asarray(scale, np.float32)
        layer = name.removesuffix(".weight")
        stored |= {
            f"{layer}.weight_packed": pack(entries),
            f"{layer}.weight_scale": np.asarray(scale),
        }
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
    for name, ours in (
        ("mlp.down_proj", layer["ff"]["out"]),
        ("self_attn.q_proj", layer["attention"]["query"]),
    ):
        entries, scale = kept[f"model.layers.0.{name}.weight"]
        np.testing.assert_array_equal(ours["weight"]["int8"], entries)
        np.testing.assert_array_equal(ours["weight"]["scale"], scale)
    # which is rounded here
    assert len(kept) == 7 and quantisation.is_quantised(params["head"]["weight"])


def test_wider_dtypes_are_what_they_stand_for(packed):
    folder, _ = packed
    wide, narrow = jaxspec.load(folder), jaxspec.load(folder, dtype="int8")
    layer = quantisation.dequantise(narrow.params["layers_0"])
    jax.tree.map(np.testing.assert_array_equal, wide.params["layers_0"], layer)
    half = jaxspec.load(folder, dtype="bfloat16").params["layers_0"]["ff"]["wi"]["weight"]
    np.testing.assert_array_equal(
        half, wide.params["layers_0"]["ff"]["wi"]["weight"].astype(jnp.bfloat16)
    )
    assert huggingface.stored_dtype(folder) == "int8"


def test_what_scales_and_shapes_do_not_fit_is_refused(packed, tmp_path):
    folder, _ = packed
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    stored, name = (
        load_file(folder / "model.safetensors"),
        "model.layers.0.mlp.up_proj.weight_scale",
    )
    for change, message in (
        (
            stored | {name: np.ones((3, 1), np.float32)},
            r"weight_scale is \[3, 1\]: expected \[22, 1\]",
        ),
        ({}, "without"),
    ):
        left = change or {key: x for key, x in stored.items() if key != name}
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            jaxspec.load(tmp_path)


def changed(**weights):
    return QUANTISED | {
        "config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq, 3 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "gptq, marlin, 4 bits",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*k_proj": {}}},
            "gptq, other options for some layers",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, gemv, 4 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8, e5m2"),
        ({"quant_method": "nvfp4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        (changed(num_bits=3), "compressed-tensors, pack-quantized, int, 3 bits, channel"),
        (changed(strategy="tensor_group"), "int, 8 bits, tensor_group"),
        (changed(type="float", symmetric=False), "float, 8 bits, channel, asymmetric"),
        (changed(actorder="group"), "in another order"),
        (
            QUANTISED
            | {"config_groups": {"group_0": GROUP | {"input_activations": {"num_bits": 8}}}},
            "activations, too",
        ),
        (QUANTISED | {"format": "int-quantized"}, "int-quantized"),
        (QUANTISED | {"kv_cache_scheme": {"num_bits": 8}}, "a quantised cache"),
        ({}, "of no method that it names"),
    ],
)
def test_other_quantisations_are_refused_by_name(config, message):
    with pytest.raises(
        ValueError, match=rf"\(quantization_config\): .*{message}.* or dtype=\"int8\", or a GGUF"
    ):
        quantised_files.scheme_of({"quantization_config": config})


GROUPED = decoder.decoder_config(24, 64, 96, layers=1, heads=2, kv_heads=1, head_dim=16)
# of a group: 2 of queries, keys, values, gate and wi, 1 of attention's out, 3 of the feed-forward
# block's
WIDTH = 32


def words(fields: np.ndarray, bits: int = 4) -> np.ndarray:
    """[n, m] -> [n, m bits / 32] of int32: field j of a word is multiplied with 2**(bits j), by
    arithmetic.
    """
    count = 32 // bits
    by_word = fields.astype(np.int64).reshape(len(fields), -1, count)
    numbers = (by_word * 2 ** (bits * np.arange(count))).sum(axis=-1)
    return np.ascontiguousarray(numbers % 2**32, np.uint32).view(np.int32)


def gptq(q, z, scale, bits=4, less=1, columns=None):
    order = np.arange(q.shape[1]) * z.shape[1] // q.shape[1] if columns is None else columns
    return {
        "qweight": np.ascontiguousarray(words(q, bits).T),
        "qzeros": words(z.T - less, bits),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": order.astype(np.int32),
    }


def awq(q, z, scale):
    def interleaved(x: np.ndarray) -> np.ndarray:
        """[n, out]: the lowest four bits of a word are output 0 of eight, the next are output 2,
        ...
        """
        return words(x.reshape(len(x), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape))

    return {
        "qweight": interleaved(q.T),
        "qzeros": interleaved(z.T),
        "scales": np.ascontiguousarray(scale.T),
    }


def w4a16(q, z, scale):
    stored = {
        "weight_packed": words(q),
        "weight_scale": scale,
        "weight_shape": np.array(q.shape, np.int64),
    }
    return stored | (
        {"weight_zero_point": np.ascontiguousarray(words(z.T).T)} if (z != 8).any() else {}
    )


def grouped(symmetric):
    weights = GROUP["weights"] | {
        "num_bits": 4,
        "strategy": "group",
        "group_size": WIDTH,
        "symmetric": symmetric,
    }
    return QUANTISED | {"config_groups": {"group_0": GROUP | {"weights": weights}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": WIDTH, "desc_act": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": WIDTH, "version": "gemm", "zero_point": True}
FORMATS = {  # config, how layers are packed, bits, whether zero points are all in the middle
    "gptq": (GPTQ | {"sym": True}, gptq, 4, True),
    "gptq-asymmetric": (GPTQ | {"sym": False}, gptq, 4, False),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, functools.partial(gptq, less=0), 4, False),
    "gptq8": (
        GPTQ | {"bits": 8, "checkpoint_format": "gptq"},
        functools.partial(gptq, bits=8),
        8,
        False,
    ),
    "awq": (AWQ, awq, 4, False),
    "w4a16": (grouped(True), w4a16, 4, True),
    "w4a16-asymmetric": (grouped(False), w4a16, 4, False),
}


def folder_of(folder, config, layer, bias: bool = False, network=GROUPED):
    """Writes a folder, its layers' tensors replaced by what `layer(name, weight)` returns by the
    ends of names.
    """
    model = jaxspec.Model(
        decoder.language_model(network), decoder.init(network, jax.random.key(0)), config=network
    )
    huggingface.save(model, folder)
    stored = {}
    for name, x in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = x
            continue
        stem = name.removesuffix(".weight")
        parts = layer(name, x)
        parts |= {"bias": np.zeros(len(x), np.float16)} if bias and "weight" not in parts else {}
        stored |= {f"{stem}.{end}": part for end, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"quantization_config": config}))
    return folder


def integers(folder, name, columns=None, in_full=(), **options):
    """Writes a folder in one of `FORMATS`; returns it, and unsigned entries, zero points and scales
    by layer.

    The weights of modules with a name that has one of `in_full` in it stay as they are.
    """
    config, packed, bits, symmetric = FORMATS[name]
    random, kept = np.random.default_rng(0), {}

    def layer(name, x):
        if any(module in name for module in in_full):
            return {"weight": x.astype(np.float16)}
        groups = x.shape[1] // WIDTH
        q = random.integers(0, 2**bits, x.shape)
        z = (
            np.full((len(x), groups), 2 ** (bits - 1))
            if symmetric
            else random.integers(0, 2**bits, (len(x), groups))
        )
        scale = random.uniform(0.005, 0.01, (len(x), groups)).astype(np.float16)
        kept[name.removeprefix("model.layers.0.")] = q, z, scale
        more = {} if columns is None else {"columns": columns(x.shape[1])}
        return packed(q, z, scale, **more)

    return folder_of(folder, config, layer, bias=name.startswith("gptq"), **options), kept


def stands_for(q, z, scale, group_of=lambda column: column // WIDTH):
    """The matrix, column by column, in float64."""
    groups = [group_of(column) for column in range(q.shape[1])]
    return np.stack(
        [(q[:, i] - z[:, g]) * scale[:, g].astype(np.float64) for i, g in enumerate(groups)], axis=1
    )


PLACES = {"mlp.down_proj.weight": ("ff", "out"), "self_attn.q_proj.weight": ("attention", "query")}
PLACES |= {"self_attn.o_proj.weight": ("attention", "out")}


@pytest.mark.parametrize("name", FORMATS)
def test_integers_by_groups_are_taken_as_they_are(tmp_path, name):
    folder, kept = integers(tmp_path / "it", name)
    bits = FORMATS[name][2]
    narrow, wide = (
        jaxspec.load(folder, dtype=dtype, mesh="model=1").params
        for dtype in (f"int{bits}", "float32")
    )
    for ours, (module, part) in PLACES.items():
        q, z, scale = kept[ours]
        groups, half = scale.shape[1], 2 ** (bits - 1)
        stored = narrow["layers_0"][module][part]["weight"]
        entries = np.asarray(stored[f"int{bits}"]).astype(int).reshape(groups, len(q), -1)
        np.testing.assert_array_equal(entries.swapaxes(0, 1).reshape(q.shape), q - half)
        np.testing.assert_array_equal(stored["scale"], scale.astype(np.float32))
        np.testing.assert_array_equal(stored.get("zero", np.zeros(z.shape)), z - half)
        assert ("zero" in stored) == (not FORMATS[name][3])
        expected = stands_for(q, z, scale)
        np.testing.assert_allclose(quantisation.dequantise_matrix(stored), expected, rtol=1e-6)
        np.testing.assert_allclose(wide["layers_0"][module][part]["weight"], expected, rtol=1e-6)
    assert (
        set(narrow["head"]["weight"]) == {"int8", "scale"}
        and huggingface.stored_dtype(folder) == f"int{bits}"
    )


def no_tokenizer(folder):
    """A folder with a tokenizer's files, of nothing."""
    (folder / "tokenizer").mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / file).write_text("{}")
    return folder / "tokenizer"


def test_logits_text_and_a_checkpoint_of_an_awq_model(tmp_path):
    """Those of the float32 model; the checkpoint keeps groups and zero points; in int8 all is the
    same function.
    """
    folder, _ = integers(tmp_path / "it", "awq")
    narrow, wide = jaxspec.load(folder, dtype="int4"), jaxspec.load(folder)
    prompt = jaxspec.Prompt(jnp.array([[3, 1, 2, 7]]), jnp.array([4]))
    # which int4 makes int8
    params = narrow.params | {name: wide.params[name] for name in ("embedding", "head")}
    prefill = jax.jit(narrow.lm.prefill)
    ours, theirs = (prefill(part, prompt, Room(8))[0].logits for part in (params, wide.params))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    options = dict(name="it", description={})
    orbax.save(
        tmp_path / "ours",
        narrow.params,
        narrow.config,
        no_tokenizer(tmp_path),
        dtype="int4",
        **options,
    )
    again, config, manifest = orbax.restore(tmp_path / "ours", dtype="int4")
    jax.tree.map(np.testing.assert_array_equal, again, narrow.params)
    assert (config.dtype, manifest.dtype, manifest.parameters) == (
        "float32",
        "int4",
        quantisation.count(wide.params),
    )
    eight = orbax.restore(tmp_path / "ours", dtype="int8")[0]
    jax.tree.map(
        np.testing.assert_array_equal,
        quantisation.dequantise(eight),
        quantisation.dequantise(narrow.params),
    )
    assert "int8" in eight["layers_0"]["ff"]["out"]["weight"]


@pytest.mark.parametrize("name", ["awq", "gptq-asymmetric", "w4a16"])
def test_what_makers_left_in_full_is_rounded_to_eight_bits_beside_four(tmp_path, name):
    """A layer and a projection; log-probabilities are the file's own to within int8's error, in a
    checkpoint, too.
    """
    network = nets.replace(GROUPED, layers=2)
    in_full = ("layers.1.", "down_proj")
    folder, _ = integers(tmp_path / "it", name, in_full=in_full, network=network)
    stored = load_file(folder / "model.safetensors")
    large = {
        key: 4 * x if any(part in key for part in in_full) and key.endswith(".weight") else x
        for key, x in stored.items()
    }
    save_file(large, folder / "model.safetensors", metadata={"format": "pt"})
    narrow, wide = jaxspec.load(folder, dtype="int4"), jaxspec.load(folder)
    first, second = (narrow.params[f"layers_{i}"] for i in range(2))
    for layer, module, part, kind in (
        (first, "attention", "query", "int4"),
        (first, "ff", "wi", "int4"),
        (first, "ff", "out", "int8"),
        (second, "attention", "query", "int8"),
        (second, "ff", "wi", "int8"),
    ):
        assert kind in layer[module][part]["weight"]
    prompt = jaxspec.Prompt(jnp.array([[3, 1, 2, 7]]), jnp.array([4]))
    prefill = jax.jit(narrow.lm.prefill)

    def log_probs(params):
        return jax.nn.log_softmax(prefill(params, prompt, Room(8))[0].logits)

    expected = log_probs(wide.params)
    coarse = narrow.params | {"layers_1": quantisation.quantise(wide.params["layers_1"], "int4")}
    error, error_of_four_bits = (
        float(jnp.abs(log_probs(x) - expected).max()) for x in (narrow.params, coarse)
    )
    assert error < 0.1 and error_of_four_bits > 4 * error
    np.testing.assert_allclose(
        log_probs(narrow.params), log_probs(jaxspec.load(folder, dtype="int8").params), atol=1e-4
    )
    options = dict(name="it", description={})
    orbax.save(
        tmp_path / "ours",
        narrow.params,
        narrow.config,
        no_tokenizer(tmp_path),
        dtype="int4",
        **options,
    )
    again = orbax.restore(tmp_path / "ours", dtype="int4")[0]
    jax.tree.map(np.testing.assert_array_equal, again, narrow.params)


def test_columns_in_another_order_are_exact_in_wide_dtypes_and_refused_in_int4(tmp_path):
    def columns(count):
        return np.random.default_rng(count).permutation(np.arange(count) // WIDTH)

    folder, kept = integers(tmp_path / "it", "gptq", columns)
    wide = jaxspec.load(folder).params["layers_0"]
    for ours, (module, part) in PLACES.items():
        expected = stands_for(*kept[ours], columns(kept[ours][0].shape[1]).__getitem__)
        np.testing.assert_allclose(wide[module][part]["weight"], expected, rtol=1e-6)
    with pytest.raises(
        CheckpointError, match=r"another order \(GPTQ's desc_act\).* with dtype=\"bfloat16\""
    ):
        jaxspec.load(folder, dtype="int4")


def float8(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.asarray(x / scale, ml_dtypes.float8_e4m3fn)


def changed_to_float8(**weights):
    group = {
        "weights": {"num_bits": 8, "type": "float", "symmetric": True} | weights,
        "input_activations": {},
    }
    return QUANTISED | {"format": "float-quantized", "config_groups": {"group_0": GROUP | group}}


BLOCK = (48, 48)  # which divides neither the rows nor the columns


@pytest.mark.parametrize(
    ("config", "ends", "shape"),
    [
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK},
            ".weight_scale_inv",
            "blocks",
        ),
        ({"quant_method": "fp8", "activation_scheme": "static"}, ".weight_scale", ()),
        (changed_to_float8(strategy="channel"), ".weight_scale", "rows"),
        (changed_to_float8(strategy="block", block_structure=BLOCK), ".weight_scale", "blocks"),
    ],
)
def test_float8_matrices_are_what_they_stand_for(tmp_path, config, ends, shape):
    random, kept = np.random.default_rng(0), {}

    def layer(name, x):
        rows, columns = x.shape
        shapes = {
            "blocks": (-(-rows // BLOCK[0]), -(-columns // BLOCK[1])),
            "rows": (rows, 1),
            (): (),
        }
        scale = random.uniform(0.5, 2, shapes[shape]).astype(np.float32)
        of_entry = np.broadcast_to(scale, x.shape).copy() if shape != "blocks" else np.empty_like(x)
        for i, j in np.ndindex(x.shape) if shape == "blocks" else ():
            of_entry[i, j] = scale[i // BLOCK[0], j // BLOCK[1]]
        entries = float8(x, of_entry)
        kept[name.removeprefix("model.layers.0.")] = entries.astype(np.float32) * of_entry
        static = {"input_scale": np.ones((), np.float32)} if shape == () else {}
        return {"weight": entries, ends[1:]: scale} | static

    folder = folder_of(tmp_path / "it", config, layer)
    params = jaxspec.load(folder).params["layers_0"]
    for name, (module, part) in PLACES.items():
        np.testing.assert_array_equal(params[module][part]["weight"], kept[name])
    assert huggingface.stored_dtype(folder) == "bfloat16"


def without_description(folder):
    """Leaves out what config.json says of the quantisation."""
    table = json.loads((folder / "config.json").read_text())
    del table["quantization_config"]
    (folder / "config.json").write_text(json.dumps(table))


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("described", [False, True])
def test_float8_without_scales_is_said_to_be_quantised(tmp_path, dtype, described):
    config = {"quant_method": "fp8", "fmt": "e4m3"}
    folder = folder_of(tmp_path / "it", config, lambda _, x: {"weight": float8(x, np.ones(()))})
    if not described:
        without_description(folder)
    with pytest.raises(
        CheckpointError, match=r"_proj.weight is float8_e4m3fn, so it is quantised, and no scales"
    ):
        jaxspec.load(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("file", "tensors"),
    [
        (
            "hf_quant_config.json",
            {"weight_scale": np.ones((), np.float32), "input_scale": np.ones((), np.float32)},
        ),
        (
            "quantize_config.json",
            {"qweight": np.ones((8, 8), np.int32), "scales": np.ones((1, 8), np.float16)},
        ),
        (None, {"weight": np.ones((8, 1), np.uint8), "weight.absmax": np.ones(8, np.float32)}),
    ],
)
def test_files_that_config_json_does_not_describe_are_said_to_be_quantised(tmp_path, file, tensors):
    """ModelOpt's, which says how in a file of its own; old GPTQ's; bitsandbytes'."""
    folder = folder_of(
        tmp_path / "it", {}, lambda _, x: {"weight": float8(x, np.ones(()))} | tensors
    )
    without_description(folder)
    if file is not None:
        (folder / file).write_text("{}")
    message = (
        f"config.json does not say how. {'' if file is None else file + ' is not read. '}Expected "
        "none, GPTQ"
    )
    with pytest.raises(
        CheckpointError, match=rf"its weights are quantised \(model.layers.0.* {message}"
    ):
        jaxspec.load(folder)


def test_a_layer_without_one_of_its_tensors_is_named(tmp_path):
    folder, _ = integers(tmp_path / "it", "awq")
    stored = load_file(folder / "model.safetensors")
    for name, change, message in (
        ("self_attn.q_proj.qzeros", None, "q_proj.qweight is without qzeros: download it again"),
        (
            "mlp.up_proj.qzeros",
            np.zeros((3, 1), np.int32),
            r"up_proj cannot be read: qzeros is \[3, 1\]: expected \[2, 12\]",
        ),
        (
            "mlp.up_proj.scales",
            np.zeros((4, 96), np.float16),
            r"up_proj cannot be read: .*qzeros is \[2, 12\]",
        ),
    ):
        left = {key: x for key, x in stored.items() if key != f"model.layers.0.{name}"}
        left |= {} if change is None else {f"model.layers.0.{name}": change}
        save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            jaxspec.load(folder)


def test_parts_of_a_fused_tensor_stay_quantised():
    entries = np.arange(-8, 8, dtype=np.int8).reshape(8, 2)
    as_stored = quantised_files.Stored((8, 2), np.dtype(np.int8), lambda a, b: entries[a:b])
    scale = np.arange(8, dtype=np.float32)[:, None]
    rows = lambda a, b: entries[a:b] * scale[a:b]  # noqa: E731
    whole = quantised_files.Quantised((8, 2), np.dtype(np.float32), rows, as_stored, scale, None, 4)
    second = whole.part(4, 8)
    assert second.bits == 4 and second.zero is None
    np.testing.assert_array_equal(second[:], whole[4:])
    np.testing.assert_array_equal(second.entries[1:3], entries[5:7])
    np.testing.assert_array_equal(second.scale, scale[4:])
