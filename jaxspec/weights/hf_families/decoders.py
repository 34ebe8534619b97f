"""The keys of config.json and the names of tensors that most decoders' families have in common."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxspec.nets.decoder import DecoderConfig, decoder_config
from jaxspec.nets.rotary import SCALINGS, Rotary, yarn_magnitude
from jaxspec.nets.shapes import LayerShape
from jaxspec.nets.uniform import UniformDecoder, nearest, period
from jaxspec.weights.hf_families import common
from jaxspec.weights.hf_families.common import (
    HEAD,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    THEIRS,
    Family,
    FamilyError,
    Key,
    Tensor,
    count,
    flag,
    need,
    number,
    only,
    table_of,
)

_TURNS = {  # checks of what the tables of rotary positions hold
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), number()),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), number()),
    **dict.fromkeys(("mscale", "mscale_all_dim", "alpha"), number(or_zero=True)),
    "llama_4_scaling_beta": number(or_zero=True),
    "partial_rotary_factor": number(),
    "original_max_position_embeddings": count(),
    "truncate": flag(),
}
_BY_LAYERS = dict.fromkeys(("full_attention", "sliding_attention"), table_of(_TURNS))
KEYS: dict[str, Key] = {  # checks of the keys that these families have in common
    "vocab_size": count(),
    "hidden_size": count(),
    "intermediate_size": count(),
    "num_hidden_layers": count(limit=MOST_LAYERS),
    "num_attention_heads": count(),
    "num_key_value_heads": count(),
    "head_dim": count(limit=MOST_HEAD_DIM),
    "max_position_embeddings": count(),
    "original_max_position_embeddings": count(),
    "sliding_window": count(),
    "use_sliding_window": flag(),
    "tie_word_embeddings": flag(),
    "attention_bias": flag(),
    "mlp_bias": flag(),
    "rms_norm_eps": number(),
    "rope_theta": number(),
    "partial_rotary_factor": number(),
    "rope_scaling": table_of(_TURNS | _BY_LAYERS),
    "rope_parameters": table_of(_TURNS | _BY_LAYERS),
}
LayerChange = Callable[[int, LayerShape], LayerShape]
FIELDS = {  # the network's fields: those of config.json
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
SIZE = (  # of a row of published sizes
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
ROPE = {"rope_factor": "factor"}
LLAMA3 = {"rope_low": "low_freq_factor", "rope_high": "high_freq_factor"}
YARN = {
    "rope_low": "beta_slow",
    "rope_high": "beta_fast",
    "rope_whole": "truncate",
    "rope_magnitude": "attention_factor",
}
PARTIAL = "partial_rotary_factor"
# the tables of rotary positions; the first counts before the second
ROTARY = ("rope_scaling", "rope_parameters")
FIRST_CONTEXT = "original_max_position_embeddings"
ORIGINAL = {"rope_original": FIRST_CONTEXT}
# of a scaling
ROPE_KEYS = {"linear": ROPE, "llama3": ROPE | LLAMA3 | ORIGINAL, "yarn": ROPE | YARN | ORIGINAL}


def read(table: dict, changed: LayerChange | None = None, **options: Any) -> DecoderConfig:
    """Reads the configuration of a config.json of any of these families.

    Args:
        changed: (number of a layer, its shape) -> the layer's shape in this family; None: as in
            Llama.
        options: the additions of the family, as arguments of `UniformDecoder`.
    """
    only(table, use_bidirectional_attention=False)
    # Files from before grouped queries and wide heads lack these keys.
    dim = need(table, "hidden_size")
    heads = need(table, "num_attention_heads")
    sizes = {"kv_heads": heads, "head_dim": dim // heads}
    shape = common.read_keys(
        table, FIELDS, **sizes, epsilon=1e-6, max_positions=None, tied_head=False
    )
    shape["head_dim"] = int(shape["head_dim"])
    shape["activation"] = common.activation(
        table.get("hidden_activation") or table.get("hidden_act") or "silu"
    )
    rotary = {}
    if "rope_base" not in options:
        rotary = rope(_with_first_context(table))
    return with_layers(decoder_config(**{**shape, **rotary, **options}), changed)


def sizes(
    read: Callable[[dict], DecoderConfig], rows: Mapping[str, Sequence[Any]], **common: Any
) -> dict[str, DecoderConfig]:
    """Makes published sizes, each of a row with the numbers of `SIZE` and perhaps a table of its
    other keys.

    >>> sizes(read, {"tiny": (96, 32, 64, 1, 4, 2, 128, {"head_dim": 16})}, rms_norm_eps=1e-5)[
    ...     "tiny"
    ... ].norm.epsilon
    1e-05
    """
    tables = {
        name: dict(zip(SIZE, row, strict=False)) | common | dict(*row[len(SIZE) :])
        for name, row in rows.items()
    }
    return {name: read(table) for name, table in tables.items()}


def reader(
    *flags: str, changed: LayerChange | None = None, **defaults: Any
) -> Callable[[dict], DecoderConfig]:
    """Makes the `read` of a family that is a Llama but for constants.

    Args:
        flags: the keys that say which projections have biases: see `BIASED`.
        changed: the change of each layer, as `read` takes it.
        defaults: values of the keys that a file leaves out, or gives as null.
    """
    return lambda table: read(with_defaults(table, **defaults), changed, **biases(table, *flags))


def with_layers(
    config: DecoderConfig, changed: LayerChange | None = None, **options: Any
) -> DecoderConfig:
    """Changes layers of a configuration, and options of the whole."""
    if changed is None:
        layers = config.layers
    else:
        layers = tuple(changed(i, layer) for i, layer in enumerate(config.layers))
    return dataclasses.replace(config, layers=layers, **options)


def change(
    layer: LayerShape, attention: dict[str, Any], ff: dict[str, Any] | None = None, **norms: Any
) -> LayerShape:
    """Replaces options of a layer's attention, of its feed-forward block, and of the layer."""
    replaced = (
        dataclasses.replace(layer.attention, **attention),
        dataclasses.replace(layer.ff, **ff or {}),
    )
    return dataclasses.replace(layer, attention=replaced[0], ff=replaced[1], **norms)


