"""Mistral (arXiv 2310.06825): a Llama whose layers, in its first version, attend to a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformDecoder, configs
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import only


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json; where it has a window, every layer does."""
    return decoders.read(table, **decoders.windows({"sliding_window": 4096, **table}, [True]))


def read_mistral3(table: dict) -> DecoderConfig:
    """Reads the text half of a Mistral Small 3 that also sees. A Ministral 3, which scales queries, is refused."""
    if table.get("text_config") is not None:
        only(
            {"text_config.model_type": table["text_config"].get("model_type")}, **{"text_config.model_type": "mistral"}
        )
    return read(decoders.text_half(table))


def _keys(form: UniformDecoder) -> dict[str, Any]:
    return {"sliding_window": form.window if all(form.local) else None}


def _ministral_keys(form: UniformDecoder) -> dict[str, Any]:
    return {"sliding_window": form.window, "layer_types": decoders.layer_types(form)}


_V1 = UniformDecoder(32000, 4096, 14336, 32, 32, 8, 128, epsilon=1e-5, window=4096, local=(True,), max_positions=32_768)

SIZES = configs(
    {
        "mistral-7b-v0.1": _V1,
        "mistral-7b-v0.2": replace(_V1, window=None, local=(), rope_base=1e6),
        "mistral-7b-v0.3": replace(_V1, window=None, local=(), rope_base=1e6, vocab_size=32_768),
    }
)

MISTRAL = decoders.family("Mistral", ("mistral",), "MistralForCausalLM", read, _keys, SIZES)
MISTRAL3 = decoders.family(
    *("Mistral 3, text", ("mistral3",), "MistralForCausalLM", read_mistral3, _keys, {}, decoders.canonical_text)
)
MINISTRAL = decoders.family("Ministral", ("ministral",), "MinistralForCausalLM", read, _ministral_keys, {})
