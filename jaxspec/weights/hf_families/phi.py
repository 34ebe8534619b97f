"""Phi-3 (arXiv 2404.14219) and Phi-4 (arXiv 2412.08905): a Llama whose projections are fused in its files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformDecoder, configs
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import only

FUSED: dict[str, str] = dict.fromkeys(("attention/query", "attention/key", "attention/value"), "self_attn.qkv_proj")
FUSED |= dict.fromkeys(("ff/gate", "ff/wi"), "mlp.gate_up_proj")


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json; scaled positions, as in files for 128k tokens, are refused."""
    table, share = decoders.partial_rotary(decoders.with_defaults(table, rms_norm_eps=1e-5))
    rope = {**(table.get("rope_scaling") or {}), **(table.get("rope_parameters") or {})}
    only({"rope type": rope.get("rope_type") or rope.get("type")}, **{"rope type": "default"})

    return decoders.read(
        table,
        lambda index, layer: decoders.change(layer, decoders.turned(layer, share)),
        **decoders.windows(table, [True]),
    )


def _keys(form: UniformDecoder) -> dict[str, Any]:
    return {"sliding_window": form.window if all(form.local) else None}


_MINI = UniformDecoder(32_064, 3072, 8192, 32, 32, 32, 96, epsilon=1e-5, window=2047, local=(True,), max_positions=4096)
_FORMS = {
    "phi-3-mini-4k": _MINI,
    "phi-4": replace(
        _MINI,
        **{"vocab_size": 100_352, "dim": 5120, "ff_dim": 17_920, "layers": 40, "heads": 40, "kv_heads": 10},
        **{"head_dim": 128, "window": None, "local": (), "rope_base": 250_000.0, "max_positions": 16_384},
    ),
}

PHI3 = decoders.family(
    "Phi-3, Phi-4",
    ("phi3",),
    "Phi3ForCausalLM",
    read,
    _keys,
    configs(_FORMS),
    more_keys=decoders.partial_key,
    renamed=FUSED,
)