def partial_rotary(table: dict, share: float = 1.0) -> tuple[dict, float]:
    """Takes the rotated share of a head's dimensions out of a config.json, `share` where it has
    none.
    """
    shares = [x for x in (rotary_keys(table).get(PARTIAL), table.get(PARTIAL)) if x is not None]
    table = {name: x for name, x in table.items() if name != PARTIAL}
    for key in ROTARY:
        table[key] = {
            name: x for name, x in (table.get(key) or {}).items() if name != PARTIAL
        } or None
    return table, float((*shares, share)[0])


def with_defaults(table: dict, **defaults: Any) -> dict:
    """Fills in keys that a config.json leaves out or gives as null."""
    return table | {key: value for key, value in defaults.items() if table.get(key) is None}


def turned(layer: LayerShape, share: float = 1.0, **options: Any) -> dict[str, Rotary]:
    """Returns the attention option of a layer that rotates a share of each head; `options` as in
    `Rotary`.
    """
    # 30 of 88 dimensions are 29.99... by their share.
    rotary = layer.attention.rotary
    dims = int(layer.attention.head_dim * share + 1e-6)
    assert rotary is not None
    return {"rotary": dataclasses.replace(rotary, dims=None if share == 1.0 else dims, **options)}


def biases(table: dict, *keys: str) -> dict[str, Any]:
    """Reads which projections have biases, by some of the keys that families say it with: none by
    default.

    >>> biases({"attention_bias": True}, "attention_bias", "mlp_bias")
    {'qkv_bias': True, 'out_bias': True, 'ff_bias': False}
    """
    return {field: bool(table.get(key, False)) for key in keys for field in BIASED[key]}


def _with_first_context(table: dict) -> dict:
    """Moves the training's context length among the rotary keys, and over theirs, as in
    transformers.
    """
    if table.get(FIRST_CONTEXT) is None:
        return table
    key = next((key for key in ROTARY if table.get(key)), ROTARY[-1])
    return table | {key: {**(table.get(key) or {}), FIRST_CONTEXT: table[FIRST_CONTEXT]}}


