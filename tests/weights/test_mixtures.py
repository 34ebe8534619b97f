"""Mixtures of experts in transformers' folders: both spellings, what is refused, what is written,
texts and memory.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.core import Room
from jaxspec.nets import net_of, quantised
from jaxspec.sharding import WHOLE
from jaxspec.weights import (
    hf_families,
    huggingface,
    orbax,
    parameters,
    quantisation,
    quantised_files,
    stacks,
    tensors,
)
from jaxspec.weights.hf_families import mixtures
from jaxspec.weights.loading import find
from jaxspec.weights.tensors import CheckpointError
from tests.weights.folders import assert_same, model_from

STEPS, PROMPTS = 10, [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3]]
ATTENTION = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SMALL = ATTENTION | {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
TABLES = {
    "Qwen3MoeForCausalLM": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    | {"mlp_only_layers": [0], "norm_topk_prob": True},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "GptOssForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "swiglu_limit": 1.0,
    },
}
TYPES = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MixtralForCausalLM": "mixtral",
    "GptOssForCausalLM": "gpt_oss",
}


def table_of(name):
    return {"model_type": TYPES[name], **SMALL, **TABLES[name], "hidden_act": "silu"}


@pytest.fixture(params=TABLES)
def saved(request, tmp_path):
    """A model and its folder, which we have written."""
    model = model_from(table_of(request.param))
    huggingface.save(model, tmp_path / "folder")
    return request.param, model, tmp_path / "folder"


def test_what_is_written_is_read_again(saved):
    name, model, folder = saved
    params, config = huggingface.restore(folder)
    assert_same(params, model.params)
    assert config == model.config
    written = load_file(folder / "model.safetensors")
    inwards = model.params["layers_1"]["ff"]["experts"]["inwards"]["weight"]
    if name == "GptOssForCausalLM":
        fused = written["model.layers.1.mlp.experts.gate_up_proj"]  # [experts, in, 2 out]
        np.testing.assert_array_equal(fused[3, :, 0::2], inwards[6].T)
        np.testing.assert_array_equal(fused[3, :, 1::2], inwards[7].T)
        return
    ends = {
        "Qwen3MoeForCausalLM": "mlp.experts.3.up_proj",
        "MixtralForCausalLM": "block_sparse_moe.experts.3.w3",
    }
    np.testing.assert_array_equal(written[f"model.layers.1.{ends[name]}.weight"], inwards[7])


@pytest.mark.parametrize("saved", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"], indirect=True)
def test_transformers_in_memory_names_are_read_and_experts_may_lie_in_two_files(saved):
    _, model, folder = saved
    in_memory, apart = {}, {}
    for shard in stacks.stacked(tensors.shards(folder), hf_families.of(table_of(saved[0])).apart):
        for tensor, x in shard.read():
            x = np.asarray(x)
            fused = (
                x.reshape(len(x) // 2, -1, *x.shape[2:]) if tensor.endswith("gate_up_proj") else x
            )
            in_memory[tensor.replace("block_sparse_moe", "mlp")] = fused
    for tensor, x in load_file(folder / "model.safetensors").items():
        apart[tensor] = x
    (folder / "model.safetensors").unlink()
    save_file(in_memory, folder / "model.safetensors")
    assert any(tensor.endswith("mlp.experts.gate_up_proj") for tensor in in_memory)
    assert_same(huggingface.restore(folder)[0], model.params)
    (folder / "model.safetensors").unlink()
    where = {
        tensor: f"model-0000{1 + number % 2}-of-00002.safetensors"
        for number, tensor in enumerate(apart)
    }
    for file in set(where.values()):
        save_file(
            {tensor: x for tensor, x in apart.items() if where[tensor] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_same(huggingface.restore(folder)[0], model.params)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_experts_are_quantised_one_by_one(saved, dtype):
    _, model, folder = saved
    params, _ = huggingface.restore(folder, dtype)
    assert_same(params, quantisation.quantise(model.params, dtype))
    stack, whole = params["layers_1"]["ff"]["experts"], model.params["layers_1"]["ff"]["experts"]
    assert params["layers_1"]["ff"]["router"]["matrix"].dtype == np.float32
    for name in ("inwards", "outwards"):
        assert quantised.shape(stack[name]["weight"]) == whole[name]["weight"].shape
        assert quantised.is_whole(stack[name]["weight"])
        alone = quantisation.quantise_matrix(whole[name]["weight"][2], dtype)
        assert_same({part: x[2] for part, x in stack[name]["weight"].items()}, alone)
        values = quantisation.dequantise_matrix(stack[name]["weight"])
        np.testing.assert_array_equal(values[2], quantised.widen(alone))
    # They are multiplied as they are: what they stand for gives the same logits.
    tokens = np.array([[3, 1, 4, 1, 5]])
    logits = [
        jaxspec.Model(model.lm, x, config=model.config)
        for x in (params, quantisation.dequantise(params))
    ]
    prompt = jaxspec.Prompt(jnp.asarray(tokens), jnp.array([5]))
    short, wide = (
        jax.jit(x.lm.prefill, static_argnums=2)(x.params, prompt, Room(8))[0].logits for x in logits
    )
    np.testing.assert_allclose(short, wide, rtol=1e-4, atol=1e-4 * np.abs(wide).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: {k: v for k, v in x.items() if "experts.2.w3" not in k},
            "has 7 matrices of 4 experts.*expected 8",
        ),
        (
            lambda x: {k: v[:5].copy() if "experts.1.w1" in k else v for k, v in x.items()},
            "expected one shape",
        ),
        (
            lambda x: {k: v for k, v in x.items() if "experts.3." not in k},
            r"is \[6, 24, 32\], expected \[8, 24, 32\]",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, change, message):
    huggingface.save(model_from(table_of("MixtralForCausalLM")), tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    weights = change(load_file(file))
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=message):
        huggingface.restore(tmp_path / "folder")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "MixtralForCausalLM",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok is 5, and there are 4 experts",
        ),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 0},
            "num_experts_per_tok is 2, and there are 0 experts",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"mlp_only_layers": ["0"]},
            "mlp_only_layers is .*expected a list of numbers",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"decoder_sparse_step": 1.5},
            "decoder_sparse_step is 1.5: expected a positive",
        ),
    ],
)
def test_configurations_that_cannot_be_are_refused(tmp_path, name, changes, message):
    table = {**SMALL, **TABLES[name], "model_type": TYPES[name], **changes}
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=message):
        huggingface.read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "size", "total", "active"),
    [  # as the makers' model cards count them: all, and those of a token
        (mixtures.QWEN3_MOE, "qwen3-30b-a3b", 30_532_122_624, 3.3e9),
        (mixtures.MIXTRAL, "mixtral-8x7b", 46_702_792_704, 12.9e9),
        (mixtures.QWEN3_MOE, "qwen3-235b-a22b", 235_093_634_560, 22.2e9),
        (mixtures.MIXTRAL, "mixtral-8x22b", 140_630_071_296, 39.1e9),
        (mixtures.GPT_OSS, "gpt-oss-20b", 20_914_757_184, 3.61e9 + 201_088 * 2880),
        (mixtures.GPT_OSS, "gpt-oss-120b", 116_829_156_672, 5.13e9 + 201_088 * 2880),
    ],
)
def test_published_sizes_have_the_published_numbers_of_parameters(family, size, total, active):
    config, net = family.sizes[size], net_of(family.sizes[size])
    assert (
        net.total(config, lambda x: sum(int(np.prod(s)) for s in parameters.shapes(x).values()))
        == total
    )
    # An embedding that is only looked up is not multiplied with; all cards but gpt-oss' count it.
    assert net.load(config).per_token + config.vocab_size * config.dim == pytest.approx(
        active, rel=0.02
    )


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_texts_are_those_of_transformers_with_and_without_a_drafter(tmp_path, name):
    import torch
    import transformers

    torch.manual_seed(1)
    kind = getattr(transformers, name)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    peer = kind._from_config(
        kind.config_class(**SMALL, **TABLES[name], pad_token_id=0, eos_token_id=None), **plain
    ).eval()
    with torch.no_grad():
        for x in peer.parameters():
            x.normal_(0, 0.4)
    peer.save_pretrained(tmp_path / "theirs")
    target, options = jaxspec.load(tmp_path / "theirs"), dict(max_new_tokens=STEPS, eos_ids=())
    expected = []
    for prompt in PROMPTS:
        ids = peer.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False)
        expected.append(ids[0, len(prompt) :].tolist())
    assert jaxspec.generate(target, PROMPTS, **options).tokens.tolist() == expected
    draft = model_from(table_of(name), seed=3)
    assert (
        jaxspec.generate(target, PROMPTS, drafter=draft, gamma=3, **options).tokens.tolist()
        == expected
    )
    # What we write, transformers reads.
    huggingface.save(target, tmp_path / "ours")
    again = kind.from_pretrained(tmp_path / "ours", **plain)
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[0]])
        assert torch.equal(again(ids).logits, peer(ids).logits)
        logits = peer(ids).logits[0, -1].numpy()
    # In bfloat16 the logits move by the rounding of that dtype.
    rounded = jaxspec.load(tmp_path / "theirs", dtype="bfloat16")
    prompt = jaxspec.Prompt(jnp.array([PROMPTS[0]]), jnp.array([len(PROMPTS[0])]))
    read, _ = jax.jit(rounded.lm.prefill, static_argnums=2)(rounded.params, prompt, Room(16))
    np.testing.assert_allclose(
        np.asarray(read.logits[0, 0]), logits, atol=0.05 * np.abs(logits).max()
    )


def quantised_folder(folder):
    """A gpt-oss whose experts are mxfp4, as published; the blocks and scales of its tensors."""
    table = {
        **table_of("GptOssForCausalLM"),
        "hidden_size": 64,
        "intermediate_size": 96,
    }
    huggingface.save(model_from(table), folder)
    weights, random, packed = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        count, width, rows = weights.pop(name).shape  # [in, out] in full, and [out, in] in 4 bits
        blocks = random.integers(0, 256, (count, rows, width // 32, 16), dtype=np.uint8)
        scales = random.integers(110, 126, (count, rows, width // 32), dtype=np.uint8)
        scales[0, 0, 0] = 2
        packed[name] = blocks, scales
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        }
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [20, 19, 12], "pad_token_id": 19}'
    )
    return packed


@pytest.mark.needs_torch
def test_mxfp4_is_read_bit_for_bit_as_transformers_reads_it(tmp_path):
    import torch
    from transformers.integrations import mxfp4

    packed = quantised_folder(tmp_path / "folder")
    assert huggingface.stored_dtype(tmp_path / "folder") == "bfloat16"
    by_dtype = {
        x: huggingface.restore(tmp_path / "folder", x)[0]
        for x in ("float32", "bfloat16", "int8", "int4")
    }
    for name, parts in packed.items():
        theirs = (
            mxfp4.convert_moe_packed_tensors(*map(torch.tensor, parts))
            .float()
            .numpy()
            .swapaxes(1, 2)
        )
        if "gate_up" in name:  # rows of the gate and of the other projection alternate
            theirs = np.stack([theirs[:, 0::2], theirs[:, 1::2]], axis=1)
            theirs = theirs.reshape(-1, *theirs.shape[2:])
        layer, end = f"layers_{name.split('.')[2]}", "inwards" if "gate_up" in name else "outwards"
        stacks = {
            x: params[layer]["ff"]["experts"][end]["weight"] for x, params in by_dtype.items()
        }
        narrow = [stacks[dtype] for dtype in ("int8", "int4")]
        wider = quantisation.as_dtype(
            parameters.keys("ff/experts/inwards/weight"), stacks["int4"], "int8"
        )
        exact = [
            stacks["float32"],
            stacks["bfloat16"],
            *map(quantisation.dequantise_matrix, (*narrow, wider)),
        ]
        for stack in exact:
            np.testing.assert_array_equal(np.asarray(stack, np.float32), theirs)
        # In 8 bits each number of 4 bits is twice itself, an integer, with half of the file's
        # scales.
        for stack, bits in zip(narrow, (8 + 32 / 32, 4 + 16 / 32), strict=True):
            assert stack["scale"].shape == (*theirs.shape[:2], theirs.shape[2] // 32)
            assert quantisation.nbytes(stack) == theirs.size * bits / 8
        assert stacks["int4"]["float4"].dtype == jnp.float4_e2m1fn
    # The scales of groups are multiplied with in the network.
    config = huggingface.read_config(tmp_path / "folder")[1]
    assert config.end_tokens == (20, 19, 12)
    lm, prompt = (
        net_of(config).language_model(config),
        jaxspec.Prompt(jnp.array([[3, 1, 4, 1]]), jnp.array([4])),
    )
    exact = by_dtype["float32"]
    wide = jax.jit(lm.prefill, static_argnums=2)(exact, prompt, Room(8))[0].logits
    for dtype in ("int8", "int4"):
        experts = {layer: by_dtype[dtype][layer]["ff"] for layer in ("layers_0", "layers_1")}
        params = exact | {layer: exact[layer] | {"ff": ff} for layer, ff in experts.items()}
        narrow = jax.jit(lm.prefill, static_argnums=2)(params, prompt, Room(8))[0].logits
        np.testing.assert_allclose(narrow, wide, atol=1e-4 * float(np.abs(wide).max()))


@pytest.mark.slow
def test_mxfp4_is_kept_in_checkpoints_of_ours(tmp_path):
    """Written and read as it is."""
    quantised_folder(tmp_path / "folder")
    model = huggingface.open_model(tmp_path / "folder")
    params, config = model.params("int4", None)
    manifest = {"name": "x", "description": {}, "source": model.source()}
    orbax.save(tmp_path / "ours", params, config, find("debian-t5-base"), dtype="int4", **manifest)
    for dtype in ("int4", "int8", "float32"):
        again = orbax.restore(tmp_path / "ours", dtype)[0]["layers_0"]["ff"]["experts"]["inwards"][
            "weight"
        ]
        before = quantisation.as_dtype(
            parameters.keys("ff/experts/inwards/weight"),
            params["layers_0"]["ff"]["experts"]["inwards"]["weight"],
            dtype,
        )
        jax.tree.map(np.testing.assert_array_equal, again, before)


def test_integers_of_experts_stay_as_they_are_in_the_file():
    """GPTQ, AWQ and compressed-tensors: entries, scales and zero points of each expert, and no
    second rounding.
    """
    random, members = np.random.default_rng(0), []
    for _ in range(6):  # of three experts, each with a gate and another projection
        q, z = (random.integers(-8, 8, shape).astype(np.int8) for shape in ((4, 32), (4, 2)))
        scale = random.uniform(0.5, 1, (4, 2)).astype(np.float32)
        values = (q - np.repeat(z, 16, axis=1)) * np.repeat(scale, 16, axis=1)
        rows = lambda a, b, x=values: x[a:b]  # noqa: E731
        entries = tensors.Stored((4, 32), np.dtype(np.int8), lambda a, b, q=q: q[a:b])
        members.append(
            (
                quantised_files.Quantised(
                    (4, 32), np.dtype(np.float32), rows, entries, scale, z, 4
                ),
                values,
            )
        )
    stack = stacks._joined((6, 4, 32), np.dtype(np.float32), [x for x, _ in members])
    expected = np.stack([values for _, values in members])
    np.testing.assert_allclose(np.asarray(stack), expected, rtol=1e-6)
    placed = parameters.place("ff/experts/inwards/weight", stack, WHOLE, None, "int4")
    assert placed["int4"].shape == (6, 2, 4, 16) and placed["zero"].shape == (6, 4, 2)
    np.testing.assert_allclose(quantisation.dequantise_matrix(placed), expected, rtol=1e-6)


def test_damaged_mxfp4_is_refused(tmp_path):
    quantised_folder(tmp_path / "folder")
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(
        weights | {name: weights[name][:, :5].copy()}, tmp_path / "folder" / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError,
        match=r"down_proj cannot be read: scales \[4, 5, 3\] of blocks \[4, 64, 3, 16\]",
    ):
        huggingface.restore(tmp_path / "folder")
    del weights[name]
    save_file(weights, tmp_path / "folder" / "model.safetensors")
    with pytest.raises(CheckpointError, match="down_proj_blocks is without scales"):
        huggingface.restore(tmp_path / "folder")
