"""Granite 3 and 4, dense (IBM): a Llama with factors of embeddings, of blocks, of scores and of logits."""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import FamilyError, need


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json."""
    scale = float(table.get("residual_multiplier") or 1.0)
    config = decoders.read(
        table,
        lambda index, layer: decoders.change(layer, {}, added_scale=scale),
        **decoders.biases(table, "attention_bias", "mlp_bias"),
        query_scalar=float(table.get("attention_multiplier") or 1.0) ** -2,
    )
    return decoders.with_layers(
        config,
        embedding_scale=float(table.get("embedding_multiplier") or 1.0),
        logits_scale=1 / float(table.get("logits_scaling") or 1.0),
    )


def read_granite4(table: dict) -> DecoderConfig:
    """Reads the network of a dense Granite 4: models with Mamba layers or experts have the same "model_type"."""
    if (positions := table.get("position_embedding_type") or "nope") not in ("rope", "nope"):
        raise FamilyError(f"position_embedding_type is {positions!r}: expected 'rope' or 'nope'")
    if experts := 8 if table.get("num_local_experts") is None else table["num_local_experts"]:
        raise FamilyError(f"num_local_experts is {experts}: expected 0, a dense Granite 4")
    count = need(table, "num_hidden_layers")
    # As in transformers, a file that does not name its layers means Mamba in all of them.
    kinds = table.get("layer_types") or table.get("layers_block_type") or ["mamba"] * count
    decoders.check_layers(kinds, count, ("attention", "full_attention"))
    table = {**table, "intermediate_size": table.get("shared_intermediate_size") or 1024, "layer_types": None}
    config = read(table)
    if positions == "rope":
        return config
    return decoders.with_layers(config, lambda index, layer: decoders.change(layer, {"rotary": None}))


def _factors(config: DecoderConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": first.added_scale,
        "attention_multiplier": first.attention.scale,
        "logits_scaling": 1 / config.logits_scale,
    }


def _granite4_factors(config: DecoderConfig) -> dict[str, Any]:
    rotates = config.layers[0].attention.rotary is not None
    return _factors(config) | {"position_embedding_type": "rope" if rotates else None}


_MICRO = {"vocab_size": 100_352, "hidden_size": 2560, "shared_intermediate_size": 8192, "num_hidden_layers": 40}
_MICRO |= {"num_attention_heads": 40, "num_key_value_heads": 8, "num_local_experts": 0, "rms_norm_eps": 1e-5}
_MICRO |= {"max_position_embeddings": 131_072, "position_embedding_type": "rope", "rope_theta": 1e7}
_MICRO |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
_MICRO |= {"logits_scaling": 10.0, "tie_word_embeddings": True}


SIZES = {"granite-4.0-micro": read_granite4(_MICRO | {"layer_types": ["attention"] * 40})}

_KEYS_4 = {"shared_intermediate_size": "ff_dim", "intermediate_size": "ff_dim", "num_local_experts": 0}
_KEYS_4 |= {"mamba_n_heads": 1}  # transformers checks that it divides hidden_size, though no layer is Mamba
_KEYS_4 |= {"attention_bias": "qkv_bias", "layer_types": decoders.layer_types}
GRANITE = decoders.family("Granite 3", ("granite",), "GraniteForCausalLM", read, decoders.BIASES, more_keys=_factors)
GRANITE4 = decoders.family(
    *("Granite 4, dense", ("granitemoehybrid",), "GraniteMoeHybridForCausalLM", read_granite4, _KEYS_4, SIZES),
    more_keys=_granite4_factors,
    # Both projections inwards are halves of one tensor.
    renamed=dict.fromkeys(("ff/gate", "ff/wi"), "shared_mlp.input_linear") | {"ff/out": "shared_mlp.output_linear"},
)
