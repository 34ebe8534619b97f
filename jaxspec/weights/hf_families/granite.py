"""Granite 3 (IBM): a Llama with a factor on embeddings, on what each block adds, on scores and on logits."""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformDecoder
from jaxspec.weights.hf_families import decoders


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json."""
    scale = float(table.get("residual_multiplier") or 1.0)
    config = decoders.read(
        table,
        lambda index, layer: decoders.change(layer, {}, added_scale=scale),
        **decoders.attention_biases(table),
        ff_bias=bool(table.get("mlp_bias", False)),
        query_scalar=float(table.get("attention_multiplier") or 1.0) ** -2,
    )
    return decoders.with_layers(
        config,
        embedding_scale=float(table.get("embedding_multiplier") or 1.0),
        logits_scale=1 / float(table.get("logits_scaling") or 1.0),
    )


def _keys(form: UniformDecoder) -> dict[str, Any]:
    return {"attention_bias": form.qkv_bias, "mlp_bias": form.ff_bias}


def _factors(config: DecoderConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": first.added_scale,
        "attention_multiplier": first.attention.scale,
        "logits_scaling": 1 / config.logits_scale,
    }


GRANITE = decoders.family("Granite 3", ("granite",), "GraniteForCausalLM", read, _keys, {}, more_keys=_factors)
