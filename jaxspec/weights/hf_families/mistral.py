"""Mistral (arXiv 2310.06825): a Llama whose layers, in its first version, attend to a window. And
Ministral 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import FamilyError, need


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json; where it has a window, every layer does."""
    return decoders.read(table, **decoders.windows({"sliding_window": 4096, **table}, [True]))


def read_ministral3(table: dict) -> DecoderConfig:
    """Reads the network of a Ministral 3: beyond the rows of its training, queries grow with their
    positions.
    """
    table = decoders.with_defaults(table, rms_norm_eps=1e-5, rope_theta=1e6, head_dim=128)
    # As in transformers, positions are YaRN's where the file has no rope_parameters.
    if not (table.get("rope_parameters") or table.get("rope_scaling")):
        table |= {
            "rope_parameters": _ROPE,
            "max_position_embeddings": table.get("max_position_embeddings") or 262_144,
        }
    rope = decoders.rotary_keys(table)
    beta = rope.get("llama_4_scaling_beta")

    def changed(index: int, layer: LayerShape) -> LayerShape:
        turn = layer.attention.rotary
        if turn is None or not beta:
            return layer
        scaling = replace(turn.scaling, original=need(rope, "original_max_position_embeddings"))
        return decoders.change(
            layer, {"rotary": replace(turn, scaling=scaling, query_beta=float(beta))}
        )

    return decoders.read(table, changed, **decoders.windows(table, [True]))


def text(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text half."""
    if table.get("text_config") is None:
        return {**table, "model_type": "mistral"}
    # As in transformers, a file that does not say whether the head is tied means that it is.
    return decoders.with_defaults(
        decoders.text_half(table), tie_word_embeddings=True, model_type="mistral"
    )


def read_mistral3(table: dict) -> DecoderConfig:
    """Reads the text half of a Mistral Small 3 or a Ministral 3 that also sees."""
    readers = {"mistral": read, "ministral3": read_ministral3}
    half = text(table)
    model_type = half["model_type"]
    if model_type not in readers:
        raise FamilyError(
            f"text_config.model_type is {model_type!r}: expected one of {', '.join(readers)}"
        )
    return readers[model_type](half)


SIZES = decoders.sizes(
    read,
    {
        "mistral-7b-v0.1": (32_000, 4096, 14_336, 32, 32, 8, 32_768),
        "mistral-7b-v0.2": (
            32_000,
            4096,
            14_336,
            32,
            32,
            8,
            32_768,
            {"sliding_window": None, "rope_theta": 1e6},
        ),
        "mistral-7b-v0.3": (
            32_768,
            4096,
            14_336,
            32,
            32,
            8,
            32_768,
            {"sliding_window": None, "rope_theta": 1e6},
        ),
    },
    rms_norm_eps=1e-5,
)
MISTRAL = decoders.family(
    title="Mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    read=read,
    sizes=SIZES,
)
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
}
_ROPE |= {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3_SIZES = decoders.sizes(
    read_ministral3,
    {
        "ministral-3-3b": (131_072, 3072, 9216, 26, 32, 8, None, {"tie_word_embeddings": True}),
        "ministral-3-8b": (131_072, 4096, 14_336, 34, 32, 8),
        "ministral-3-14b": (131_072, 5120, 16_384, 40, 32, 8),
    },
)
_OPTIONS: dict[str, Any] = {"head_dim": 128, "rope_theta": 1e8, "rms_norm_eps": 1e-5}
MISTRAL3_SIZES = decoders.sizes(
    read,
    {"mistral-small-24b": (131_072, 5120, 32_768, 40, 32, 8, 32_768)},
    sliding_window=None,
    **_OPTIONS,
)
MINISTRAL_SIZES = decoders.sizes(
    read,
    {"ministral-8b": (131_072, 4096, 12_288, 36, 32, 8, 32_768)},
    sliding_window=32_768,
    **_OPTIONS,
)

MISTRAL3 = decoders.family(
    title="Mistral Small 3, text",
    model_types=("mistral3",),
    architecture="MistralForCausalLM",
    read=read_mistral3,
    keys=decoders.with_text(decoders.KEYS),
    sizes=MISTRAL3_SIZES,
    canonical=decoders.canonical_text,
    text=text,
)
MINISTRAL3 = decoders.family(
    title="Ministral 3",
    model_types=("ministral3",),
    architecture="Ministral3ForCausalLM",
    read=read_ministral3,
    sizes=MINISTRAL3_SIZES,
)
MINISTRAL = decoders.family(
    title="Ministral 8B",
    model_types=("ministral",),
    architecture="MinistralForCausalLM",
    read=read,
    sizes=MINISTRAL_SIZES,
)
