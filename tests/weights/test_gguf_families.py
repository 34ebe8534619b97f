"""GGUF files of many families, written as llama.cpp's converter does: the logits of the folder they
came from.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec.weights import hf_families, huggingface
from jaxspec.weights.hf_families import llama_cpp
from jaxspec.weights.tensors import CheckpointError
from tests.weights.folders import model_of
from tests.weights.test_random_configurations import logits

gguf = pytest.importorskip("gguf")

TOKENS = np.random.RandomState(0).randint(1, 61, (1, 12))
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
SIZES |= {
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
}
ROPE = SIZES | {"rope_theta": 1e4, "tie_word_embeddings": False}
RMS, WIDE = ROPE | {"rms_norm_eps": 1e-5}, {"head_dim": HEAD_DIM}
BASE = {"embedding_length": 32, "feed_forward_length": 48, "block_count": 4, "context_length": 64}
BASE |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.freq_base": 1e4}
RMS_KEYS, MEAN_KEYS = (
    BASE | {"attention.layer_norm_rms_epsilon": 1e-5},
    BASE | {"attention.layer_norm_epsilon": 1e-5},
)
FULL, HALF = {"rope.dimension_count": HEAD_DIM}, {"rope.dimension_count": HEAD_DIM // 2}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 20}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.3],
    "long_factor": [2.0, 2.0],
    "attention_factor": 1.2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
GRANITE = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
SCALES = {"embedding_scale": 2.0, "residual_scale": 0.3, "attention.scale": 0.2, "logit_scale": 4.0}
KINDS = ["sliding_attention"] * 3 + ["full_attention"]
CASES = {  # architecture of llama.cpp: config.json, and metadata
    "olmo2": ({"model_type": "olmo2"} | RMS, RMS_KEYS),
    "smollm3": ({"model_type": "smollm3"} | RMS, RMS_KEYS | FULL),
    "arcee": ({"model_type": "arcee", "hidden_act": "relu2"} | RMS | WIDE, RMS_KEYS | FULL),
    "gemma": (
        {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}
        | RMS
        | WIDE
        | {"tie_word_embeddings": True},
        RMS_KEYS,
    ),
    "granite": ({"model_type": "granite"} | RMS | GRANITE, RMS_KEYS | SCALES | FULL),
    "granite, a dense Granite 4": (
        {"model_type": "granite"} | RMS | GRANITE,
        RMS_KEYS | SCALES | {"ssm.conv_kernel": 4, "rope.scaling.finetuned": True},
    ),
    "phi3": (
        {"model_type": "phi3", "sliding_window": 3, "partial_rotary_factor": 0.5} | RMS,
        RMS_KEYS
        | HALF
        | {"attention.sliding_window": 3, "rope.scaling.original_context_length": 64},
    ),
    "phi3, longrope": (
        {"model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}
        | RMS
        | {"rope_scaling": LONGROPE},
        RMS_KEYS
        | HALF
        | {
            "attention.sliding_window": 0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.2,
        },
    ),
    "exaone4": (
        {"model_type": "exaone4", "sliding_window": None} | RMS | WIDE,
        RMS_KEYS | {"vocab_size": 61},
    ),
    "exaone4, windows": (
        {"model_type": "exaone4", "sliding_window": 3, "layer_types": KINDS} | RMS | WIDE,
        RMS_KEYS
        | {
            "attention.sliding_window": 3,
            "attention.sliding_window_pattern": [True, True, True, False],
        },
    ),
    "hunyuan-dense": (
        {"model_type": "hunyuan_v1_dense"} | RMS | WIDE,
        RMS_KEYS
        | {
            "rope.scaling.type": "none",
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 262144,
        },
    ),
    "seed_oss": (
        {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False}
        | RMS
        | WIDE,
        RMS_KEYS,
    ),
    "ernie4_5": ({"model_type": "ernie4_5", "use_bias": False} | RMS | WIDE, RMS_KEYS),
    "glm4": (
        {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5} | RMS | WIDE,
        RMS_KEYS | HALF,
    ),
    "stablelm": (
        {
            "model_type": "stablelm",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qkv_bias": True,
        }
        | ROPE,
        MEAN_KEYS | HALF | {"use_parallel_residual": True},
    ),
    "starcoder2": (
        {"model_type": "starcoder2", "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None}
        | ROPE,
        MEAN_KEYS,
    ),
    "nemotron": (
        {
            "model_type": "nemotron",
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "hidden_act": "relu2",
        }
        | ROPE
        | WIDE,
        MEAN_KEYS | HALF,
    ),
    "command-r": (
        {"model_type": "cohere", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "use_qk_norm": True}
        | ROPE
        | {"tie_word_embeddings": True},
        MEAN_KEYS | {"logit_scale": 0.25, "rope.scaling.type": "none"},
    ),
    "cohere2": (
        {"model_type": "cohere2", "layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 3}
        | ROPE
        | {"tie_word_embeddings": True},
        MEAN_KEYS
        | FULL
        | {"logit_scale": 0.25, "attention.sliding_window": 3, "rope.scaling.type": "none"},
    ),
    "qwen3moe": (
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
        }
        | RMS
        | WIDE,
        RMS_KEYS | EXPERTS | {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    ),
    "llama, a Mixtral": (
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2} | RMS,
        RMS_KEYS | FULL | {"expert_count": 4, "expert_used_count": 2},
    ),
    "gpt-oss": (
        {
            "model_type": "gpt_oss",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 3,
            "rope_scaling": YARN,
        }
        | RMS
        | WIDE,
        RMS_KEYS
        | EXPERTS
        | {
            "expert_feed_forward_length": 48,
            "attention.sliding_window": 3,
            "rope.scaling.type": "yarn",
        }
        | {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
    ),
}
FACTORS = {"rope_factors_short.weight": [1.0, 1.3], "rope_factors_long.weight": [2.0, 2.0]}
PERMUTED = ("llama", "smollm3", "arcee", "granite")


def renamed(folder: Path, architecture: str) -> dict[str, np.ndarray]:
    """A folder's tensors as the converter names and turns them."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, tensors, stacks = gguf.get_tensor_name_map(arch, 4), {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        layer, parts = (
            (re.search(r"layers\.(\d+)", name) or [0, "0"])[1],
            {"w1": "gate", "w3": "up", "w2": "down"},
        )
        if match := re.search(r"experts\.(\d+)\.(\w+)\.weight", name):
            part = parts.get(match[2], match[2].removesuffix("_proj"))
            stacks.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(match[1])] = x
        elif match := re.search(r"experts\.(gate_up|down)_proj(_bias)?$", name):
            end, x = "bias" if match[2] else "weight", x if match[2] else x.swapaxes(1, 2)
            pairs = {"gate": x[:, 0::2], "up": x[:, 1::2]} if match[1] == "gate_up" else {"down": x}
            tensors |= {f"blk.{layer}.ffn_{part}_exps.{end}": y for part, y in pairs.items()}
        else:
            if architecture in ("gemma", "nemotron") and name.endswith("norm.weight"):
                x = x + 1
            if architecture in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
                heads = HEADS if match[1] == "q" else KV_HEADS
                x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
            called = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert called is not None, name
            tensors[called if called.endswith((".weight", ".bias")) else f"{called}.weight"] = x
    return tensors | {name: np.stack([x[i] for i in sorted(x)]) for name, x in stacks.items()}


