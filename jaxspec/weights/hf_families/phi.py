"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): a Llama whose projections are fused in its
files.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import FamilyError, need

FUSED: dict[str, str] = dict.fromkeys(
    ("attention/query", "attention/key", "attention/value"), "self_attn.qkv_proj"
)
FUSED |= dict.fromkeys(("ff/gate", "ff/wi"), "mlp.gate_up_proj")


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json.

    Positions scaled by "longrope", as in files for 128k tokens, have other frequencies in rows
    longer than in training: all of a row's, its first tokens' too. A cache has one set of them:
    that of rows up to that length, which is the longest row. A file whose short factors are the
    long ones has these for all rows.
    """
    table, share = decoders.partial_rotary(decoders.with_defaults(table, rms_norm_eps=1e-5))
    rope = decoders.rotary_keys(table)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ("default", "longrope", "su"):  # the first files call it "su"
        raise FamilyError(f"rope type is {rope_type!r}: expected default or longrope")
    windows = decoders.windows(table, [True])
    if rope_type == "default":
        return decoders.read(
            table, lambda i, layer: decoders.change(layer, decoders.turned(layer, share)), **windows
        )
    original = table.get(decoders.FIRST_CONTEXT) or need(rope, decoders.FIRST_CONTEXT)
    options = {
        "factors": _factors(rope, table, share),
        "magnitude": _magnitude(rope, table, original),
    }
    base = float(rope.get("rope_theta") or table.get("rope_theta") or 10_000.0)
    config = decoders.read(
        table,
        lambda i, layer: decoders.change(layer, decoders.turned(layer, share, **options)),
        rope_base=base,
        **windows,
    )
    if original < (config.max_positions or original):
        _tell(original, config.max_positions)
    return decoders.with_layers(
        config, max_positions=min(original, config.max_positions or original)
    )


@functools.lru_cache  # once: a load reads a config.json several times
def _tell(original: int, longest: int | None) -> None:
    text = (
        "longrope: rows of at most %d tokens are read, of %d; docs/models.md says how to read "
        "longer ones"
    )
    logging.getLogger(__name__).warning(text, original, longest)


def _factors(rope: dict, table: dict, share: float) -> tuple[float, ...]:
    factors = need(rope, "short_factor")
    head_dim = table.get("head_dim")
    head_dim = head_dim or need(table, "hidden_size") // need(table, "num_attention_heads")
    count = int(head_dim * share) // 2
    are_numbers = isinstance(factors, list) and all(
        isinstance(x, int | float) and x > 0 for x in factors
    )
    if not are_numbers or len(factors) != count:
        raise FamilyError(
            f"short_factor is {str(factors)[:40]}: expected {count} positive numbers, one a "
            "frequency"
        )
    return tuple(map(float, factors))


def _magnitude(rope: dict, table: dict, original: int) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    factor = rope.get("factor") or need(table, "max_position_embeddings") / original
    # Longer rows have flatter softmaxes: scores grow with the context, in training and here.
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


# The last was published for 131,072 tokens; rows end here at 4,096, the context of the short
# factors.
_MINI_4: dict[str, Any] = {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75}
_MINI_4 |= {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "factor": 32},
    "tie_word_embeddings": True,
}
SIZES = decoders.sizes(
    read,
    {
        "phi-3-mini-4k": (32_064, 3072, 8192, 32, 32, 32, 4096, {"sliding_window": 2047}),
        "phi-4": (100_352, 5120, 17_920, 40, 40, 10, 16_384, {"rope_theta": 250_000.0}),
        "phi-4-mini": (200_064, 3072, 8192, 32, 24, 8, 4096, _MINI_4),
    },
)
PHI3 = decoders.family(
    title="Phi-3, Phi-3.5, Phi-4",
    model_types=("phi3",),
    architecture="Phi3ForCausalLM",
    read=read,
    sizes=SIZES,
    renamed=FUSED,
)
