"""Code World Model (Meta, arXiv 2510.02387): a Llama with one global layer to three local ones."""

from __future__ import annotations

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json."""
    table = decoders.with_defaults(
        {"sliding_window": 8192, **table}, head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6
    )
    # As in transformers, a file that says nothing of its positions means these.
    if not (table.get("rope_parameters") or table.get("rope_scaling")):
        table |= {"rope_parameters": _ROPE}
    local = [i % 4 != 0 for i in range(table["num_hidden_layers"])]
    return decoders.read(
        table, **decoders.biases(table, "mlp_bias"), **decoders.windows(table, local)
    )


SIZES = decoders.sizes(read, {"cwm": (128_256, 6144, 21_504, 64, 48, 8, 131_072)})
CWM = decoders.family(
    title="Code World Model",
    model_types=("cwm",),
    architecture="CwmForCausalLM",
    read=read,
    sizes=SIZES,
)
