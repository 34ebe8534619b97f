"""The text half of Gemma 4 (Google, 2026): layers of two head sizes; the last ones may share
earlier keys.

What a folder has for images and sound is not read. Names and equations follow transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.dense_and_experts import DenseAndExpertsShape
from jaxspec.nets.experts import ExpertsShape
from jaxspec.nets.per_layer import LayerEndShape, PerLayerShape
from jaxspec.nets.rotary import RopeScaling, Rotary
from jaxspec.nets.shapes import AttentionShape, FeedForwardShape, LayerShape, NormShape
from jaxspec.weights.hf_families import common, decoders
from jaxspec.weights.hf_families.common import (
    MOST_HEAD_DIM,
    THEIRS,
    Family,
    FamilyError,
    Tensor,
    count,
    flag,
    number,
    only,
)

LOCAL = "sliding_attention"
GLOBAL = "full_attention"
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
        GLOBAL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
    },
}
_UNIFIED = {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json, with sizes of global layers in either of their two
    spellings.
    """
    table = decoders.with_defaults(text(table), **_DEFAULTS)
    only(table, use_bidirectional_attention="vision")  # of text "vision" is causal
    kinds = _kinds(table)
    rotaries = {
        layer_type: table["rope_parameters"].get(layer_type) for layer_type in (LOCAL, GLOBAL)
    }
    sizes = _sizes(table, kinds)
    heads = table["num_attention_heads"]
    biases = bool(table.get("attention_bias", False))
    first_shared = len(kinds) - table["num_kv_shared_layers"]
    activation = common.activation(table["hidden_activation"])
    side = _side(table)
    experts = None
    if table.get("enable_moe_block", False):
        experts = _experts(table, activation)

    # Layers differ in head size, kv heads, window, rotation, width and in whose keys they read:
    # each is made by itself.
    def layer(index: int) -> LayerShape:
        layer_type, (head_dim, kv_heads) = kinds[index], sizes[index]
        is_shared = index >= first_shared
        is_global = layer_type == GLOBAL
        attention = AttentionShape(
            heads,
            kv_heads,
            head_dim,
            window=None if is_global else table["sliding_window"],
            rotary=_rotary(rotaries[layer_type], layer_type, head_dim),
            query_scalar=1.0,
            qkv_bias=biases,
            out_bias=biases,
            head_norms=True,
            value_norm=True,
            keys_are_values=is_global and bool(table.get("attention_k_eq_v", False)),
            shares=_source(kinds, sizes, index, first_shared) if is_shared else None,
        )
        # Layers that have no projections of keys and values may have a block twice as wide for it.
        width = table["intermediate_size"] * (
            2 if is_shared and table.get("use_double_wide_mlp", False) else 1
        )
        ff: Any = (
            FeedForwardShape(width, activation)
            if experts is None
            else DenseAndExpertsShape(width, experts)
        )
        return LayerShape(
            attention, ff, True, LayerEndShape(side, activation), ff_norm=experts is None
        )

    return DecoderConfig(
        table["vocab_size"],
        table["hidden_size"],
        tuple(map(layer, range(len(kinds)))),
        NormShape(epsilon=float(table["rms_norm_eps"])),
        tied_head=bool(table["tie_word_embeddings"]),
        scale_embedding=True,
        logits_cap=table.get("final_logit_softcapping") or None,
        max_positions=table["max_position_embeddings"],
        side=PerLayerShape(side, table["vocab_size_per_layer_input"]) if side else None,
    )


