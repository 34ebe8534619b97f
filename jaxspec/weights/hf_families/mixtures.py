"""Mixtures of experts: Qwen 3's (arXiv 2505.09388) and Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.experts import ExpertsShape
from jaxspec.nets.shapes import LayerShape
from jaxspec.nets.uniform import UniformDecoder
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import FamilyError


def _mixed(
    config: DecoderConfig,
    count: int,
    top: int,
    dim: int,
    is_mixture: Callable[[int], bool] = lambda index: True,
    **options: Any,
) -> DecoderConfig:
    """Puts experts in the place of the dense blocks of some layers."""
    if top > count:
        raise FamilyError(f"num_experts_per_tok is {top}, and there are {count} experts: expected at most all")

    def changed(index: int, layer: LayerShape) -> LayerShape:
        experts = ExpertsShape(count, top, dim, **{"activation": layer.ff.activation, **options})
        return dataclasses.replace(layer, ff=experts) if is_mixture(index) else layer

    return decoders.with_layers(config, changed)


def read_qwen3(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 3 with experts; some layers may be dense, and windows are of all layers."""
    # Published files say num_experts; transformers 5 writes num_local_experts.
    table = decoders.with_defaults(table, num_experts=table.get("num_local_experts") or 128, num_experts_per_tok=8)
    table = decoders.with_defaults(table, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[])
    windows = decoders.windows({"sliding_window": 4096, **table}, [True]) if table.get("use_sliding_window") else {}
    config = decoders.read(table, head_norms=True, **decoders.attention_biases(table), **windows)
    step, dense = table["decoder_sparse_step"], table["mlp_only_layers"]
    if not isinstance(dense, list) or any(type(x) is not int for x in dense):
        raise FamilyError(f"mlp_only_layers is {dense!r}: expected a list of numbers of layers")
    return _mixed(
        config,
        table["num_experts"],
        table["num_experts_per_tok"],
        table["moe_intermediate_size"],
        lambda index: index not in dense and (index + 1) % step == 0,
        renormalised=bool(table.get("norm_topk_prob", False)),
    )


def read_mixtral(table: dict) -> DecoderConfig:
    """Reads the network of a Mixtral."""
    table = decoders.with_defaults(table, num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5)
    table = decoders.with_defaults(table, num_key_value_heads=8, rope_theta=1e6)
    # Published files have no window; one that is there is of all layers.
    config = decoders.read(table, **decoders.windows(table, [True]))
    sizes = table["num_local_experts"], table["num_experts_per_tok"], table["intermediate_size"]
    return _mixed(config, *sizes)


def _qwen3_keys(form: UniformDecoder) -> dict[str, Any]:
    windows = {"use_sliding_window": form.window is not None, "sliding_window": form.window}
    return windows | {"attention_bias": form.qkv_bias}


def _qwen3_experts(config: DecoderConfig) -> dict[str, Any]:
    experts = decoders.mixture(config)
    dense = [i for i, layer in enumerate(config.layers) if not isinstance(layer.ff, ExpertsShape)]
    # A list of dense layers says all that a step says, and more.
    sizes = {"num_experts": experts.count, "moe_intermediate_size": experts.dim}
    layers = {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return sizes | layers | {"num_experts_per_tok": experts.top, "norm_topk_prob": experts.renormalised}


def _mixtral_keys(form: UniformDecoder) -> dict[str, Any]:
    return {"sliding_window": form.window if all(form.local) else None}


def _mixtral_experts(config: DecoderConfig) -> dict[str, Any]:
    experts = decoders.mixture(config)
    return {"num_local_experts": experts.count, "num_experts_per_tok": experts.top}


def canonical(name: str) -> str | None:
    """Returns a Mixtral's name as published folders have it; transformers 5 has another in memory.

    >>> canonical("model.layers.0.mlp.gate.weight")
    'model.layers.0.block_sparse_moe.gate.weight'
    """
    return decoders.canonical(name.replace(".mlp.", ".block_sparse_moe."))


_30B = UniformDecoder(151_936, 2048, 6144, 48, 32, 4, 128, head_norms=True, rope_base=1e6, max_positions=40_960)
_8X7B = UniformDecoder(32_000, 4096, 14_336, 32, 32, 8, 128, epsilon=1e-5, rope_base=1e6, max_positions=32_768)
SIZES_QWEN3 = {"qwen3-30b-a3b": _mixed(_30B.config(), 128, 8, 768)}
SIZES_MIXTRAL = {"mixtral-8x7b": _mixed(_8X7B.config(), 8, 2, 14_336)}

QWEN3_MOE = decoders.family(
    *("Qwen 3, experts", ("qwen3_moe",), "Qwen3MoeForCausalLM", read_qwen3, _qwen3_keys, SIZES_QWEN3),
    more_keys=_qwen3_experts,
    experts=("gate_proj", "up_proj", "down_proj"),
)
MIXTRAL = decoders.family(
    *("Mixtral", ("mixtral",), "MixtralForCausalLM", read_mixtral, _mixtral_keys, SIZES_MIXTRAL, canonical),
    more_keys=_mixtral_experts,
    renamed={
        path: name.replace("mlp.", "block_sparse_moe.")
        for path, name in decoders.LLAMA.items()
        if path.startswith(("ff/router", "ff/experts"))
    },
    experts=("w1", "w3", "w2"),
)