def rotary_keys(table: dict) -> dict[str, Any]:
    """Returns the keys of the rotary positions, from either table or from both.

    transformers 5 writes rope_parameters, which hold the base, too. There, too, rope_scaling counts
    before them: it is what people add to a file for longer rows.

    >>> parameters = {"rope_theta": 1e6, "rope_type": "default"}
    >>> keys = rotary_keys({"rope_parameters": parameters, "rope_scaling": {"type": "yarn"}})
    >>> keys["rope_theta"], keys["rope_type"]
    (1000000.0, 'yarn')
    """
    keys: dict[str, Any] = {}
    for name in reversed(ROTARY):
        rotary = table.get(name) or {}
        # Older files call it "type"; a later table's goes before an earlier one's "rope_type".
        keys |= {"rope_type": rotary["type"]} if rotary.get("type") else {}
        keys |= rotary
    return keys


def rope(table: dict, base: float = 10_000.0, *, counts_linear: bool = False) -> dict[str, Any]:
    """Reads options of the rotary positions: new files have one table, older ones a base and
    perhaps a scaling.

    A scaling that stretches positions by a factor makes rows that much longer: the options then
    have the longest row. It is `factor` times the context of the training, or
    `max_position_embeddings` if that is more.

    Args:
        table: the content of a config.json.
        base: the base of the frequencies in a file that gives none.
        counts_linear: whether `max_position_embeddings` is the longest row of a linear scaling, as
            in a Gemma 3; in other families it is the context before the scaling.

    >>> rope(
    ...     {
    ...         "rope_theta": 500000.0,
    ...         "rope_scaling": {"type": "linear", "factor": 4},
    ...         "max_position_embeddings": 2048,
    ...     }
    ... )
    {'rope_base': 500000.0, 'rope_scaling': 'linear', 'rope_factor': 4.0, 'max_positions': 8192}
    """
    merged = {"rope_theta": table.get("rope_theta") or base, **rotary_keys(table)}
    only(
        {**table, **merged}, partial_rotary_factor=1.0, full_attention=None, sliding_attention=None
    )
    rope_type = merged.get("rope_type") or merged.get("type") or "default"
    if rope_type not in (*SCALINGS, "dynamic"):
        raise FamilyError(
            f"the rope scaling is {rope_type!r}: expected one of {', '.join(SCALINGS)}, dynamic"
        )
    options: dict[str, Any] = {"rope_base": float(merged["rope_theta"])}
    # changes rows longer than these, whose caches would depend on how they were fed
    if rope_type == "dynamic":
        need(table, "max_position_embeddings")
        return options
    if rope_type == "default":
        return options
    merged |= _yarn(merged, table) if rope_type == "yarn" else {}
    fields = {
        field: type(getattr(UniformDecoder, field))(need(merged, key))
        for field, key in ROPE_KEYS[rope_type].items()
    }
    return (
        options
        | {"rope_scaling": rope_type, **fields}
        | _longest_row(merged, table, rope_type, counts_linear)
    )


def _longest_row(scaling: dict, table: dict, rope_type: str, counts_linear: bool) -> dict[str, Any]:
    """Returns the option for the longest row of a scaling whose factor stretches positions.

    The factor of "llama3" is another number: it divides the lowest frequencies, and says nothing of
    a row's length.
    """
    longest = table.get("max_position_embeddings")
    original = scaling.get(FIRST_CONTEXT) or (None if counts_linear else longest)
    if rope_type not in ("yarn", "linear") or original is None:
        return {}
    return {"max_positions": max(longest or 0, int(scaling["factor"] * original))}


def _yarn(scaling: dict, table: dict) -> dict[str, Any]:
    """Returns the keys of a scaling by YaRN, with what transformers takes for those that it
    lacks.
    """
    original = scaling.get(FIRST_CONTEXT)
    longest = table.get("max_position_embeddings")
    factor = scaling.get("factor") or (
        longest / original if longest and original else need(scaling, "factor")
    )
    weight = scaling.get("mscale")
    overall = scaling.get("mscale_all_dim")
    # As in transformers, one without the other is without effect.
    weight, overall = (weight, overall) if weight and overall else (1.0, 0.0)
    usual = yarn_magnitude(factor, weight) / yarn_magnitude(factor, overall)
    return {
        "factor": factor,
        FIRST_CONTEXT: original or need(table, "max_position_embeddings"),
        "beta_slow": scaling.get("beta_slow") or 1,
        "beta_fast": scaling.get("beta_fast") or 32,
        "truncate": scaling.get("truncate", True) is not False,
        "attention_factor": usual
        if scaling.get("attention_factor") is None
        else scaling["attention_factor"],
    }


