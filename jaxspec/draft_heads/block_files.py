"""The files of block drafters: config.json and tensors' names of z-lab, DeepSpec, JetSpec and
`speculators`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from jaxspec.draft_heads import formats
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.formats import Shapes, TargetShape
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import Key, count, flag, number, table_of

BEFORE = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj"
OPTIONS = {  # of dflash_config
    *("block_size", "mask_token_id", "mask_token", "target_layer_ids", "num_target_layers"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *("sample_from_anchor", "markov_rank", "markov_head_type", "projector_type", "attention_mode"),
    *("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha"),
    *("target_hidden_size", "swa_window_size"),
}
# Keys of one meaning. Whoever reads a file knows one of them, and a file may have several.
CAUSAL = ("is_causal", "causal", "causal_head")  # z-lab's; vLLM's, ModelOpt's and NeMo's; JetSpec's
# speculators'; JetSpec's; SpecForge's and ModelOpt's
SHIFTED = ("sample_from_anchor", "draft_shift", "shift_label")
OPTIONS |= {*CAUSAL, *SHIFTED}
# options of drafters for MiMo, Gemma 3 and others, with the values that change nothing
UNLIKE: dict[str, Any] = {
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "use_gemma_norm": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
    "attention_mode": "gqa",
    "use_swa": False,
}
_OPTIONS: dict[str, Key] = {  # checks of these, wherever they lie
    **dict.fromkeys(("block_size", "target_hidden_size", "num_target_layers"), count()),
    "mask_token_id": count(least=0),
    **dict.fromkeys(("input_embedding_scale", "output_multiplier"), number()),
    "final_logit_softcapping": number(or_zero=True),
    **dict.fromkeys((*CAUSAL, *SHIFTED, "sliding_window_non_causal", "use_swa"), flag()),
}
ADAPTER = "hidden_dim_adapter.proj.weight"
SOURCE = "encoder_fc.weight"  # ours: published drafters have targets without encoders


def with_options(options: Mapping[str, Key] = types.MappingProxyType({})) -> dict[str, Key]:
    """Returns the checks of a block drafter's keys; `options`: of further ones in dflash_config."""
    options = {**_OPTIONS, **options}
    return {**formats.KEYS, **options, "dflash_config": table_of(options)}


