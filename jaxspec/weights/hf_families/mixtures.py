"""Mixtures of experts: Qwen 3's (arXiv 2505.09388), Mixtral (arXiv 2401.04088) and gpt-oss (arXiv
2508.10925).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.experts import CLAMPED, ExpertsShape
from jaxspec.nets.shapes import LayerShape
from jaxspec.weights.hf_families import common, decoders
from jaxspec.weights.hf_families.common import FamilyError, Tensor, count, flag, number, only

# fields of `ExpertsShape`: keys
_MIXTRAL = {"count": "num_local_experts", "top": "num_experts_per_tok"}
_GPT_OSS = _MIXTRAL | {"alpha": "swiglu_alpha", "limit": "swiglu_limit"}
_QWEN3 = {"count": "num_experts", "top": "num_experts_per_tok", "dim": "moe_intermediate_size"}
_QWEN3 |= {"renormalised": "norm_topk_prob"}


def _mixed(
    config: DecoderConfig,
    count: int,
    top: int,
    is_mixture: Callable[[int], bool] = lambda index: True,
    **options: Any,
) -> DecoderConfig:
    """Puts experts in the place of the dense blocks of some layers, by default as wide as these."""
    if top > count:
        raise FamilyError(
            f"num_experts_per_tok is {top}, and there are {count} experts: expected at most all"
        )

    def changed(index: int, layer: LayerShape) -> LayerShape:
        experts = ExpertsShape(
            count, top, **{"dim": layer.ff.dim, "activation": layer.ff.activation, **options}
        )
        if is_mixture(index):
            return dataclasses.replace(layer, ff=experts)
        return layer

    return decoders.with_layers(config, changed)


def read_qwen3(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 3 with experts; some layers may be dense, and windows are of all
    layers.
    """
    only(table, shared_expert_intermediate_size=0, qkv_bias=False, use_qk_norm=True)
    # Published files say num_experts; transformers 5 writes num_local_experts.
    table = decoders.with_defaults(
        table, num_experts=table.get("num_local_experts") or 128, num_experts_per_tok=8
    )
    table = decoders.with_defaults(
        table, moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[]
    )
    if table.get("use_sliding_window"):
        windows = decoders.windows({"sliding_window": 4096, **table}, [True])
    else:
        windows = {}
    config = decoders.read(
        table, head_norms=True, **decoders.biases(table, "attention_bias"), **windows
    )
    step = table["decoder_sparse_step"]
    dense = table["mlp_only_layers"]
    if not isinstance(dense, list) or any(type(x) is not int for x in dense):
        raise FamilyError(f"mlp_only_layers is {dense!r}: expected a list of numbers of layers")
    fields = common.read_keys(table, _QWEN3, renormalised=False)
    return _mixed(
        config, **fields, is_mixture=lambda index: index not in dense and (index + 1) % step == 0
    )


def read_mixtral(table: dict) -> DecoderConfig:
    """Reads the network of a Mixtral."""
    table = decoders.with_defaults(
        table, num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5
    )
    table = decoders.with_defaults(table, num_key_value_heads=8, rope_theta=1e6)
    # Published files have no window; one that is there is of all layers.
    config = decoders.read(table, **decoders.windows(table, [True]))
    return _mixed(config, **common.read_keys(table, _MIXTRAL))


def read_gpt_oss(table: dict) -> DecoderConfig:
    """Reads the network of a gpt-oss: every other layer has a window, and heads have sinks."""
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    table = decoders.with_defaults(
        {"sliding_window": 128, **table}, rms_norm_eps=1e-5, rope_theta=150_000.0
    )
    table = decoders.with_defaults(table, head_dim=64, attention_bias=True)
    table = decoders.with_defaults(table, num_local_experts=128, num_experts_per_tok=4)
    only(table, hidden_act="silu")  # experts have their own activation, whatever this says
    # As in transformers, a file that says nothing of its positions means YaRN.
    if not (table.get("rope_parameters") or table.get("rope_scaling")):
        table |= {
            "rope_scaling": yarn,
            "max_position_embeddings": table.get("max_position_embeddings") or 131_072,
        }
    windows = decoders.windows(
        table, [i % 2 == 0 for i in range(table.get("num_hidden_layers", 0))]
    )
    config = decoders.read(table, **decoders.biases(table, "attention_bias"), **windows)
    config = decoders.with_layers(
        config, lambda index, layer: decoders.change(layer, {"sinks": True})
    )
    return _mixed(
        config,
        **common.read_keys(table, _GPT_OSS, alpha=1.702, limit=7.0),
        activation=CLAMPED,
        bias=True,
    )


