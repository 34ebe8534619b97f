"""Gemma (arXiv 2403.08295), Gemma 2 (2408.00118) with soft caps, the text half of Gemma 3
(2503.19786) without.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformDecoder
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import THEIRS, count, number, only

# Published files leave out what transformers has as its default.
_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA: dict[str, Any] = {"post_norms": True, "norms_from_one": True, "scale_embedding": True}


def read_gemma(table: dict) -> DecoderConfig:
    """Reads the network of a Gemma 1: Gemma 2's embedding and norms in a Llama's places."""
    defaults = {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
    }
    defaults |= {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    }
    defaults |= {"hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192}
    # transformers reads hidden_act
    table = decoders.with_defaults(table, **defaults) | {"hidden_activation": None}
    if table["hidden_act"] == "gelu":  # what the first files say, and mean by it
        table["hidden_act"] = "gelu_pytorch_tanh"
    options = {name: value for name, value in _GEMMA.items() if name != "post_norms"}
    return decoders.read(table, **options, **decoders.biases(table, "attention_bias"))


def read_gemma2(table: dict) -> DecoderConfig:
    """Reads the network of a Gemma 2: every other layer, the first included, is local."""
    return _read({**_DEFAULTS, **_CAPS, **table}, pattern=2)


def read_gemma3(table: dict) -> DecoderConfig:
    """Reads the network of a Gemma 3: five local layers to a global one, which has another base for
    positions.

    Of a model that also sees, only the text half is read. A soft cap of its scores is refused:
    transformers ignores it.
    """
    table = {
        **_DEFAULTS,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        **decoders.text_half(table),
    }
    only(table, attn_logit_softcapping=0)
    # Either one table for each kind of layer, or the keys that published files have.
    by_layers = table.get("rope_parameters") or {}
    rope = decoders.rope(
        {**table, "rope_parameters": by_layers.get("full_attention")}, base=1e6, counts_linear=True
    )
    local = by_layers.get("sliding_attention") or {}
    only(local, rope_type="default", partial_rotary_factor=1.0)
    local_base = local.get("rope_theta") or table.get("rope_local_base_freq") or 10_000
    pattern = table.get("sliding_window_pattern") or table.get("_sliding_window_pattern") or 6
    return _read(table, pattern, head_norms=True, **rope, local_rope_base=float(local_base))


def _read(table: dict, pattern: int, **options: Any) -> DecoderConfig:
    # Every pattern-th layer attends to all of the row.
    local = [(i + 1) % pattern != 0 for i in range(table["num_hidden_layers"])]
    attention_cap, logits_cap = (float(table.get(key) or 0) or None for key in _CAPS)
    return decoders.read(
        table,
        query_scalar=float(table["query_pre_attn_scalar"]),
        attention_cap=attention_cap,
        logits_cap=logits_cap,
        **_GEMMA,
        **decoders.biases(table, "attention_bias"),
        **decoders.windows(table, local),
        **options,
    )


def _query_scalar(form: UniformDecoder) -> float | int:
    number = form.query_scalar or form.head_dim
    # transformers insists on an int here
    if float(number).is_integer():
        return int(number)
    return number


KEYS = decoders.KEYS | {
    "query_pre_attn_scalar": number(),
    **dict.fromkeys(_CAPS, number(or_zero=True)),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), count()),
    "rope_local_base_freq": number(),
}
_WRITTEN = decoders.LAYERS | {
    "hidden_activation": lambda form: THEIRS[form.activation],
    "attention_bias": "qkv_bias",
    "query_pre_attn_scalar": _query_scalar,
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logits_cap",
}
_WRITTEN_3 = _WRITTEN | {
    "rope_local_base_freq": lambda form: form.local_rope_base or form.rope_base,
    "max_position_embeddings": "max_positions",  # counts what a linear scaling gives
}
SIZES_1 = decoders.sizes(
    read_gemma,
    {
        "gemma-2b": (256_000, 2048, 16_384, 18, 8, 1, 8192),
        "gemma-7b": (256_000, 3072, 24_576, 28, 16, 16, 8192),
    },
)
SIZES_2 = decoders.sizes(
    read_gemma2,
    {
        "gemma-2-2b": (256_000, 2304, 9216, 26, 8, 4, 8192),
        "gemma-2-9b": (256_000, 3584, 14_336, 42, 16, 8, 8192),
        "gemma-2-27b": (
            256_000,
            4608,
            36_864,
            46,
            32,
            16,
            8192,
            {"head_dim": 128, "query_pre_attn_scalar": 144},
        ),
    },
)
_SCALED = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_27B = _SCALED | {"head_dim": 128, "query_pre_attn_scalar": 168}
SIZES_3 = decoders.sizes(
    read_gemma3,
    {
        "gemma-3-270m": (262_144, 640, 2048, 18, 4, 1, 32_768),
        "gemma-3-1b": (262_144, 1152, 6912, 26, 4, 1, 32_768),
        "gemma-3-4b": (262_208, 2560, 10_240, 34, 8, 4, 131_072, _SCALED),
        "gemma-3-12b": (262_208, 3840, 15_360, 48, 16, 8, 131_072, _SCALED),
        "gemma-3-27b": (262_208, 5376, 21_504, 62, 32, 16, 131_072, _27B),
    },
    sliding_window=512,
)

GEMMA = decoders.family(
    title="Gemma",
    model_types=("gemma",),
    architecture="GemmaForCausalLM",
    read=read_gemma,
    written={"attention_bias": "qkv_bias"},  # its Orbax folders have no config.json
    sizes=SIZES_1,
)
GEMMA2 = decoders.family(
    title="Gemma 2",
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    read=read_gemma2,
    written=_WRITTEN,
    keys=KEYS,
    sizes=SIZES_2,
)
GEMMA3_TYPES = ("gemma3_text", "gemma3")
GEMMA3 = decoders.family(
    title="Gemma 3, text",
    model_types=GEMMA3_TYPES,
    architecture="Gemma3ForCausalLM",
    read=read_gemma3,
    written=_WRITTEN_3,
    keys=decoders.with_text(KEYS),
    sizes=SIZES_3,
    canonical=decoders.canonical_text,
    text=decoders.text_half,
)
