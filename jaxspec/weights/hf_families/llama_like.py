"""Families that are a Llama but for a detail: SmolLM3, Seed-OSS, Hunyuan (dense) and StableLM 2
(arXiv 2402.17834).
"""

from __future__ import annotations

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape, NormShape
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import FamilyError, count, flag, number


def read_smollm3(table: dict) -> DecoderConfig:
    """Reads the network of a SmolLM3: every fourth layer has no positions."""
    count = table.get("num_hidden_layers", 0)
    interval = table.get("no_rope_layer_interval") or 4
    has_positions = table.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(count)]
    if len(has_positions) < count:
        raise FamilyError(
            f"no_rope_layers has {len(has_positions)} layers, num_hidden_layers is {count}"
        )
    table = decoders.with_defaults(table, tie_word_embeddings=True, rope_theta=2_000_000.0)
    if not table.get("use_sliding_window", False):
        table |= {"sliding_window": None}

    def changed(index: int, layer: LayerShape) -> LayerShape:
        if has_positions[index]:
            return layer
        return decoders.change(layer, {"rotary": None})

    return decoders.read(
        table,
        changed,
        **decoders.biases(table, "attention_bias", "mlp_bias"),
        **decoders.windows(table, [not x for x in has_positions[:count]]),
    )


def read_seed_oss(table: dict) -> DecoderConfig:
    """Reads the network of a Seed-OSS, which says of each projection of attention whether it has
    biases.
    """
    table = {"attention_bias": True} | decoders.with_defaults(table, head_dim=128)
    return decoders.read(
        table, **decoders.biases(table, "attention_bias", "attention_out_bias", "mlp_bias")
    )


def read_hunyuan(table: dict) -> DecoderConfig:
    """Reads the network of a dense Hunyuan: heads are normalised after they are rotated.

    Where positions are "dynamic" and have an alpha, the base of the frequencies is raised, for
    every length of row.
    """
    table = decoders.with_defaults(table, rms_norm_eps=1e-5)
    rope = decoders.rotary_keys(table)
    rope_type = rope.get("rope_type") or rope.get("type")
    alpha = rope.get("alpha")
    options = {}
    if rope_type == "dynamic" and alpha:
        heads = table.get("num_attention_heads") or 1
        dims = table.get("head_dim") or table.get("hidden_size", 0) // heads
        base = float(rope.get("rope_theta") or table.get("rope_theta") or 10_000.0)
        if dims <= 2:
            raise FamilyError(f"heads have {dims} dimensions: expected more than 2, with an alpha")
        options = {"rope_base": base * float(alpha) ** (dims / (dims - 2))}
    norms = {"head_norms": True, "norms_of": "rotated"}
    return decoders.read(
        table,
        lambda index, layer: decoders.change(layer, norms),
        **decoders.biases(table, "attention_bias"),
        **options,
    )


def read_stablelm(table: dict) -> DecoderConfig:
    """Reads the network of a StableLM 2: a quarter of each head is rotated, and norms have biases.

    The 12B model has both blocks side by side, and normalises each head with a separate scale.
    """
    table, share = decoders.partial_rotary(
        decoders.with_defaults(table, layer_norm_eps=1e-5), share=0.25
    )
    parallel = bool(table.get("use_parallel_residual", False))
    norms = {}
    if table.get("qk_layernorm"):
        norms = {"head_norms": True, "norms_of": "each"}
    config = decoders.read(
        table,
        lambda index, layer: decoders.change(
            layer, {**decoders.turned(layer, share), **norms}, parallel=parallel
        ),
        qkv_bias=bool(table.get("use_qkv_bias", False)),
    )
    return decoders.with_layers(config, norm=NormShape("layer", float(table["layer_norm_eps"])))


NORMS = {
    "attention/query_norm": "self_attn.query_layernorm",
    "attention/key_norm": "self_attn.key_layernorm",
}
SMOLLM3_SIZES = decoders.sizes(
    read_smollm3, {"smollm3-3b": (128_256, 2048, 11_008, 36, 16, 4, 65_536)}, rope_theta=5e6
)
SEED_OSS_SIZES = decoders.sizes(
    read_seed_oss, {"seed-oss-36b": (155_136, 5120, 27_648, 64, 80, 8, 524_288)}, rope_theta=1e7
)
HUNYUAN_SIZES = decoders.sizes(
    read_hunyuan,
    {
        "hunyuan-0.5b": (120_818, 1024, 3584, 24, 16, 8, 262_144),
        "hunyuan-1.8b": (120_818, 2048, 6144, 32, 16, 4, 262_144),
        "hunyuan-4b": (120_818, 3072, 8192, 36, 32, 8, 262_144),
        "hunyuan-7b": (128_167, 4096, 14_336, 32, 32, 8, 262_144),
    },
    head_dim=128,
    tie_word_embeddings=True,
    rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
)
SMOLLM3 = decoders.family(
    title="SmolLM3",
    model_types=("smollm3",),
    architecture="SmolLM3ForCausalLM",
    read=read_smollm3,
    keys={"no_rope_layer_interval": count()},
    sizes=SMOLLM3_SIZES,
)
SEED_OSS = decoders.family(
    title="Seed-OSS",
    model_types=("seed_oss",),
    architecture="SeedOssForCausalLM",
    read=read_seed_oss,
    keys={"attention_out_bias": flag()},
    sizes=SEED_OSS_SIZES,
)
HUNYUAN = decoders.family(
    title="Hunyuan, dense",
    model_types=("hunyuan_v1_dense",),
    architecture="HunYuanDenseV1ForCausalLM",
    read=read_hunyuan,
    sizes=HUNYUAN_SIZES,
    renamed=NORMS,
)
_12B = {"qk_layernorm": True, "use_parallel_residual": True}
STABLELM_SIZES = decoders.sizes(
    read_stablelm,
    {
        "stablelm-2-1.6b": (100_352, 2048, 5632, 24, 32, 32, 4096, {"use_qkv_bias": True}),
        "stablelm-2-12b": (100_352, 5120, 13_824, 40, 32, 8, 4096, _12B),
    },
)
EACH_NORM = {f"attention/{x}_norm": f"self_attn.{x[0]}_layernorm.norms" for x in ("query", "key")}
STABLELM = decoders.family(
    title="StableLM 2",
    model_types=("stablelm",),
    architecture="StableLmForCausalLM",
    read=read_stablelm,
    keys={"layer_norm_eps": number()}
    | dict.fromkeys(("use_qkv_bias", "qk_layernorm", "use_parallel_residual"), flag()),
    sizes=STABLELM_SIZES,
    renamed=EACH_NORM,
    apart=("",),
)
