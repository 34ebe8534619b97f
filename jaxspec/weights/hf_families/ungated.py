"""Feed-forward blocks without a gate: StarCoder 2 (arXiv 2402.19173), Nemotron-4 (arXiv 2402.16819), Arcee."""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape, NormShape
from jaxspec.nets.uniform import UniformDecoder
from jaxspec.weights.hf_families import decoders


def _ungated(index: int, layer: LayerShape) -> LayerShape:
    return decoders.change(layer, {}, {"gated": False})


def read_starcoder2(table: dict) -> DecoderConfig:
    """Reads the network of a StarCoder 2."""
    defaults = {"norm_epsilon": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
    table = decoders.with_defaults(table, **defaults)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ff_bias"), bool(table.get("use_bias", True)))
    config = decoders.read(table, _ungated, **biases, **decoders.windows(table, [True]))
    return decoders.with_layers(config, norm=NormShape("layer", float(table["norm_epsilon"])))


def read_nemotron(table: dict) -> DecoderConfig:
    """Reads the network of a Nemotron-4 or a Minitron: half of each head is rotated."""
    table, share = decoders.partial_rotary(table, share=0.5)
    table = decoders.with_defaults(table, norm_eps=1e-5, hidden_act="relu2")

    biases = decoders.attention_biases(table) | {"ff_bias": bool(table.get("mlp_bias", False))}
    config = decoders.read(
        table, lambda index, layer: decoders.change(layer, decoders.turned(layer, share), {"gated": False}), **biases
    )
    return decoders.with_layers(config, norm=NormShape("layer", float(table["norm_eps"]), from_one=True))


def read_arcee(table: dict) -> DecoderConfig:
    """Reads the network of an Arcee Foundation Model."""
    table = decoders.with_defaults(table, rms_norm_eps=1e-5, hidden_act="relu2")
    return decoders.read(
        table, _ungated, **decoders.attention_biases(table), ff_bias=bool(table.get("mlp_bias", False))
    )


def _starcoder2_keys(form: UniformDecoder) -> dict[str, Any]:
    window = form.window if all(form.local) else None
    return {"use_bias": form.qkv_bias, "norm_epsilon": form.epsilon, "rms_norm_eps": None, "sliding_window": window}


def _arcee_keys(form: UniformDecoder) -> dict[str, Any]:
    return {"attention_bias": form.qkv_bias, "mlp_bias": form.ff_bias}


def _nemotron_keys(form: UniformDecoder) -> dict[str, Any]:
    return _arcee_keys(form) | {"norm_eps": form.epsilon, "rms_norm_eps": None}


STARCODER2 = decoders.family(
    "StarCoder 2",
    ("starcoder2",),
    "Starcoder2ForCausalLM",
    read_starcoder2,
    _starcoder2_keys,
    {},
    renamed={"ff/wi": "mlp.c_fc", "ff/out": "mlp.c_proj"},
)
NEMOTRON = decoders.family(
    "Nemotron-4",
    ("nemotron",),
    "NemotronForCausalLM",
    read_nemotron,
    _nemotron_keys,
    {},
    more_keys=decoders.partial_key,
)
ARCEE = decoders.family("Arcee", ("arcee",), "ArceeForCausalLM", read_arcee, _arcee_keys, {})