def scaling_keys(form: UniformDecoder) -> dict[str, Any]:
    """Writes the keys of a scaling of the rotary frequencies."""
    return {"rope_type": form.rope_scaling} | common.write_keys(
        form, ROPE_KEYS.get(form.rope_scaling, {})
    )


def size_keys(form: UniformDecoder) -> dict[str, Any]:
    """Writes the network's sizes, with the context before a linear scaling, as `rope` reads it."""
    table = {
        key: value for key, value in common.write_keys(form, FIELDS).items() if value is not None
    }
    if form.rope_scaling == "linear" and form.max_positions is not None:
        table["max_position_embeddings"] = round(form.max_positions / form.rope_factor)
    return table


def windows(table: dict, otherwise: list[bool]) -> dict[str, Any]:
    """Reads options of local layers from the file's entry for each layer, or else takes
    `otherwise`.

    >>> windows({"sliding_window": 8, "num_hidden_layers": 4}, [True, False, True, False])
    {'window': 8, 'local': (True, False)}
    """
    kinds = table.get("layer_types")
    if kinds:
        check_layers(kinds, table["num_hidden_layers"])
    # A list of layers, where there is one, goes before the family's pattern.
    if kinds:
        local = [layer_type == "sliding_attention" for layer_type in kinds]
    else:
        local = otherwise
    if table.get("sliding_window") is None or not any(local):
        return {}
    return {"window": int(table["sliding_window"]), "local": period(local)}


def check_layers(
    kinds: Any, count: int, expected: Sequence[str] = ("full_attention", "sliding_attention")
) -> None:
    """Raises FamilyError for `layer_types` that are not a kind of these for each layer.

    >>> check_layers("full", 4)
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: layer_types is 'full': expected a list of names
    """
    if not isinstance(kinds, list) or not all(isinstance(layer_type, str) for layer_type in kinds):
        raise FamilyError(f"layer_types is {kinds!r}: expected a list of names")
    others = sorted(set(kinds) - set(expected))
    if others:
        raise FamilyError(f"layer_types has {', '.join(others)}: expected {' and '.join(expected)}")
    if len(kinds) != count:
        raise FamilyError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {count}")


def canonical(name: str) -> str | None:
    """Leaves out the frequencies that old files hold, which are computed.

    >>> canonical("model.layers.0.self_attn.rotary_emb.inv_freq")
    """
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return name


OTHERS = (
    *("vision_tower.", "audio_tower.", "multi_modal_projector.", "visual."),
    *("embed_vision.", "embed_audio.", "vision_embedder."),
)


