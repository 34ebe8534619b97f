"""OLMo 2 (arXiv 2501.00656), OLMo 3 and EXAONE 4 (arXiv 2507.11407): norms after the blocks instead
of before them.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import count, only

# without a norm before the block, Llama's name is that of the norm after it
RENAMED = decoders.POST_NORMS


def _olmo(index: int, layer: LayerShape) -> LayerShape:
    """Queries and keys are normalised before they are split into heads."""
    return decoders.change(
        layer, {"head_norms": True, "norms_of": "whole"}, post_norms=True, pre_norms=False
    )


def read_olmo3(table: dict) -> DecoderConfig:
    """Reads the network of an OLMo 3: three local layers to a global one, whose positions alone are
    scaled.
    """
    table = decoders.with_defaults(
        {"sliding_window": 4096, **table}, rms_norm_eps=1e-5, rope_theta=500_000.0
    )
    by_layers = table.get("rope_parameters") or {}
    rope = decoders.rope({**table, "rope_parameters": by_layers.get("full_attention", by_layers)})
    local = by_layers.get("sliding_attention") or {}
    only(local, rope_type="default", partial_rotary_factor=1.0)
    base = float(local.get("rope_theta") or rope["rope_base"])
    # Within the window no distance is longer than in training, so local positions are not scaled.
    if "rope_scaling" in rope or base != rope["rope_base"]:
        rope["local_rope_base"] = base
    is_local = [(i + 1) % 4 != 0 for i in range(table.get("num_hidden_layers", 0))]
    return decoders.read(
        table,
        _olmo,
        **decoders.biases(table, "attention_bias"),
        **decoders.windows(table, is_local),
        **rope,
    )


def read_exaone4(table: dict) -> DecoderConfig:
    """Reads the network of an EXAONE 4; where some layers are local, the others have no
    positions.
    """
    table = decoders.with_defaults(
        {"sliding_window": 4096, "sliding_window_pattern": 4, **table}, rms_norm_eps=1e-5
    )
    pattern = 0
    if table["sliding_window"] is not None:
        pattern = table["sliding_window_pattern"] or 0
    if isinstance(pattern, str):  # "LLLG": of each layer, repeated
        flags = [pattern[i % len(pattern)] == "L" for i in range(table.get("num_hidden_layers", 0))]
    else:
        flags = [
            pattern > 0 and (i + 1) % pattern != 0 for i in range(table.get("num_hidden_layers", 0))
        ]
    has_windows = table["sliding_window"] is not None

    def changed(index: int, layer: LayerShape) -> LayerShape:
        unrotated = {}
        if has_windows and layer.attention.window is None:
            unrotated = {"rotary": None}
        return decoders.change(
            layer, {"head_norms": True} | unrotated, post_norms=True, pre_norms=False
        )

    return decoders.read(table, changed, **decoders.windows(table, flags))


def _pattern(name: str, value: Any) -> None:
    """Checks a number, or a letter for each layer."""
    if not isinstance(value, str) or not value:
        count(least=0)(name, value)


_olmo2 = decoders.reader("attention_bias", changed=_olmo, rms_norm_eps=1e-5)
SIZES_2 = decoders.sizes(
    _olmo2,
    {
        "olmo-2-1b": (100_352, 2048, 8192, 16, 16, 16, 4096),
        "olmo-2-7b": (100_352, 4096, 11_008, 32, 32, 32, 4096),
        "olmo-2-13b": (100_352, 5120, 13_824, 40, 40, 40, 4096),
        "olmo-2-32b": (100_352, 5120, 27_648, 64, 40, 8, 4096),
    },
    rms_norm_eps=1e-6,
    rope_theta=500_000.0,
)
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32,
    "beta_slow": 1,
}
SIZES_3 = decoders.sizes(
    read_olmo3,
    {
        "olmo-3-7b": (100_278, 4096, 11_008, 32, 32, 32, 65_536),
        "olmo-3-32b": (100_278, 5120, 27_648, 64, 40, 8, 65_536),
    },
    rms_norm_eps=1e-6,
    rope_scaling=_YARN,
)
_SMALL = {"sliding_window": None, "tie_word_embeddings": True}
EXAONE4_SIZES = decoders.sizes(
    read_exaone4,
    {  # the small one has neither windows nor layers without positions
        "exaone-4.0-1.2b": (102_400, 2048, 4096, 30, 32, 8, 65_536, _SMALL),
        "exaone-4.0-32b": (102_400, 5120, 27_392, 64, 40, 8, 131_072),
    },
    rope_theta=1e6,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    | {"original_max_position_embeddings": 8192},
)

OLMO2 = decoders.family(
    title="OLMo 2",
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    read=_olmo2,
    sizes=SIZES_2,
    renamed=RENAMED,
)
OLMO3 = decoders.family(
    title="OLMo 3",
    model_types=("olmo3",),
    architecture="Olmo3ForCausalLM",
    read=read_olmo3,
    sizes=SIZES_3,
    renamed=RENAMED,
)
EXAONE4 = decoders.family(
    title="EXAONE 4",
    model_types=("exaone4",),
    architecture="Exaone4ForCausalLM",
    read=read_exaone4,
    keys={"sliding_window_pattern": _pattern},
    sizes=EXAONE4_SIZES,
    renamed=RENAMED,
)