def _gpt_oss_names(config: DecoderConfig) -> dict[str, Tensor]:
    """Says where the parameters lie; each expert's matrices are stored [in, out], of 4 bits,
    too.
    """
    names = decoders.names(config, renamed={"ff/router": "mlp.router"})
    turned = ("experts/inwards/weight", "experts/outwards/weight")
    return {
        path: tensor._replace(transposed=path.endswith(turned)) for path, tensor in names.items()
    }


def canonical(name: str) -> str | None:
    """Returns a Mixtral's name as published folders have it; transformers 5 has another in memory.

    >>> canonical("model.layers.0.mlp.gate.weight")
    'model.layers.0.block_sparse_moe.gate.weight'
    """
    return decoders.canonical(name.replace(".mlp.", ".block_sparse_moe."))


SIZES_QWEN3 = decoders.sizes(
    read_qwen3,
    {
        "qwen3-30b-a3b": (151_936, 2048, 6144, 48, 32, 4, 40_960),
        "qwen3-235b-a22b": (
            151_936,
            4096,
            12_288,
            94,
            64,
            4,
            40_960,
            {"moe_intermediate_size": 1536},
        ),
    },
    head_dim=128,
    norm_topk_prob=True,
    rope_theta=1e6,
)
SIZES_MIXTRAL = decoders.sizes(
    read_mixtral,
    {
        "mixtral-8x7b": (32_000, 4096, 14_336, 32, 32, 8, 32_768),
        "mixtral-8x22b": (32_768, 6144, 16_384, 56, 48, 8, 65_536),
    },
)
SIZES_GPT_OSS = decoders.sizes(
    read_gpt_oss,
    {
        "gpt-oss-20b": (201_088, 2880, 2880, 24, 64, 8, 131_072, {"num_local_experts": 32}),
        "gpt-oss-120b": (201_088, 2880, 2880, 36, 64, 8, 131_072, {"num_local_experts": 128}),
    },
)
_COUNTS = {"num_local_experts": count(least=0), "num_experts_per_tok": count()}
QWEN3_MOE = decoders.family(
    title="Qwen 3, experts",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    read=read_qwen3,
    keys=_COUNTS
    | {
        "num_experts": count(least=0),
        "moe_intermediate_size": count(),
        "shared_expert_intermediate_size": count(least=0),
        "decoder_sparse_step": count(),
        "norm_topk_prob": flag(),
    },
    sizes=SIZES_QWEN3,
    apart=("gate_proj", "up_proj", "down_proj"),
)
MIXTRAL = decoders.family(
    title="Mixtral",
    model_types=("mixtral",),
    architecture="MixtralForCausalLM",
    read=read_mixtral,
    keys=_COUNTS,
    sizes=SIZES_MIXTRAL,
    canonical=canonical,
    renamed={
        path: name.replace("mlp.", "block_sparse_moe.")
        for path, name in decoders.LLAMA.items()
        if path.startswith(("ff/router", "ff/experts"))
    },
    apart=("w1", "w3", "w2"),
)
GPT_OSS = decoders.family(
    title="gpt-oss",
    model_types=("gpt_oss",),
    architecture="GptOssForCausalLM",
    read=read_gpt_oss,
    keys=_COUNTS | {"swiglu_alpha": number(), "swiglu_limit": number()},
    sizes=SIZES_GPT_OSS,
)._replace(names=_gpt_oss_names, alternate=True)
