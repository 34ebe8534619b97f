"""Qwen 2 (arXiv 2407.10671) and 2.5, with biases on queries, keys and values; Qwen 3 (arXiv 2505.09388), with norms."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformDecoder, configs
from jaxspec.weights.hf_families import decoders


def read_qwen2(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 2 or 2.5."""
    return decoders.read(table, qkv_bias=True, **_windows(table))


def read_qwen3(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 3; its heads' dimension is not dim / heads."""
    table = {"head_dim": 128, **table}
    return decoders.read(table, head_norms=True, **decoders.biases(table, "attention_bias"), **_windows(table))


def _windows(table: dict) -> dict[str, Any]:
    if not table.get("use_sliding_window", False):
        return {}
    first = table.get("max_window_layers", 28)
    local = [i >= first for i in range(table.get("num_hidden_layers", 0))]
    return decoders.windows({"sliding_window": 4096, **table}, local)


_0_5B = UniformDecoder(
    151_936, 896, 4864, 24, 14, 2, 64, tied_head=True, qkv_bias=True, rope_base=1e6, max_positions=32_768
)
_UNTIED = {"vocab_size": 152_064, "tied_head": False, "max_positions": 131_072}
_7B = replace(_0_5B, dim=3584, ff_dim=18_944, layers=28, heads=28, kv_heads=4, head_dim=128, **_UNTIED)
_large = functools.partial(replace, _7B, kv_heads=8, epsilon=1e-5)

QWEN2_SIZES = configs(
    {
        "qwen2.5-0.5b": _0_5B,
        "qwen2.5-1.5b": replace(_0_5B, dim=1536, ff_dim=8960, layers=28, heads=12, head_dim=128, max_positions=131_072),
        "qwen2.5-3b": replace(_0_5B, dim=2048, ff_dim=11_008, layers=36, heads=16, head_dim=128),
        "qwen2.5-7b": _7B,
        "qwen2.5-14b": _large(dim=5120, ff_dim=13_824, layers=48, heads=40),
        "qwen2.5-32b": _large(dim=5120, ff_dim=27_648, layers=64, heads=40),
        "qwen2.5-72b": _large(dim=8192, ff_dim=29_568, layers=80, heads=64),
    }
)

_8B = UniformDecoder(151_936, 4096, 12_288, 36, 32, 8, 128, head_norms=True, rope_base=1e6, max_positions=40_960)
_TIED = replace(_8B, tied_head=True)

QWEN3_SIZES = configs(
    {
        "qwen3-0.6b": replace(_TIED, dim=1024, ff_dim=3072, layers=28, heads=16),
        "qwen3-1.7b": replace(_TIED, dim=2048, ff_dim=6144, layers=28, heads=16),
        "qwen3-4b": replace(_TIED, dim=2560, ff_dim=9728),
        "qwen3-8b": _8B,
        "qwen3-14b": replace(_8B, dim=5120, ff_dim=17_408, layers=40, heads=40),
        "qwen3-32b": replace(_8B, dim=5120, ff_dim=25_600, layers=64, heads=64),
    }
)

_KEYS = decoders.LAYERS | {"use_sliding_window": lambda form: form.window is not None}
_KEYS_3 = _KEYS | {"attention_bias": "qkv_bias"}
# MiMo (arXiv 2505.07608) is a Qwen 2 with a module for multi-token prediction beside it, which `load_drafter` reads.
QWEN2 = decoders.family("Qwen 2, MiMo", ("qwen2", "mimo"), "Qwen2ForCausalLM", read_qwen2, _KEYS, QWEN2_SIZES)
QWEN3 = decoders.family("Qwen 3", ("qwen3",), "Qwen3ForCausalLM", read_qwen3, _KEYS_3, QWEN3_SIZES)