def write(path: Path, architecture: str, keys: dict, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }
        add.get(type(value), writer.add_uint32)(f"{architecture}.{key}", value)
    for name, x in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(x, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", CASES)
def test_a_file_has_the_logits_of_the_folder_that_it_came_from(case, tmp_path):
    table, keys = CASES[case]
    architecture = case.partition(",")[0]
    family = hf_families.of(table)
    named = huggingface._theirs(model_of(family.read(table)), family)
    folder = huggingface.write_folder(tmp_path / "folder", {huggingface.CONFIG: table}, named)
    tensors = renamed(folder, architecture) | (
        {x: np.array(y) for x, y in FACTORS.items()} if "longrope" in case else {}
    )
    path = write(tmp_path / "model.gguf", architecture, keys, tensors)
    np.testing.assert_array_equal(
        logits(jaxspec.load(path), TOKENS), logits(jaxspec.load(folder), TOKENS)
    )


@pytest.mark.parametrize(
    "architecture", ["gemma4", "qwen35", "apertus", "mistral3", "chatglm", "deepseek2"]
)
def test_other_architectures_are_refused_by_name(architecture, tmp_path):
    assert architecture not in llama_cpp.ARCHITECTURES
    path = write(
        tmp_path / "model.gguf", architecture, BASE, {"token_embd.weight": np.zeros((61, 32))}
    )
    with pytest.raises(
        CheckpointError,
        match=f"the architecture is '{architecture}': expected one of gpt2, .*gpt-oss",
    ):
        jaxspec.load(path)


@pytest.mark.parametrize(
    ("case", "change", "complaint"),
    [
        (
            "gpt-oss",
            {"blk.0.ffn_up_exps.weight": None},
            r"_exps.weight have the shapes \[\[4, 48, 32\]\]: expected two",
        ),
        (
            "gpt-oss",
            {"blk.0.ffn_up_exps.weight": np.zeros((4, 44, 32))},
            r"\[\[4, 48, 32\], \[4, 44, 32\]\]: expect",
        ),
        (
            "gpt-oss",
            {"rope_factors_short.weight": np.ones(4)},
            "rope_factors_short.weight, which is supported only",
        ),
        (
            "glm4",
            {"rope_factors_short.weight": np.ones(2)},
            "rope_factors_short.weight, which is supported only",
        ),
    ],
)
def test_damaged_files_are_refused(case, change, complaint, tmp_path):
    table, keys = CASES[case]
    family = hf_families.of(table)
    named = huggingface._theirs(model_of(family.read(table)), family)
    folder = huggingface.write_folder(tmp_path / "folder", {huggingface.CONFIG: table}, named)
    tensors = {name: x for name, x in (renamed(folder, case) | change).items() if x is not None}
    with pytest.raises(CheckpointError, match=complaint):
        jaxspec.load(write(tmp_path / "model.gguf", case, keys, tensors))
