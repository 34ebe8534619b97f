"""Command R, R+ (Cohere) and R7B (arXiv 2504.00698): one norm a layer, and both blocks side by side
after it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape, NormShape
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import count, flag, number, only


def read_cohere(table: dict) -> DecoderConfig:
    """Reads the network of a Command R; heads of a Command R+ are normalised, with a scale for
    each.
    """
    return _read(
        decoders.with_defaults(table, rope_theta=500_000.0), bool(table.get("use_qk_norm", False))
    )


def read_cohere2(table: dict) -> DecoderConfig:
    """Reads the network of a Command R7B: three local layers to a global one, which has no
    positions.
    """
    only(table, order_of_interleaved_layers="local_attn_first", rotary_pct=1.0)
    pattern = table.get("sliding_window_pattern") or 4
    flags = [(i + 1) % pattern != 0 for i in range(table.get("num_hidden_layers", 0))]
    return _read(
        table, unrotated=True, **decoders.windows({"sliding_window": 4096, **table}, flags)
    )


def _read(
    table: dict, head_norms: bool = False, unrotated: bool = False, **options: Any
) -> DecoderConfig:
    table = decoders.with_defaults(table, tie_word_embeddings=True, layer_norm_eps=1e-5)

    def changed(index: int, layer: LayerShape) -> LayerShape:
        # The global layers of R7B have no positions; all others rotate adjacent pairs.
        turn = layer.attention.rotary
        if turn is not None:
            if unrotated and layer.attention.window is None:
                turn = None
            else:
                turn = dataclasses.replace(turn, adjacent=True)
        norms = {}
        if head_norms:
            norms = {"head_norms": True, "norms_of": "each"}
        return decoders.change(layer, {"rotary": turn, **norms}, parallel=True)

    config = decoders.read(table, changed, **decoders.biases(table, "attention_bias"), **options)
    scale = table.get("logit_scale")
    return decoders.with_layers(
        config,
        norm=NormShape("layer", float(table["layer_norm_eps"]), bias=False),
        logits_scale=0.0625 if scale is None else float(scale),
    )


_PLUS = {"rope_theta": 75e6, "logit_scale": 0.8333333333333334, "use_qk_norm": True}
SIZES = decoders.sizes(
    read_cohere,
    {
        "command-r": (256_000, 8192, 22_528, 40, 64, 64, 131_072, {"rope_theta": 8e6}),
        "command-r-plus": (256_000, 12_288, 33_792, 64, 96, 8, 131_072, _PLUS),
    },
)
SIZES_2 = decoders.sizes(
    read_cohere2,
    {"command-r7b": (256_000, 4096, 14_336, 32, 32, 8)},
    rope_theta=5e4,
    logit_scale=0.25,
)

_CHECKS = {"layer_norm_eps": number(), "logit_scale": number(), "use_qk_norm": flag()}
COHERE = decoders.family(
    title="Command R, R+",
    model_types=("cohere",),
    architecture="CohereForCausalLM",
    read=read_cohere,
    keys=_CHECKS,
    sizes=SIZES,
)
COHERE2 = decoders.family(
    title="Command R7B",
    model_types=("cohere2",),
    architecture="Cohere2ForCausalLM",
    read=read_cohere2,
    keys=_CHECKS | {"sliding_window_pattern": count()},
    sizes=SIZES_2,
)
