"""Llama 2 (arXiv 2307.09288), 3, 3.1, 3.2 and 3.3 (arXiv 2407.21783)."""

from __future__ import annotations

from jaxspec.weights.hf_families import decoders

_3 = {"rope_theta": 500_000.0}
_SCALING = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SCALING |= {"original_max_position_embeddings": 8192}
_3_1 = _3 | {"rope_scaling": _SCALING | {"factor": 8.0}}
_3_2 = _3 | {"rope_scaling": _SCALING | {"factor": 32.0}, "tie_word_embeddings": True}
_read = decoders.reader("attention_bias", "mlp_bias")
SIZES = decoders.sizes(
    _read,
    {
        "llama-2-7b": (32_000, 4096, 11_008, 32, 32, 32, 4096),
        "llama-2-13b": (32_000, 5120, 13_824, 40, 40, 40, 4096),
        "llama-2-70b": (32_000, 8192, 28_672, 80, 64, 8, 4096),
        "llama-3-8b": (128_256, 4096, 14_336, 32, 32, 8, 8192, _3),
        "llama-3-70b": (128_256, 8192, 28_672, 80, 64, 8, 8192, _3),
        "llama-3.1-8b": (128_256, 4096, 14_336, 32, 32, 8, 131_072, _3_1),
        "llama-3.1-70b": (128_256, 8192, 28_672, 80, 64, 8, 131_072, _3_1),
        "llama-3.1-405b": (128_256, 16_384, 53_248, 126, 128, 8, 131_072, _3_1),
        "llama-3.2-1b": (128_256, 2048, 8192, 16, 32, 8, 131_072, _3_2),
        "llama-3.2-3b": (128_256, 3072, 8192, 28, 24, 8, 131_072, _3_2),
        "llama-3.3-70b": (128_256, 8192, 28_672, 80, 64, 8, 131_072, _3_1),
    },
    rms_norm_eps=1e-5,
)
LLAMA = decoders.family(
    title="Llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    read=_read,
    written=decoders.BIASES,
    sizes=SIZES,
)