def text(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of the text half, with what the unified models have by default."""
    half = decoders.text_half(table)
    if str(half.get("model_type")).startswith("gemma4_unified"):
        return decoders.with_defaults(half, **_UNIFIED) | {"model_type": TYPES[0]}
    return half


def _side(table: dict) -> int:
    dim = table["hidden_size_per_layer_input"]
    rows = table["vocab_size_per_layer_input"]
    for key, size, least in (
        ("hidden", dim, 0),
        ("vocab", rows, table["vocab_size"] if dim else 0),
    ):
        if type(size) is not int or size < least:
            raise FamilyError(
                f"{key}_size_per_layer_input is {size!r}: expected an integer from {least} on"
            )
    return dim


def _experts(table: dict, activation: str) -> ExpertsShape:
    count, top, width = (
        common.need(table, key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")
    )
    return ExpertsShape(count, top, width, activation)


def _kinds(table: dict) -> list[str]:
    """Returns the kind of each layer; the last one is global in any case, as in transformers."""
    count = table["num_hidden_layers"]
    kinds = table.get("layer_types") or [LOCAL if (i + 1) % 6 else GLOBAL for i in range(count)]
    decoders.check_layers(kinds, count)
    if not 0 <= table["num_kv_shared_layers"] < count:
        shared = table["num_kv_shared_layers"]
        raise FamilyError(
            f"num_kv_shared_layers is {shared}, and there are {count} layers: expected fewer"
        )
    return [*kinds[:-1], GLOBAL]


def _sizes(table: dict, kinds: list[str]) -> list[tuple[int, int]]:
    """Returns the head dimension and the key-value heads of each layer.

    transformers saves `per_layer_config`, by the layers' numbers. Published files have one number
    for global layers.
    """
    # Only where values are keys does transformers read the other number of heads.
    usual = {"head_dim": table["head_dim"], "num_key_value_heads": table["num_key_value_heads"]}
    of_global = {"head_dim": table["global_head_dim"]}
    if table.get("attention_k_eq_v", False) and table.get("num_global_key_value_heads") is not None:
        of_global["num_key_value_heads"] = table["num_global_key_value_heads"]
    named = table.get("per_layer_config")
    if named is None:
        named = {str(i): of_global for i, layer_type in enumerate(kinds) if layer_type == GLOBAL}
    if not isinstance(named, dict) or not all(
        isinstance(changes, dict) for changes in named.values()
    ):
        raise FamilyError(
            f"per_layer_config is {str(named)[:40]}: expected an object of objects, by numbers of "
            "layers"
        )
    sizes = []
    for i in range(len(kinds)):
        changes = {key: value for key, value in named.get(str(i), {}).items() if value is not None}
        others = set(changes) - set(usual)
        if others:
            raise FamilyError(
                f"per_layer_config has {', '.join(sorted(others))}: expected {', '.join(usual)}"
            )
        common.check(changes, decoders.KEYS)
        sizes.append(tuple((usual | changes).values()))
    return sizes


def _source(kinds: list[str], sizes: list[tuple[int, int]], index: int, first_shared: int) -> int:
    """Returns the layer whose keys a layer reads: the last one of its kind that stores keys."""
    sources = [i for i in range(first_shared) if kinds[i] == kinds[index]]
    if not sources or sizes[sources[-1]] != sizes[index]:
        raise FamilyError(
            f"layer {index} shares keys: expected an earlier {kinds[index]} layer with heads of "
            "its size"
        )
    return sources[-1]


def _rotary(scaling: dict | None, layer_type: str, head_dim: int) -> Rotary:
    scaling = scaling or {}
    decoders.KEYS["rope_parameters"]("rope_parameters", scaling)
    form = scaling.get("rope_type", "default")
    share = float(scaling.get(decoders.PARTIAL) or 1.0)
    base = float(common.need(scaling, "rope_theta"))
    factor = float(scaling.get("factor") or 1.0)
    if form == "proportional":
        # Frequencies are those of a whole head; the pairs beyond the share stand still.
        if factor == 1.0:
            scale = RopeScaling()
        else:
            scale = RopeScaling("linear", factor)
        return Rotary(base, 2 * int(share * head_dim // 2), scale, proportional=True)
    if form != "default" or share != 1.0:
        described = f"the rotation of {layer_type} is {form!r} for a share of {share}"
        raise FamilyError(f"{described}: expected 'proportional', or 'default' for all of a head")
    return Rotary(base)


def write(config: DecoderConfig) -> dict[str, Any]:
    """Writes config.json with the keys of published files."""
    layers = config.layers
    local = next((layer for layer in layers if layer.attention.window is not None), layers[-1])
    last = layers[-1]
    side = config.side
    shared = [layer for layer in layers if layer.attention.shares is not None]
    local_rotary = local.attention.rotary or Rotary()
    global_rotary = last.attention.rotary or Rotary()
    proportional = {
        "rope_type": "proportional",
        decoders.PARTIAL: (global_rotary.dims or 0) / last.attention.head_dim,
        "rope_theta": global_rotary.base,
        "factor": global_rotary.scaling.factor,
    }
    default = {"rope_type": "default", "rope_theta": global_rotary.base}
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": layers[0].ff.dim,
        "num_hidden_layers": len(layers),
        "num_attention_heads": last.attention.heads,
        "num_key_value_heads": local.attention.kv_heads,
        "num_global_key_value_heads": last.attention.kv_heads,
        "head_dim": local.attention.head_dim,
        "global_head_dim": last.attention.head_dim,
        "hidden_activation": THEIRS[getattr(layers[0].ff, "activation", "gelu")],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm.epsilon,
        "sliding_window": local.attention.window or _DEFAULTS["sliding_window"],
        "layer_types": [GLOBAL if layer.attention.window is None else LOCAL for layer in layers],
        "final_logit_softcapping": config.logits_cap,
        "tie_word_embeddings": config.tied_head,
        "attention_bias": last.attention.qkv_bias,
        "attention_k_eq_v": last.attention.keys_are_values,
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": any(layer.ff.dim != layers[0].ff.dim for layer in shared),
        "hidden_size_per_layer_input": side.dim if isinstance(side, PerLayerShape) else 0,
        "vocab_size_per_layer_input": side.vocab_size
        if isinstance(side, PerLayerShape)
        else config.vocab_size,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": local_rotary.base},
            GLOBAL: proportional if global_rotary.proportional else default,
        },
    } | _experts_keys(layers[0].ff)


def _experts_keys(ff: Any) -> dict[str, Any]:
    if not isinstance(ff, DenseAndExpertsShape):
        return {}
    counts = {
        "num_experts": ff.experts.count,
        "top_k_experts": ff.experts.top,
        "moe_intermediate_size": ff.experts.dim,
    }
    return {"enable_moe_block": True, "hidden_activation": THEIRS[ff.experts.activation], **counts}


MODULES = decoders.WHOLE | {
    "side/table": "model.embed_tokens_per_layer",
    "side/projection": "model.per_layer_model_projection",
    "side/norm": "model.per_layer_projection_norm",
}
LAYER = {  # a layer's modules beside Gemma 2's: its end, and a block of experts and a dense one
    "last/scalar": "layer_scalar",
    "last/gate": "per_layer_input_gate",
    "last/out": "per_layer_projection",
    "last/norm": "post_per_layer_input_norm",
    "ff/dense_norm": "pre_feedforward_layernorm",
    "ff/dense_post_norm": "post_feedforward_layernorm_1",
    "ff/experts_norm": "pre_feedforward_layernorm_2",
    "ff/experts_post_norm": "post_feedforward_layernorm_2",
    "ff/dense/gate": "mlp.gate_proj",
    "ff/dense/wi": "mlp.up_proj",
    "ff/dense/out": "mlp.down_proj",
    "ff/router": "router.proj",
    "ff/router_scale": "router.scale",
    "ff/expert_scale": "router.per_expert_scale",
    "ff/experts/inwards/weight": "experts.gate_up_proj",
    "ff/experts/outwards/weight": "experts.down_proj",
}


def modules(config: DecoderConfig) -> dict[str, str]:
    """Names the modules of a network."""
    return MODULES | decoders.layer_modules(config, LAYER)


def names(config: DecoderConfig) -> dict[str, Tensor]:
    """Says where each parameter lies."""
    return common.names_by(modules(config), config)


def unused(config: DecoderConfig) -> set[str]:
    """Names the tensors that published files hold for layers that store no keys."""
    without = [i for i, layer in enumerate(config.layers) if layer.attention.shares is not None]
    parts = (
        "k_proj.weight",
        "v_proj.weight",
        "k_norm.weight",
        "v_norm.weight",
        "k_proj.bias",
        "v_proj.bias",
    )
    return {f"model.layers.{i}.self_attn.{suffix}" for i in without for suffix in parts}


_E2B = {
    "layer_types": ([LOCAL] * 4 + [GLOBAL]) * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
_LARGE = {"attention_k_eq_v": True, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
_HEADS = "num_global_key_value_heads"
SIZES = decoders.sizes(
    read,
    {
        "gemma-4-e2b": (262_144, 1536, 6144, 35, 8, 1, 131_072, _E2B),
        "gemma-4-e4b": (262_144, 2560, 10_240, 42, 8, 2, 131_072, {"num_kv_shared_layers": 18}),
        "gemma-4-12b": (262_144, 3840, 15_360, 48, 16, 8, 262_144, _LARGE | {_HEADS: 1}),
        "gemma-4-31b": (262_144, 5376, 21_504, 60, 32, 16, 262_144, _LARGE | {_HEADS: 4}),
        "gemma-4-26b-a4b": (
            262_144,
            2816,
            2112,
            30,
            16,
            8,
            262_144,
            _LARGE | _EXPERTS | {_HEADS: 2},
        ),
    },
    final_logit_softcapping=30.0,
    model_type="gemma4_text",
)
KEYS = decoders.KEYS | {
    "global_head_dim": count(limit=MOST_HEAD_DIM),
    "num_global_key_value_heads": count(),
    "num_kv_shared_layers": count(least=0),
    "num_experts": count(least=0),
    "top_k_experts": count(),
    "moe_intermediate_size": count(),
    "final_logit_softcapping": number(or_zero=True),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), flag()),
}
TYPES = ("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified")
GEMMA4 = Family(
    title="Gemma 4, text",
    model_types=TYPES,
    architecture="Gemma4ForCausalLM",
    keys=decoders.with_text(KEYS),
    read=read,
    write=write,
    names=names,
    canonical=decoders.canonical_text,
    text=text,
    sizes=SIZES,
    unused=unused,
)
