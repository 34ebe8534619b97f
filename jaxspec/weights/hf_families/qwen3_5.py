"""Qwen 3.5, 3.6 and 3.8, dense: three layers of the gated delta rule to one of attention with an
output gate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxspec.nets import net_of
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.delta import DeltaShape
from jaxspec.nets.rotary import Rotary
from jaxspec.nets.shapes import AttentionShape, LayerShape
from jaxspec.nets.uniform import nearest
from jaxspec.weights.hf_families import common, decoders
from jaxspec.weights.hf_families.common import Family, Tensor, count, only

TYPES = ("qwen3_5_text", "qwen3_5")
KINDS = {"linear_attention": True, "full_attention": False}
DELTA = {  # fields of a `DeltaShape`: keys of config.json
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
DEFAULTS = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
SHARE = 0.25  # of a head's dimensions is rotated
# where no layer has any
ATTENTION = AttentionShape(16, 4, 256, rotary=Rotary(dims=64), head_norms=True, gate=True)


def read(table: dict) -> DecoderConfig:
    """Reads the network of a Qwen 3.5; of a model that also sees, the text's.

    Positions of pictures have three parts (mrope), which are one and the same in text.
    """
    table = decoders.with_defaults(decoders.text_half(table), **DEFAULTS)
    table, share = decoders.partial_rotary(table, SHARE)
    only(
        table,
        hidden_act="silu",
        attn_output_gate=True,
        output_gate_type="swish",
        mamba_ssm_dtype="float32",
    )
    only(table, num_experts=0)
    delta = DeltaShape(**{field: int(table[key]) for field, key in DELTA.items()})
    # A list of layers, where there is one, goes before the interval.
    count = int(table["num_hidden_layers"])
    interval = int(table["full_attention_interval"])
    usual = [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)
    ]
    kinds = table.get("layer_types") or usual
    decoders.check_layers(kinds, count, tuple(KINDS))

    # Both kinds of layers have the norms and the feed-forward block of a Qwen 3.
    def changed(index: int, layer: LayerShape) -> LayerShape:
        if KINDS[kinds[index]]:
            return replace(layer, attention=delta)
        return decoders.change(layer, {"gate": True, **decoders.turned(layer, share)})

    biases = decoders.biases(table, "attention_bias")
    return decoders.read(table, changed, head_norms=True, norms_from_one=True, **biases)


def _attends(config: DecoderConfig) -> DecoderConfig:
    """Returns the configuration with attention in every layer. Raises ValueError for other models."""
    # What a Llama's writer needs of each layer is there once all are alike.
    mixers = [layer.attention for layer in config.layers]
    attention = next((x for x in mixers if isinstance(x, AttentionShape)), ATTENTION)
    if not any(isinstance(x, DeltaShape) for x in mixers) and not attention.gate:
        raise ValueError("no layer has the gated delta rule or attention with an output gate")
    return decoders.with_layers(config, lambda index, layer: replace(layer, attention=attention))


def _write(config: DecoderConfig) -> dict[str, Any]:
    attends = _attends(config)
    form = nearest(attends)
    kinds = [
        "linear_attention" if isinstance(x.attention, DeltaShape) else "full_attention"
        for x in config.layers
    ]
    delta = next((x.attention for x in config.layers if isinstance(x.attention, DeltaShape)), None)
    numbers = {}
    if delta is not None:
        numbers = {key: getattr(delta, field) for field, key in DELTA.items()}
    dims = (attends.layers[0].attention.rotary or Rotary()).dims
    head_dim = form.head_dim
    rotation = {
        "rope_theta": form.rope_base,
        **decoders.scaling_keys(form),
        decoders.PARTIAL: (dims or head_dim) / head_dim,
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": TYPES[0],
        **decoders.size_keys(form),
        **{"hidden_act": "silu", "attention_bias": form.qkv_bias, "rope_parameters": rotation},
        **{"layer_types": kinds, **numbers},
    }


LINEAR = {"rate": "A_log", "bias": "dt_bias", "convolution": "conv1d.weight", "norm": "norm"}
LINEAR |= {"gate": "in_proj_z", "beta": "in_proj_b", "decay": "in_proj_a", "out": "out_proj"}
# Queries, keys and values of all heads are rows of one tensor, one after the other.
LINEAR |= dict.fromkeys(("query", "key", "value"), "in_proj_qkv")
_DELTA = {
    f"layers_{{}}/attention/{path}": f"model.layers.{{}}.linear_attn.{name}"
    for path, name in LINEAR.items()
}


def _names(config: DecoderConfig) -> dict[str, Tensor]:
    modules = decoders.WHOLE | decoders.layer_modules(config, {})
    paths = net_of(config).paths(config)
    recurrent = tuple(
        f"layers_{i}/" for i, x in enumerate(config.layers) if isinstance(x.attention, DeltaShape)
    )
    # Either kind of layer has a query, a key and a value: the layer says which table they are of.
    others = common.named((path for path in paths if not path.startswith(recurrent)), modules)
    return others | common.named(
        (path for path in paths if path.startswith(recurrent)), modules | _DELTA
    )


_TIED = {"tie_word_embeddings": True}
_NARROW = {"linear_num_value_heads": 16}
SIZES = decoders.sizes(
    read,
    {
        "qwen3.5-0.8b": (248_320, 1024, 3584, 24, 8, 2, 262_144, _TIED | _NARROW),
        "qwen3.5-2b": (248_320, 2048, 6144, 24, 8, 2, 262_144, _TIED | _NARROW),
        "qwen3.5-4b": (248_320, 2560, 9216, 32, 16, 4, 262_144, _TIED),
        "qwen3.5-9b": (248_320, 4096, 12_288, 32, 16, 4, 262_144),
        "qwen3.5-27b": (248_320, 5120, 17_408, 64, 24, 4, 262_144, {"linear_num_value_heads": 48}),
    },
    rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
)
QWEN3_5 = Family(
    title="Qwen 3.5, 3.6 and 3.8, text",
    model_types=TYPES,
    architecture="Qwen3_5ForCausalLM",
    text=decoders.text_half,
    keys=decoders.with_text(
        decoders.KEYS
        | dict.fromkeys((*DELTA.values(), "full_attention_interval"), count())
        | {"num_experts": count(least=0)}
    ),
    read=read,
    write=_write,
    names=_names,
    canonical=decoders.canonical_text,
    sizes=SIZES,
)
