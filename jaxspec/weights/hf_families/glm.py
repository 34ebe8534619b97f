"""Families that rotate adjacent pairs: GLM-4 9B (arXiv 2406.12793), GLM-4-0414, Ernie 4.5 and
Helium.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import flag

FUSED = {"ff/gate": "mlp.gate_up_proj", "ff/wi": "mlp.gate_up_proj"}


def _adjacent(share: float = 1.0, **norms: Any) -> decoders.LayerChange:
    return lambda index, layer: decoders.change(
        layer, decoders.turned(layer, share, adjacent=True), **norms
    )


def read_glm(table: dict, **norms: Any) -> DecoderConfig:
    """Reads the network of a GLM-4 9B: half of each head is rotated. `norms` are further options of
    a layer.
    """
    table, share = decoders.partial_rotary(table, share=0.5)
    table = decoders.with_defaults(table, head_dim=128, rms_norm_eps=1.5625e-7)
    return decoders.read(
        table, _adjacent(share, **norms), qkv_bias=bool(table.get("attention_bias", True))
    )


def read_glm4(table: dict) -> DecoderConfig:
    """Reads the network of a GLM-4-0414: as GLM-4 9B, with norms on the blocks' outputs as well."""
    return read_glm(table, post_norms=True)


def read_helium(table: dict) -> DecoderConfig:
    """Reads the network of a Helium."""
    table = decoders.with_defaults(table, head_dim=128, rms_norm_eps=1e-8, rope_theta=100_000.0)
    biases = decoders.biases(table, "attention_bias", "mlp_bias") | {"out_bias": False}
    return decoders.read(table, _adjacent(), **biases)


GLM_SIZES = decoders.sizes(
    read_glm, {"glm-4-9b": (151_552, 4096, 13_696, 40, 32, 2, 131_072)}, rope_theta=5e6
)
GLM4_SIZES = decoders.sizes(
    read_glm4,
    {
        "glm-4-9b-0414": (151_552, 4096, 13_696, 40, 32, 2, 32_768),
        "glm-4-32b-0414": (151_552, 6144, 23_040, 61, 48, 2, 32_768, {"attention_bias": False}),
    },
    rms_norm_eps=1e-5,
)
HELIUM_SIZES = decoders.sizes(
    read_helium, {"helium-1-preview-2b": (48_000, 2560, 7040, 24, 20, 20, 4096)}
)
POST = {"ff_norm": "post_attention_layernorm", "attention_post_norm": "post_self_attn_layernorm"}
POST |= {"ff_post_norm": "post_mlp_layernorm"}
GLM = decoders.family(
    title="GLM-4 9B",
    model_types=("glm",),
    architecture="GlmForCausalLM",
    read=read_glm,
    sizes=GLM_SIZES,
    renamed=FUSED,
)
GLM4 = decoders.family(
    title="GLM-4-0414",
    model_types=("glm4",),
    architecture="Glm4ForCausalLM",
    read=read_glm4,
    sizes=GLM4_SIZES,
    renamed=FUSED | POST,
)
_ERNIE: dict[str, Any] = dict(
    head_dim=128, rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=True
)
_ernie = decoders.reader("use_bias", changed=_adjacent(), **_ERNIE)
ERNIE_SIZES = decoders.sizes(_ernie, {"ernie-4.5-0.3b": (103_424, 1024, 3072, 18, 16, 2, 131_072)})
ERNIE = decoders.family(
    title="Ernie 4.5",
    model_types=("ernie4_5",),
    architecture="Ernie4_5ForCausalLM",
    read=_ernie,
    keys={"use_bias": flag()},
    sizes=ERNIE_SIZES,
)
HELIUM = decoders.family(
    title="Helium",
    model_types=("helium",),
    architecture="HeliumForCausalLM",
    read=read_helium,
    sizes=HELIUM_SIZES,
)
