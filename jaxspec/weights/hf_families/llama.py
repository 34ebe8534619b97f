"""Llama 2 (arXiv 2307.09288), 3, 3.1, 3.2 and 3.3 (arXiv 2407.21783)."""

from __future__ import annotations

import functools
from dataclasses import replace

from jaxspec.nets.uniform import UniformDecoder, configs
from jaxspec.weights.hf_families import decoders

_7B = UniformDecoder(32000, 4096, 11008, 32, 32, 32, 128, epsilon=1e-5, max_positions=4096)
_70B = replace(_7B, dim=8192, ff_dim=28672, layers=80, heads=64, kv_heads=8)
_8B = replace(_7B, vocab_size=128256, ff_dim=14336, kv_heads=8, rope_base=500_000.0, max_positions=8192)
_long = functools.partial(replace, rope_scaling="llama3", rope_factor=8.0, max_positions=131_072)
_SMALL = replace(_long(_8B), rope_factor=32.0, tied_head=True, ff_dim=8192)
_3_70B = replace(_70B, vocab_size=128256, rope_base=500_000.0, max_positions=8192)

SIZES = configs(
    {
        "llama-2-7b": _7B,
        "llama-2-13b": replace(_7B, dim=5120, ff_dim=13824, layers=40, heads=40, kv_heads=40),
        "llama-2-70b": _70B,
        "llama-3-8b": _8B,
        "llama-3-70b": _3_70B,
        "llama-3.1-8b": _long(_8B),
        "llama-3.1-70b": _long(_3_70B),
        "llama-3.1-405b": _long(replace(_8B, dim=16384, ff_dim=53248, layers=126, heads=128)),
        "llama-3.2-1b": replace(_SMALL, dim=2048, layers=16, head_dim=64),
        "llama-3.2-3b": replace(_SMALL, dim=3072, layers=28, heads=24),
        "llama-3.3-70b": _long(_3_70B),
    }
)

_read = decoders.reader("attention_bias", "mlp_bias")
LLAMA = decoders.family("Llama", ("llama",), "LlamaForCausalLM", _read, decoders.BIASES, SIZES)