def matches(table: dict, shapes: Shapes) -> bool:
    """Tells whether one norm is applied to all features, in place of a norm in each layer."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= shapes.keys()


def read(
    table: dict,
    shapes: Shapes,
    target: TargetShape,
    kind: type[BlockConfig] = BlockConfig,
    counts: Mapping[str, str] = types.MappingProxyType({}),
) -> BlockConfig:
    """Reads the network of a config.json: z-lab's, DeepSpec's or speculators'.

    `counts`: further fields of the configuration's type, which are integers, and their keys.
    """
    options = _options(table, counts)
    of_speculators = "speculators_model_type" in table
    layer = _layer(table, shapes)
    if ADAPTER in shapes:
        text = f"it has {ADAPTER}, which JetSpec fills at random for a target of another width"
        raise formats.FamilyError(f"{text}: expected a drafter that was trained for this target")
    hidden = options.get("target_hidden_size") or layer.dim
    taps = _taps(options, target, len(layer.layers))
    formats.check_same(
        ("vocabulary size", layer.vocab_size, target.vocab_size),
        ("number of target layers", options.get("num_target_layers"), target.layers),
        ("width of hidden states", hidden, target.hidden_size),
        ("width of all taps", formats.axis_of(shapes, "fc.weight", 1), len(taps) * hidden),
    )
    spark = "dspark" in (table.get("speculators_model_type"), options.get("projector_type"))
    spark = spark or "DSpark" in "".join(table.get("architectures") or ())
    more: dict[str, Any] = {field: int(formats.need(options, key)) for field, key in counts.items()}
    width = formats.axis_of(shapes, f"{CONFIDENCE}.weight", 1)
    is_shifted = _flag(options, SHIFTED)
    parts = formats.own_parts(shapes)
    is_causal = _flag(options, CAUSAL)
    # z-lab's and SGLang's default: only layers without a window let tokens see ahead.
    causal_windows = is_causal is not False
    if of_speculators:
        causal_windows = _speculators_windows_are_causal(options, layer, kind)
    # Speculators trains on the rows of the target's matrix. So does z-lab where a factor of them is
    # given; without one the rows are taken as the target's first layer reads them.
    scale = 1.0
    if not (of_speculators or parts["own_embedding"]):
        scale = target.embedding_scale
    # z-lab's code has blocks of 16 where config.json is silent.
    defaults = {}
    if not (of_speculators or spark):
        defaults = {"block_size": 16}
    return kind(
        layer,
        hidden,
        taps,
        block=int(formats.need(defaults | options, "block_size")),
        mask_token=int(formats.need(options, "mask_token_id")),
        from_anchor=spark if is_shifted is None else is_shifted,
        markov_rank=shapes[BEFORE][1] if BEFORE in shapes else 0,
        markov=options.get("markov_head_type") or "vanilla",
        confidence=width is not None,
        confidence_reads_token=width is None or width > layer.dim,
        draft_vocab=formats.draft_vocab(shapes, layer.vocab_size),
        causal_windows=causal_windows,
        causal_full=bool(is_causal),
        windows_from_anchor=of_speculators or not layer.windows,
        embedding_scale=float(options.get("input_embedding_scale", scale)),
        logits_scale=float(options.get("output_multiplier", 1.0)),
        logits_cap=options.get("final_logit_softcapping") or None,
        reads_source=SOURCE in shapes,
        **parts,
        **more,
    )


def _taps(options: Mapping[str, Any], target: TargetShape, layers: int) -> tuple[int, ...]:
    """Returns the numbers of the target's layers that the drafter reads."""
    # speculators counts the embedding as the first one.
    if options.get("aux_hidden_state_layer_ids") is not None:
        return formats.taps_of(options["aux_hidden_state_layer_ids"], -1, target)
    usual = usual_taps(options.get("num_target_layers") or target.layers, layers)
    return formats.taps_of(options.get("target_layer_ids") or usual, 0, target)


def _speculators_windows_are_causal(
    options: Mapping[str, Any], layer: Any, kind: type[BlockConfig]
) -> bool:
    formats.only(options, **dict.fromkeys(CAUSAL, False))
    # Without its window a layer hides nothing of the block, whatever the option says.
    if any(x.attention.window == formats.HIDES_NOTHING for x in layer.layers):
        return False
    return not options.get("sliding_window_non_causal", kind is not BlockConfig)


def _options(table: dict, counts: Mapping[str, str]) -> dict[str, Any]:
    """Reads the options, which lie in dflash_config or beside it, and refuses those that are not
    known.
    """
    nested = table.get("dflash_config") or {}
    expected = OPTIONS.union(counts.values(), UNLIKE)
    unknown = sorted(nested.keys() - expected)
    if unknown:
        raise formats.FamilyError(
            f"dflash_config has {', '.join(unknown)}: expected {', '.join(sorted(expected))}"
        )
    # null is no value
    options = {name: value for name, value in {**table, **nested}.items() if value is not None}
    formats.only(options, **UNLIKE)
    projector = options.get("projector_type")
    if projector not in (None, "dflash", "dspark"):
        raise formats.FamilyError(f"projector_type is {projector!r}: expected 'dflash' or 'dspark'")
    return options


def _flag(options: Mapping[str, Any], keys: tuple[str, ...]) -> bool | None:
    """Returns the value that a file gives under several keys of one meaning; None if it has none of
    them.

    >>> _flag({"causal": True, "block_size": 8}, CAUSAL)
    True
    """
    values = {key: bool(options[key]) for key in keys if key in options}
    if len(set(values.values())) > 1:
        written = " and ".join(f"{key} {value}" for key, value in values.items())
        raise formats.FamilyError(
            f"its config.json has {written}: expected one value, as these keys mean the same"
        )
    return next(iter(values.values()), None)