def text_half(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a config.json that describes the text half, or all of it if the model has
    no other half.

    >>> text_half(
    ...     {"tie_word_embeddings": False, "text_config": {"hidden_size": 8}, "vision_config": {}}
    ... )
    {'hidden_size': 8, 'tie_word_embeddings': False}
    """
    if table.get("text_config") is None:
        return dict(table)
    # What both halves share lies outside of text_config.
    return {
        **table["text_config"],
        **{key: table[key] for key in ("tie_word_embeddings",) if table.get(key) is not None},
    }


def with_text(keys: Mapping[str, Key]) -> dict[str, Key]:
    """Adds the same checks of a text half in "text_config"."""
    return {**keys, "text_config": table_of(keys)}


def canonical_text(name: str) -> str | None:
    """Finds the text half among the tensors of a model that also sees or hears, by either of its
    layouts.

    >>> (
    ...     canonical_text("language_model.model.norm.weight"),
    ...     canonical_text("model.language_model.norm.weight"),
    ... )
    ('model.norm.weight', 'model.norm.weight')
    >>> canonical_text("model.vision_tower.vision_model.post_layernorm.bias")
    """
    if name.removeprefix("model.").startswith(OTHERS):
        return None
    return canonical(
        name.removeprefix("language_model.").replace("model.language_model.", "model.")
    )


def family(
    title: str,
    model_types: tuple[str, ...],
    architecture: str,
    read: Callable[[dict], DecoderConfig],
    keys: Mapping[str, Key] = MappingProxyType({}),
    sizes: Mapping[str, Any] = MappingProxyType({}),
    canonical: Callable[[str], str | None] = canonical,
    written: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    apart: tuple[str, ...] = (),
    text: Callable[[Mapping[str, Any]], dict] = dict,
) -> Family:
    """Makes a family of what differs from others of these.

    Args:
        title, model_types, read, sizes, canonical, apart, text: fields of `Family`.
        architecture: the entry of "architectures" in config.json.
        keys: the checks of keys that `KEYS` lacks, or has another check for.
        written: for a family that writes config.json, its keys beside those that all have: fields
            of `UniformDecoder`, or functions of one. None, as in most families: it writes none.
        renamed: names of a layer's modules that differ from Llama's, by the path of ours. Modules
            with one name are parts of one tensor, in the order of `LLAMA`.
    """

    write = None
    if written is not None:
        write = functools.partial(_write, model_types[0], architecture, written)
    named = functools.partial(names, renamed=renamed)
    return Family(
        title=title,
        model_types=model_types,
        architecture=architecture,
        keys={**KEYS, **keys},
        read=read,
        write=write,
        names=named,
        canonical=canonical,
        sizes=sizes,
        apart=apart,
        text=text,
    )


def _write(
    model_type: str, architecture: str, written: Mapping[str, Any], config: DecoderConfig
) -> dict[str, Any]:
    """Writes the keys of config.json that these families share, as published files have them, and
    those in `written`.
    """
    form = nearest(config)
    table: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        **size_keys(form),
        "hidden_act": THEIRS[form.activation],
        "rope_theta": form.rope_base,
    }
    if form.rope_scaling != "default":
        table["rope_scaling"] = scaling_keys(form)
    return table | {
        key: getattr(form, x) if isinstance(x, str) else x(form) for key, x in written.items()
    }


def layer_types(config: UniformDecoder) -> list[str]:
    """Lists what config.json calls each layer."""
    local = config.local or (False,)
    return [
        "sliding_attention" if local[i % len(local)] else "full_attention"
        for i in range(config.layers)
    ]


BIASED = {  # keys that say of some projections whether they have biases: fields of `UniformDecoder`
    "attention_bias": ("qkv_bias", "out_bias"),
    "attention_out_bias": ("out_bias",),
    "mlp_bias": ("ff_bias",),
    "use_bias": ("qkv_bias", "out_bias", "ff_bias"),
}
# Keys of families, for `family`.
BIASES: dict[str, Any] = {"attention_bias": "qkv_bias", "mlp_bias": "ff_bias"}
LAYERS: dict[str, Any] = {"sliding_window": "window", "layer_types": layer_types}

LLAMA = {  # a layer's modules: their names in Llama's files
    "attention_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "attention/sinks": "self_attn.sinks",
    "ff/gate": "mlp.gate_proj",
    "ff/wi": "mlp.up_proj",
    "ff/out": "mlp.down_proj",
    "ff/activation": "mlp.act_fn",
    "ff/router": "mlp.gate",
    "ff/experts/inwards/weight": "mlp.experts.gate_up_proj",
    "ff/experts/inwards/bias": "mlp.experts.gate_up_proj_bias",
    "ff/experts/outwards/weight": "mlp.experts.down_proj",
    "ff/experts/outwards/bias": "mlp.experts.down_proj_bias",
}
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "ff_post_norm": "post_feedforward_layernorm",
}
# where the name that Llama has for it is a post-norm's
PRE_FF = {"ff_norm": "pre_feedforward_layernorm"}
# modules outside of the layers
WHOLE = {"embedding": "model.embed_tokens", "norm": "model.norm", "head/weight": HEAD}


def layer_modules(
    config: DecoderConfig,
    renamed: Mapping[str, str],
    path: str = "layers_{}",
    name: str = "model.layers.{}",
) -> dict[str, str]:
    """Names the modules of layers for `common.named`; with post-norms as Gemma calls them, else as
    Llama does.

    Args:
        renamed: names that differ, by the path of ours.
        path, name: the beginning of both for a layer.
    """
    # Which name a norm has depends on whether there is another one after the block.
    gemma = {}
    if any(layer.post_norms for layer in config.layers):
        gemma = POST_NORMS | PRE_FF
    return {
        f"{path}/{x}": f"{name}.{module}" for x, module in {**LLAMA, **gemma, **renamed}.items()
    }


def names(
    config: DecoderConfig, renamed: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Tensor]:
    """Says where each parameter lies; `renamed` as `family` has it."""
    return common.names_by(WHOLE | layer_modules(config, renamed), config)
