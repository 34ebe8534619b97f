"""Qwen 2 (arXiv 2407.10671) and 2.5, with biases on queries, keys and values; Qwen 3 (arXiv
2505.09388), with norms.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import count


def read_qwen2(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 2 or 2.5."""
    return decoders.read(table, qkv_bias=True, **_windows(table))


def read_qwen3(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 3; its heads' dimension is not dim / heads."""
    table = {"head_dim": 128, **table}
    return decoders.read(
        table, head_norms=True, **decoders.biases(table, "attention_bias"), **_windows(table)
    )


def _windows(table: dict) -> dict[str, Any]:
    if not table.get("use_sliding_window", False):
        return {}
    first = table.get("max_window_layers", 28)
    local = [i >= first for i in range(table.get("num_hidden_layers", 0))]
    return decoders.windows({"sliding_window": 4096, **table}, local)


_TIED = {"tie_word_embeddings": True}
_EPSILON = {"rms_norm_eps": 1e-5}
QWEN2_SIZES = decoders.sizes(
    read_qwen2,
    {
        "qwen2.5-0.5b": (151_936, 896, 4864, 24, 14, 2, 32_768, _TIED),
        "qwen2.5-1.5b": (151_936, 1536, 8960, 28, 12, 2, 131_072, _TIED),
        "qwen2.5-3b": (151_936, 2048, 11_008, 36, 16, 2, 32_768, _TIED),
        "qwen2.5-7b": (152_064, 3584, 18_944, 28, 28, 4, 131_072),
        "qwen2.5-14b": (152_064, 5120, 13_824, 48, 40, 8, 131_072, _EPSILON),
        "qwen2.5-32b": (152_064, 5120, 27_648, 64, 40, 8, 131_072, _EPSILON),
        "qwen2.5-72b": (152_064, 8192, 29_568, 80, 64, 8, 131_072, _EPSILON),
    },
    rope_theta=1e6,
)
QWEN3_SIZES = decoders.sizes(
    read_qwen3,
    {
        "qwen3-0.6b": (151_936, 1024, 3072, 28, 16, 8, 40_960, _TIED),
        "qwen3-1.7b": (151_936, 2048, 6144, 28, 16, 8, 40_960, _TIED),
        "qwen3-4b": (151_936, 2560, 9728, 36, 32, 8, 40_960, _TIED),
        "qwen3-8b": (151_936, 4096, 12_288, 36, 32, 8, 40_960),
        "qwen3-14b": (151_936, 5120, 17_408, 40, 40, 8, 40_960),
        "qwen3-32b": (151_936, 5120, 25_600, 64, 64, 8, 40_960),
    },
    rope_theta=1e6,
)
_KEYS = decoders.LAYERS | {"use_sliding_window": lambda form: form.window is not None}
_KEYS_3 = _KEYS | {"attention_bias": "qkv_bias"}
# MiMo (arXiv 2505.07608) is a Qwen 2 with a module for multi-token prediction beside it, which
# `load_drafter` reads.
QWEN2 = decoders.family(
    title="Qwen 2, MiMo",
    model_types=("qwen2", "mimo"),
    architecture="Qwen2ForCausalLM",
    read=read_qwen2,
    written=_KEYS,
    keys={"max_window_layers": count(least=0)},
    sizes=QWEN2_SIZES,
)
QWEN3 = decoders.family(
    title="Qwen 3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    read=read_qwen3,
    written=_KEYS_3,
    keys={"max_window_layers": count(least=0)},
    sizes=QWEN3_SIZES,
)
