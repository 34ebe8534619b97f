"""Granite 3 and 4, dense (IBM): a Llama with factors of embeddings, of blocks, of scores and of
logits.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import FamilyError, Key, count, need, number


def read(table: dict, **norms: Any) -> DecoderConfig:
    """Reads the network of a config.json. `norms` are further options of a layer."""
    scale = float(table.get("residual_multiplier") or 1.0)
    config = decoders.read(
        table,
        lambda index, layer: decoders.change(layer, {}, added_scale=scale, **norms),
        **decoders.biases(table, "attention_bias", "mlp_bias"),
        query_scalar=float(table.get("attention_multiplier") or 1.0) ** -2,
    )
    return decoders.with_layers(
        config,
        embedding_scale=float(table.get("embedding_multiplier") or 1.0),
        logits_scale=1 / float(table.get("logits_scaling") or 1.0),
    )


def read_granite4(table: dict) -> DecoderConfig:
    """Reads the network of a dense Granite 4: models with Mamba layers or experts have the same
    "model_type".
    """
    positions = table.get("position_embedding_type") or "nope"
    if positions not in ("rope", "nope"):
        raise FamilyError(f"position_embedding_type is {positions!r}: expected 'rope' or 'nope'")
    if table.get("num_local_experts") is None:
        experts = 8
    else:
        experts = table["num_local_experts"]
    if experts:
        raise FamilyError(f"num_local_experts is {experts}: expected 0, a dense Granite 4")
    count = need(table, "num_hidden_layers")
    # As in transformers, a file that does not name its layers means Mamba in all of them.
    kinds = table.get("layer_types") or table.get("layers_block_type") or ["mamba"] * count
    decoders.check_layers(kinds, count, ("attention", "full_attention"))
    table = {
        **table,
        "intermediate_size": table.get("shared_intermediate_size") or 1024,
        "layer_types": None,
    }
    config = read(table)
    if positions == "rope":
        return config
    return decoders.with_layers(
        config, lambda index, layer: decoders.change(layer, {"rotary": None})
    )


_OPTIONS: dict[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 1e7, "tie_word_embeddings": True}


def _sizes(rows: dict[str, tuple[Any, ...]]) -> dict[str, DecoderConfig]:
    """Makes published sizes; after the numbers, factors of what blocks add, of scores, and of
    logits.
    """
    names = ("residual_multiplier", "attention_multiplier", "logits_scaling")
    tables = {
        name: (*row[:7], {"embedding_multiplier": 12.0, **dict(zip(names, row[7:], strict=True))})
        for name, row in rows.items()
    }
    return decoders.sizes(read, tables, **_OPTIONS)


SIZES_3 = _sizes(
    {
        "granite-3.3-2b": (49_159, 2048, 8192, 40, 32, 8, 131_072, 0.22, 0.015625, 8.0),
        "granite-3.3-8b": (49_159, 4096, 12_800, 40, 32, 8, 131_072, 0.22, 0.0078125, 16.0),
    }
)
SIZES_4 = _sizes(
    {
        "granite-4.0-350m": (100_352, 1024, 2048, 28, 16, 4, 32_768, 0.263, 0.015625, 4.0),
        "granite-4.0-1b": (100_352, 2048, 4096, 40, 16, 4, 131_072, 0.22, 0.0078125, 8.0),
        "granite-4.0-micro": (100_352, 2560, 8192, 40, 40, 8, 131_072, 0.22, 0.015625, 10.0),
    }
)

FACTORS: dict[str, Key] = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    number(),
)
GRANITE = decoders.family(
    title="Granite 3",
    model_types=("granite",),
    architecture="GraniteForCausalLM",
    read=read,
    keys=FACTORS,
    sizes=SIZES_3,
)
GRANITE4 = decoders.family(
    title="Granite 4, dense",
    model_types=("granitemoehybrid",),
    architecture="GraniteMoeHybridForCausalLM",
    read=read_granite4,
    keys=FACTORS | {"shared_intermediate_size": count(), "num_local_experts": count(least=0)},
    sizes=SIZES_4,
    renamed=dict.fromkeys(("ff/gate", "ff/wi"), "shared_mlp.input_linear")
    | {"ff/out": "shared_mlp.output_linear"},
)
