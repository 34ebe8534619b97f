"""The keys of config.json and the names of tensors that Llama, Mistral, Qwen and Gemma have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.nets.decoder import DecoderConfig, decoder_config
from jaxspec.nets.rotary import SCALINGS, yarn_magnitude
from jaxspec.nets.shapes import LayerShape
from jaxspec.nets.uniform import UniformDecoder, period, uniform_decoder
from jaxspec.weights.hf_families import common
from jaxspec.weights.hf_families.common import EMBEDDING, HEAD, THEIRS, Family, FamilyError, Tensor, need, only

KEYS = {  # the network's fields: those of config.json
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "ff_dim": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "epsilon": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
}
ROPE = {"rope_factor": "factor"}
LLAMA3 = {"rope_low": "low_freq_factor", "rope_high": "high_freq_factor"}
YARN = {
    "rope_low": "beta_slow",
    "rope_high": "beta_fast",
    "rope_whole": "truncate",
    "rope_magnitude": "attention_factor",
}
ORIGINAL = {"rope_original": "original_max_position_embeddings"}
ROPE_KEYS = {"linear": ROPE, "llama3": ROPE | LLAMA3 | ORIGINAL, "yarn": ROPE | YARN | ORIGINAL}  # of a scaling


def read(table: dict, **options: Any) -> DecoderConfig:
    """Reads the configuration of a config.json of any of these families; `options` are what the family adds."""
    only(table, partial_rotary_factor=1.0, use_bidirectional_attention=False)
    # Files from before grouped queries and wide heads lack these keys.
    dim, heads = need(table, "hidden_size"), need(table, "num_attention_heads")
    sizes = {"kv_heads": heads, "head_dim": dim // heads}
    shape = common.read_keys(table, KEYS, **sizes, epsilon=1e-6, max_positions=None, tied_head=False)
    shape["activation"] = common.activation(table.get("hidden_activation") or table.get("hidden_act") or "silu")
    rotary = {} if "rope_base" in options else rope(table)
    try:
        return decoder_config(**{**shape, **rotary, **options})
    except ValueError as error:
        raise FamilyError(str(error)) from error


def attention_biases(table: dict) -> dict[str, bool]:
    """Reads whether the projections of attention have biases, which families say by one key: none by default."""
    return dict.fromkeys(("qkv_bias", "out_bias"), bool(table.get("attention_bias", False)))


def rope(table: dict, base: float = 10_000.0) -> dict[str, Any]:
    """Reads options of the rotary positions: new files have one table, older ones a base and perhaps a scaling.

    >>> rope({"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4}})
    {'rope_base': 500000.0, 'rope_scaling': 'linear', 'rope_factor': 4.0}
    """
    # transformers 5 writes rope_parameters, which hold the base, too.
    merged = {
        "rope_theta": table.get("rope_theta") or base,
        **(table.get("rope_scaling") or {}),
        **(table.get("rope_parameters") or {}),
    }
    only(merged, partial_rotary_factor=1.0, full_attention=None, sliding_attention=None)
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in (*SCALINGS, "dynamic"):
        raise FamilyError(f"the rope scaling is {kind!r}: expected one of {', '.join(SCALINGS)}, dynamic")
    options: dict[str, Any] = {"rope_base": float(merged["rope_theta"])}
    if kind == "dynamic":  # changes rows longer than these, whose caches would depend on how they were fed
        need(table, "max_position_embeddings")
        return options
    if kind == "default":
        return options
    merged |= _yarn(merged, table) if kind == "yarn" else {}
    fields = {field: type(getattr(UniformDecoder, field))(need(merged, key)) for field, key in ROPE_KEYS[kind].items()}
    return options | {"rope_scaling": kind, **fields}


def _yarn(scaling: dict, table: dict) -> dict[str, Any]:
    """Returns the keys of a scaling by YaRN, with what transformers takes for those that it lacks."""
    original, longest = scaling.get("original_max_position_embeddings"), table.get("max_position_embeddings")
    factor = scaling.get("factor") or (longest / original if longest and original else need(scaling, "factor"))
    weight, overall = scaling.get("mscale"), scaling.get("mscale_all_dim")
    # As in transformers, one without the other is without effect.
    weight, overall = (weight, overall) if weight and overall else (1.0, 0.0)
    usual = yarn_magnitude(factor, weight) / yarn_magnitude(factor, overall)
    return {
        "factor": factor,
        "original_max_position_embeddings": original or need(table, "max_position_embeddings"),
        "beta_slow": scaling.get("beta_slow") or 1,
        "beta_fast": scaling.get("beta_fast") or 32,
        "truncate": scaling.get("truncate", True) is not False,
        "attention_factor": usual if scaling.get("attention_factor") is None else scaling["attention_factor"],
    }


def windows(table: dict, otherwise: list[bool]) -> dict[str, Any]:
    """Reads options of local layers: what the file says of each layer, or else `otherwise`.

    >>> windows({"sliding_window": 8, "num_hidden_layers": 4}, [True, False, True, False])
    {'window': 8, 'local': (True, False)}
    """
    kinds = table.get("layer_types")
    if kinds and (others := set(kinds) - {"full_attention", "sliding_attention"}):
        raise FamilyError(f"layer_types has {', '.join(sorted(others))}: expected full_attention and sliding_attention")
    if kinds and len(kinds) != table["num_hidden_layers"]:
        raise FamilyError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {table['num_hidden_layers']}")
    # A list of layers, where there is one, goes before the family's pattern.
    local = [kind == "sliding_attention" for kind in kinds] if kinds else otherwise
    if table.get("sliding_window") is None or not any(local):
        return {}
    return {"window": int(table["sliding_window"]), "local": period(local)}


def canonical(name: str) -> str | None:
    """Leaves out the frequencies that old files hold, which are computed.

    >>> canonical("model.layers.0.self_attn.rotary_emb.inv_freq")
    """
    return None if name.endswith("rotary_emb.inv_freq") else name


def family(
    title: str,
    model_types: tuple[str, ...],
    architecture: str,
    read: Callable[[dict], DecoderConfig],
    keys: Callable[[UniformDecoder], dict[str, Any]],
    sizes: dict[str, Any],
    canonical: Callable[[str], str | None] = canonical,
) -> Family:
    """Makes a family of what differs from others of these: `keys` writes those of config.json that it adds."""

    def write(config: DecoderConfig) -> dict[str, Any]:
        form = uniform_decoder(config)
        return _write(form, model_types[0], architecture) | keys(form)

    return Family(title, model_types, read, write, names, canonical, sizes)


def _write(config: UniformDecoder, model_type: str, architecture: str) -> dict[str, Any]:
    """Writes the keys of config.json that these families share, as published files have them."""
    table: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        **{key: value for key, value in common.write_keys(config, KEYS).items() if value is not None},
        "hidden_act": THEIRS[config.activation],
        "rope_theta": config.rope_base,
    }
    if config.rope_scaling != "default":
        scaling = common.write_keys(config, ROPE_KEYS[config.rope_scaling])
        table["rope_scaling"] = {"rope_type": config.rope_scaling, **scaling}
    return table


def layer_types(config: UniformDecoder) -> list[str]:
    """Lists what config.json calls each layer."""
    local = config.local or (False,)
    return ["sliding_attention" if local[i % len(local)] else "full_attention" for i in range(config.layers)]


def names(config: DecoderConfig) -> dict[str, Tensor]:
    """Says where each parameter lies; with post-norms as Gemma calls them, else as Llama does."""
    tensors = {EMBEDDING: "model.embed_tokens.weight", "norm/scale": "model.norm.weight"}
    if not config.tied_head:
        tensors["head/weight"] = HEAD
    for i, layer in enumerate(config.layers):
        for path, name in layer_names(layer).items():
            tensors[f"layers_{i}/{path}"] = f"model.layers.{i}.{name}"
    return {path: Tensor(name) for path, name in tensors.items()}


def layer_names(layer: LayerShape) -> dict[str, str]:
    """Says where each parameter of a layer lies, in the layer's part of the names."""
    attention, biased = layer.attention, {"attention/out": layer.attention.out_bias}
    norms = {"attention_norm": "input_layernorm", "ff_norm": "post_attention_layernorm"}
    if layer.post_norms:
        norms |= {"attention_post_norm": "post_attention_layernorm", "ff_norm": "pre_feedforward_layernorm"}
        norms |= {"ff_post_norm": "post_feedforward_layernorm"}
    if attention.head_norms:
        norms |= {"attention/query_norm": "self_attn.q_norm", "attention/key_norm": "self_attn.k_norm"}
    matrices = {
        "attention/query": "self_attn.q_proj",
        "attention/key": "self_attn.k_proj",
        "attention/value": "self_attn.v_proj",
        "attention/out": "self_attn.o_proj",
        "ff/gate": "mlp.gate_proj",
        "ff/wi": "mlp.up_proj",
        "ff/out": "mlp.down_proj",
    }
    # A layer that reads another one's cache has no keys, and no norm of them.
    if attention.keys_are_values or attention.shares is not None:
        del matrices["attention/value"]
    if attention.shares is not None:
        del matrices["attention/key"]
        norms.pop("attention/key_norm", None)
    names = {f"{path}/scale": f"{name}.weight" for path, name in norms.items()}
    for path, name in matrices.items():
        names[f"{path}/weight"] = f"{name}.weight"
        if biased.get(path, layer.ff.bias if path.startswith("ff/") else attention.qkv_bias):
            names[f"{path}/bias"] = f"{name}.bias"
    return names
