"""The metadata of a GGUF file as the config.json of the same model.

llama.cpp names an architecture, and its sizes by keys that begin with that name (the GGUF
specification lists them). Some facts are not among the metadata; llama.cpp's code has them for each
architecture, or the tensors show them.

The function of an architecture takes the keys that it obeys. One that is left is without effect
(`UNREAD`), or has a value that changes nothing (`NEUTRAL`), or is refused by name: so none that
llama.cpp may obey is passed over.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jaxspec.nets.rotary import yarn_magnitude
from jaxspec.weights.hf_families import common, decoders
from jaxspec.weights.hf_families.common import FamilyError
from jaxspec.weights.tensors import ArrayShape

_WINDOW = {"sliding_window": "attention.sliding_window"}
_LOGITS = {"logit_scale": "logit_scale"}

UNREAD = {  # by llama.cpp, when it generates text with these architectures
    *(
        "vocab_size",
        "tensor_data_layout",
        "rope.scaling.finetuned",
        "pooling_type",
        "embedding_length_out",
    ),
    *("classifier.output_labels", "classifier.pooling_type"),
    "use_parallel_residual",  # of a StableLM, which goes by the second norm
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(
        ("expert_count", "expert_used_count", "expert_shared_count", "expert_group_count"), (0,)
    ),
    **dict.fromkeys(
        ("expert_group_used_count", "nextn_predict_layers", "attention.max_alibi_bias"), (0,)
    ),
    **dict.fromkeys(("attention.clamp_kqv", "attention.scale", "attention.sliding_window"), (0,)),
    **dict.fromkeys(
        ("attention.temperature_length", "attention.temperature_scale", "rope.scaling.alpha"), (0,)
    ),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "rope.dimension_sections"), (0,)
    ),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), (1, 0)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def config_json(metadata: Mapping[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    """Translates a file's metadata into a config.json that `hf_families.of` reads.

    Args:
        metadata: the file's metadata, by key.
        shapes: the shapes of its tensors, by llama.cpp's names; rows first.

    >>> config_json({"general.architecture": "rwkv7"}, {})
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: the architecture is 'rwkv7': expected one of gpt2, ...
    """
    _only(dict(metadata), "general.type", "model")
    if metadata.get("tokenizer.ggml.suppress_tokens"):
        raise FamilyError(
            "tokenizer.ggml.suppress_tokens, a list of tokens never to generate, is not supported"
        )
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise FamilyError(
            f"the architecture is {architecture!r}: expected one of {', '.join(ARCHITECTURES)}"
        )
    if "token_embd.weight" not in shapes:
        raise FamilyError("it has no tensor token_embd.weight")
    prefix = f"{architecture}."
    keys = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    table = ARCHITECTURES[architecture](keys, shapes)
    # What the architecture took is gone from `keys`; of the rest each has to be without effect.
    for key in sorted(keys.keys() - UNREAD):
        _only(keys, key, *NEUTRAL.get(key, ()))
    nulls = table.pop("nulls", ())
    table |= {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    # a T5's rows begin with it by default
    table["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    return {key: value for key, value in table.items() if value is not None or key in nulls}


def _take(keys: dict[str, Any], key: str, otherwise: Any = None) -> Any:
    """Takes a key and returns its value; a list by layers must have one value."""
    value = keys.pop(key, otherwise)
    if isinstance(value, list) and value and all(x == value[0] for x in value):
        return value[0]
    if isinstance(value, list):
        raise FamilyError(f"{key} differs between layers: expected one value")
    return value


def _need(keys: dict[str, Any], key: str) -> Any:
    common.need(keys, key)
    return _take(keys, key)


def _only(keys: dict[str, Any], key: str, *expected: Any) -> None:
    """Takes a key, and refuses any value but some; it may be missing."""
    if key in keys and (value := _take(keys, key)) not in expected:
        if expected:
            only = f"only {' or '.join(map(repr, expected))} is supported"
        else:
            only = "the key is not supported"
        raise FamilyError(f"{key} is {value!r}: {only}")


def _attention(keys: dict[str, Any], rotates_part: bool = False) -> tuple[int, int, int]:
    """Takes the model's width, its number of heads, and their width, which is the same for queries,
    keys and values.
    """
    dim = _need(keys, "embedding_length")
    heads = _need(keys, "attention.head_count")
    common.check({"hidden_size": dim, "num_attention_heads": heads}, decoders.KEYS)
    # llama.cpp allows other widths for values and for rotated parts; our attention has one.
    width = _take(keys, "attention.key_length", dim // heads)
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        _only(keys, key, width)
    for key in (
        ("rope.dimension_count_swa",)
        if rotates_part
        else ("rope.dimension_count", "rope.dimension_count_swa")
    ):
        _only(keys, key, width)
    return dim, heads, width


def _gpt2(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    # Heads of another width than dim / heads have no place in a GPT-2.
    dim, heads, width = _attention(keys)
    _only({"attention.key_length": width}, "attention.key_length", dim // heads)
    _only(keys, "attention.head_count_kv", heads)
    return {
        "model_type": "gpt2",
        "n_embd": dim,
        "n_inner": _take(keys, "feed_forward_length"),
        "n_layer": _need(keys, "block_count"),
        "n_head": heads,
        "n_positions": _need(keys, "context_length"),
        "layer_norm_epsilon": _need(keys, "attention.layer_norm_epsilon"),
    }


def _t5(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    dim, heads, width = _attention(keys)
    _only(keys, "attention.head_count_kv", heads)
    _take(keys, "context_length")  # of the training
    epsilon = _take(keys, "attention.layer_norm_epsilon")
    return {
        "model_type": "t5",
        "d_model": dim,
        "d_ff": _need(keys, "feed_forward_length"),
        "d_kv": width,
        "num_heads": heads,
        "num_layers": _need(keys, "block_count"),
        "num_decoder_layers": _take(keys, "decoder_block_count"),
        "relative_attention_num_buckets": _need(keys, "attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if "enc.blk.0.ffn_gate.weight" in shapes else "relu",
        "layer_norm_epsilon": _take(keys, "attention.layer_norm_rms_epsilon", epsilon),
        "decoder_start_token_id": _take(keys, "decoder_start_token_id"),
    }


def _decoder(
    model_type: str,
    keys: dict[str, Any],
    shapes: Mapping[str, ArrayShape],
    *,
    epsilon: str = "rms_norm_eps",
    rotates_part: bool = False,
    read_from: Mapping[str, str] | None = None,
    **fixed: Any,
) -> dict[str, Any]:
    """Reads a network of Llama's kind.

    Args:
        epsilon: its key; all but "rms_norm_eps" are of norms that subtract a mean.
        rotates_part: whether `rope.dimension_count` may be less than a head's width.
        read_from: keys of config.json, and the file's keys that they come from.
        fixed: keys of config.json, and the values that llama.cpp's code has for the architecture.
    """
    dim, heads, width = _attention(keys, rotates_part)
    longest = _take(keys, "context_length")
    if epsilon == "rms_norm_eps":
        norm = "attention.layer_norm_rms_epsilon"
    else:
        norm = "attention.layer_norm_epsilon"
    rotated = {}
    if rotates_part:
        rotated = {"partial_rotary_factor": _rotated(keys, width) / width}
    return {
        "model_type": model_type,
        "hidden_size": dim,
        "intermediate_size": _need(keys, "feed_forward_length"),
        "num_hidden_layers": _need(keys, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _take(keys, "attention.head_count_kv"),
        "head_dim": width,
        epsilon: _need(keys, norm),
        "rope_theta": _take(keys, "rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, longest),
        "max_position_embeddings": longest,
        # A family reads the keys that it knows of these.
        **dict.fromkeys(
            ("attention_bias", "use_bias", "use_qkv_bias"), "blk.0.attn_q.bias" in shapes
        ),
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in shapes,
        **rotated,
        **{name: _take(keys, key) for name, key in (read_from or {}).items()},
        **fixed,
    }


def _rotated(keys: dict[str, Any], width: int) -> int:
    """Takes how many of a head's dimensions are rotated, two together."""
    dims = _take(keys, key := "rope.dimension_count", width)
    if type(dims) is not int or dims % 2 or not 0 < dims <= width:
        raise FamilyError(
            f"{key} is {dims!r}: expected an even number from 2 to {width}, a head's dimensions"
        )
    return dims


EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def _mixture(
    model_type: str,
    count: str,
    keys: dict[str, Any],
    shapes: Mapping[str, ArrayShape],
    **fixed: Any,
) -> dict:
    """Reads a network with experts, whose number has the key `count` in config.json."""
    if "expert_used_count" not in keys:
        raise FamilyError(
            f"expert_count is {keys.get('expert_count')!r}, and it lacks 'expert_used_count'"
        )
    return _decoder(
        model_type, keys, shapes, read_from=EXPERTS | _WINDOW | {count: "expert_count"}, **fixed
    )


def _llama(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    if not keys.get("expert_count"):
        return _decoder("llama", keys, shapes)
    _only(keys, "attention.sliding_window", 0)
    return _mixture("mixtral", "num_local_experts", keys, shapes)


def _gpt_oss(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    table = _mixture("gpt_oss", "num_local_experts", keys, shapes)
    return table | {
        "rope_scaling": {**(table["rope_scaling"] or {"rope_type": "default"}), "truncate": False}
    }


def _qwen3moe(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    _only(keys, "attention.sliding_window", 0)
    return _mixture("qwen3_moe", "num_experts", keys, shapes, norm_topk_prob=True)


def _granite(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    # a dense Granite 4 has sizes of layers that it lacks
    for key in [key for key in keys if key.startswith("ssm.")]:
        keys.pop(key)
    _only(keys, "rope.scaling.finetuned", True)  # else llama.cpp rotates nothing
    names = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
    names |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
    table = _decoder("granite", keys, shapes, read_from=names)
    if table["logits_scaling"] == 0:  # any other factor of 0 is none
        raise FamilyError(
            "logit_scale is 0, and logits are divided by it: expected a positive number"
        )
    table |= {name: table[name] or None for name in names}
    return table | {
        "attention_multiplier": table["attention_multiplier"] or table["head_dim"] ** -0.5
    }


def _exaone4(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    table = _decoder("exaone4", keys, shapes, read_from=_WINDOW)
    layers = _layer_types(keys, table, pattern=4)
    # Without a window all layers have positions, and a config.json says so by null.
    return table | (
        {"layer_types": layers} if table["sliding_window"] else {"nulls": ["sliding_window"]}
    )


def _phi3(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    magnitude = _take(keys, "rope.scaling.attn_factor", 1.0)
    table = _decoder("phi3", keys, shapes, rotates_part=True, read_from=_WINDOW)
    original = _take(keys, "rope.scaling.original_context_length", table["max_position_embeddings"])
    if LONGROPE in shapes:  # `gguf.open_file` adds the factors, which are a tensor
        table["rope_scaling"] = {"type": "longrope", "attention_factor": magnitude}
        table["original_max_position_embeddings"] = original
    return table | {"sliding_window": table["sliding_window"] or None}


def _rope_scaling(keys: dict[str, Any], longest: int | None) -> dict[str, Any] | None:
    """Takes the scaling of positions: linear unless another kind is named; YaRN's with a further
    magnitude.
    """
    rope_type = _take(keys, "rope.scaling.type", "linear")
    # Older files have a linear scale under a key of its own.
    factor = _take(keys, "rope.scaling.factor", _take(keys, "rope.scale_linear")) or 1.0
    original = _take(keys, "rope.scaling.original_context_length") or longest
    if rope_type not in ("none", "linear", "yarn"):
        raise FamilyError(f"rope.scaling.type is {rope_type!r}, expected none, linear or yarn")
    if rope_type == "none" or (rope_type == "linear" and factor == 1):
        return None
    if rope_type == "linear":
        return {"rope_type": rope_type, "factor": factor}
    return {
        "rope_type": rope_type,
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": _take(keys, "rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor),
    }


def _gemma(
    model_type: str, largest: int, keys: dict[str, Any], shapes: Mapping[str, ArrayShape]
) -> dict[str, Any]:
    """Scores are divided by the root of the heads' dimension; of the largest, as its layers show,
    by dim / heads.
    """
    table = _decoder(model_type, keys, shapes)
    # No key says it: llama.cpp, too, tells the 27B models by their number of layers.
    is_largest = table["num_hidden_layers"] == largest
    if is_largest:
        scalar = table["hidden_size"] // table["num_attention_heads"]
    else:
        scalar = table["head_dim"]
    cap = _take(keys, "final_logit_softcapping")
    return table | {"query_pre_attn_scalar": scalar, "final_logit_softcapping": cap}


def _gemma2(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    table = _gemma("gemma2", 46, keys, shapes)
    _only(keys, "rope.freq_base_swa", table["rope_theta"])
    return table | {
        "attn_logit_softcapping": _take(keys, "attn_logit_softcapping"),
        "sliding_window": _take(keys, "attention.sliding_window"),
        "layer_types": _layer_types(keys, table, pattern=2),
    }


def _gemma3(keys: dict[str, Any], shapes: Mapping[str, ArrayShape]) -> dict[str, Any]:
    table = _gemma("gemma3_text", 62, keys, shapes)
    window = _take(keys, "attention.sliding_window") or None
    layers = _layer_types(keys, table, pattern=6)
    return table | {
        "final_logit_softcapping": table["final_logit_softcapping"] or None,
        "sliding_window": window,
        "layer_types": layers if window else ["full_attention"] * len(layers),
        "rope_local_base_freq": _take(keys, "rope.freq_base_swa"),
    }


def _layer_types(keys: dict[str, Any], table: dict[str, Any], pattern: int) -> list[str]:
    """Takes which layers attend to a window, by the file's list; else all but every n-th do, or
    all, if n is 0.
    """
    local = keys.pop("attention.sliding_window_pattern", pattern)
    layers = table["num_hidden_layers"]
    common.check({"num_hidden_layers": layers}, decoders.KEYS)
    # An integer n says that every n-th layer attends to all of the row.
    if not isinstance(local, list):
        local = [not local or (i + 1) % local != 0 for i in range(layers)]
    return ["sliding_attention" if x else "full_attention" for x in local]


_plain = functools.partial(functools.partial, _decoder)
ARCHITECTURES = {
    "gpt2": _gpt2,
    "t5": _t5,
    "llama": _llama,
    **{
        name: _plain(name)
        for name in ("qwen2", "qwen3", "olmo2", "smollm3", "arcee", "gemma", "seed_oss", "ernie4_5")
    },
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
    "exaone4": _exaone4,
    "stablelm": _plain("stablelm", epsilon="layer_norm_eps", rotates_part=True),
    "hunyuan-dense": _plain("hunyuan_v1_dense"),
    "glm4": _plain("glm4", rotates_part=True),
    "nemotron": _plain("nemotron", epsilon="norm_eps", rotates_part=True),
    "command-r": _plain("cohere", epsilon="layer_norm_eps", read_from=_LOGITS),
    "cohere2": _plain("cohere2", epsilon="layer_norm_eps", read_from=_LOGITS | _WINDOW),
    "starcoder2": _plain("starcoder2", epsilon="norm_epsilon"),
    "qwen3moe": _qwen3moe,
    "gpt-oss": _gpt_oss,
}
# Norms that are stored as what they multiply by; transformers subtracts 1.
NORMS_FROM_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
# Queries and keys that are stored for rotations of dimensions 2i and 2i + 1, where transformers
# rotates halves.
INTERLEAVED = ("llama", "smollm3", "arcee", "granite")
LONGROPE = "rope_factors_short.weight"