def usual_taps(target_layers: int, layers: int) -> list[int]:
    """Numbers the layers that z-lab's code reads where config.json is silent: evenly from the
    second to the last but 3.

    >>> usual_taps(36, 5)
    [1, 9, 17, 25, 33]
    """
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def _layer(table: dict, shapes: Shapes) -> DecoderConfig:
    """Reads the shape of the layers."""
    if "speculators_model_type" not in table:
        # Whatever config.json calls it (gpt_oss, say), their code reads all of it as a Qwen 3.
        table = {**table, "model_type": "qwen3"}
    key = next(
        (x for x in ("rope_parameters", "rope_scaling") if "rope_dim" in (table.get(x) or {})), None
    )
    if key is None:
        return formats.layer_of(table, shapes, windows=True)
    # The rotated width that it was trained with; other keys were copied from its target, and count
    # for nothing.
    dims = table[key]["rope_dim"]
    copied = ("rope_dim", "mrope_section", "mrope_interleaved", decoders.PARTIAL)
    plain = {name: x for name, x in table.items() if name != decoders.PARTIAL}
    plain[key] = {name: x for name, x in table[key].items() if name not in copied}
    layer = formats.layer_of(plain, shapes, windows=True)

    def turned(index: int, shape: LayerShape) -> LayerShape:
        return decoders.change(shape, decoders.turned(shape, dims / shape.attention.head_dim))

    return decoders.with_layers(layer, turned)


MODULES = formats.PARTS | {
    "fc": "fc",
    "hidden_norm": "hidden_norm",
    "norm": "norm",
    "source_fc/weight": SOURCE,
    "source_norm": "encoder_norm",
    "markov/before/embedding": BEFORE,
    "markov/after": "markov_head.markov_w2",
    "markov/gate": "markov_head.gate_proj",
    "markov/joint": "markov_head.joint_proj",
    "confidence": CONFIDENCE,
}


def modules(config: BlockConfig) -> dict[str, str]:
    """Names the modules of a network."""
    return MODULES | formats.layer_modules(config.layer)


def write(config: BlockConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json as `speculators` has it, or as z-lab has it if the network differs
    from those.
    """
    formats.check_head_norms(config.layer, "block drafters")
    scales = config.embedding_scale, config.logits_scale, config.logits_cap
    if scales != (1.0, 1.0, None) or config.causal_full or not config.windows_from_anchor:
        return _zlabs(config, verifier)
    table: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab or config.layer.vocab_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not config.causal_windows,
        "target_hidden_size": None
        if config.hidden_size == config.layer.dim
        else config.hidden_size,
    }
    algorithm = "dflash"
    architecture = "DFlashSpeculator"
    if config.markov_rank:
        algorithm = "dspark"
        architecture = "DSparkSpeculator"
        table |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        reads_token = config.confidence_reads_token
        table |= {
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": reads_token,
        }
    layer = formats.written_layer(config.layer, types=("qwen3",))
    return formats.speculators(
        algorithm, architecture, layer, table, verifier, min(tokens, config.count)
    )


def _zlabs(config: BlockConfig, verifier: dict) -> dict:
    """Writes the config.json as z-lab's code and SGLang read it."""
    stored: dict[str, Any] = {
        "markov_rank": 0,
        "draft_vocab": None,
        "own_embedding": False,
        "own_head": False,
    }
    stored |= {"confidence": False, "from_anchor": False}
    stored |= {"windows_from_anchor": False} if config.layer.windows else {}
    stored |= {"causal_windows": True} if config.causal_full else {}
    formats.check_stored("z-lab's format, which has scales, caps and is_causal,", config, **stored)
    table: dict[str, Any] = {
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "target_layer_ids": list(config.taps),
        "num_target_layers": verifier["layers"],
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logits_scale,
        "final_logit_softcapping": config.logits_cap,
    }
    causal = {
        (True, False): {},
        (True, True): {"is_causal": True},
        (False, False): {"is_causal": False},
    }
    causal = causal[config.causal_windows, config.causal_full]
    # vLLM and JetSpec's own code read their key inside of this table alone.
    table |= {key: value for value in causal.values() for key in CAUSAL[1:]}
    return {
        **formats.written_layer(config.layer, types=("qwen3",)),
        "architectures": ["DFlashDraftModel"],
        "dflash_config": table,
        "base_model_name_or_path": verifier["name_or_path"],
        **causal,
    }
