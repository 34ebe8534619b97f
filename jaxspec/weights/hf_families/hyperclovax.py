"""HyperCLOVA X SEED Think (NAVER, arXiv 2506.22403): a Granite with norms after its blocks, too."""

from __future__ import annotations

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders, granite
from jaxspec.weights.hf_families.common import flag


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json, whose `logits_scaling` multiplies, a Granite's divides."""
    post_norms = table.get("use_post_norm") is not False
    config = granite.read(table, post_norms=post_norms)
    if table.get("attention_multiplier") is None:
        config = decoders.with_layers(
            config, lambda index, layer: decoders.change(layer, {"query_scalar": None})
        )
    return decoders.with_layers(config, logits_scale=float(table.get("logits_scaling") or 1.0))


NAMES = {
    "ff_norm": "post_attention_layernorm",
    "attention_post_norm": "post_norm1",
    "ff_post_norm": "post_norm2",
}
SIZES = decoders.sizes(
    read,
    {"hyperclovax-seed-think-14b": (110_592, 6144, 14_336, 38, 48, 8, 131_072)},
    embedding_multiplier=10.0,
    attention_multiplier=0.0078125,
    logits_scaling=0.125,
    rms_norm_eps=1e-5,
    rope_theta=1e8,
)
HYPERCLOVAX = decoders.family(
    title="HyperCLOVA X",
    model_types=("hyperclovax",),
    architecture="HyperCLOVAXForCausalLM",
    read=read,
    keys=granite.FACTORS | {"use_post_norm": flag()},
    sizes=SIZES,
    renamed=NAMES,
)
