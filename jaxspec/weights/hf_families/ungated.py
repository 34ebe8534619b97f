"""Feed-forward blocks without a gate: StarCoder 2, Nemotron-4, Arcee, Apertus."""

from __future__ import annotations

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape, NormShape
from jaxspec.weights.hf_families import decoders
from jaxspec.weights.hf_families.common import flag, number


def _ungated(index: int, layer: LayerShape) -> LayerShape:
    return decoders.change(layer, {}, {"gated": False})


def read_starcoder2(table: dict) -> DecoderConfig:
    """Reads the network of a StarCoder 2 (arXiv 2402.19173)."""
    defaults = {
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
    }
    table = {"use_bias": True} | decoders.with_defaults(table, **defaults)
    config = decoders.read(
        table, _ungated, **decoders.biases(table, "use_bias"), **decoders.windows(table, [True])
    )
    return decoders.with_layers(config, norm=NormShape("layer", float(table["norm_epsilon"])))


def read_nemotron(table: dict) -> DecoderConfig:
    """Reads the network of a Nemotron-4 (arXiv 2402.16819) or a Minitron: half of each head is
    rotated.
    """
    table, share = decoders.partial_rotary(table, share=0.5)
    table = decoders.with_defaults(table, norm_eps=1e-5, hidden_act="relu2")

    biases = decoders.biases(table, "attention_bias", "mlp_bias")
    config = decoders.read(
        table,
        lambda index, layer: decoders.change(
            layer, decoders.turned(layer, share), {"gated": False}
        ),
        **biases,
    )
    return decoders.with_layers(
        config, norm=NormShape("layer", float(table["norm_eps"]), from_one=True)
    )


def read_apertus(table: dict) -> DecoderConfig:
    """Reads the network of an Apertus (arXiv 2509.14233), whose activation has parameters."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    }
    table = decoders.with_defaults(table, rms_norm_eps=1e-5, hidden_act="xielu", rope_theta=12e6)
    # As in transformers, a file that says nothing of its positions means these.
    if not (table.get("rope_parameters") or table.get("rope_scaling")):
        table |= {"rope_parameters": scaling | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}
    blocks = {"gated": False} | ({"activation": "xielu"} if table["hidden_act"] == "xielu" else {})
    table |= {"hidden_act": "silu"} if table["hidden_act"] == "xielu" else {}
    norms = {"head_norms": True}
    return decoders.read(
        table,
        lambda index, layer: decoders.change(layer, norms, blocks),
        **decoders.biases(table, "attention_bias"),
    )


STARCODER2_SIZES = decoders.sizes(
    read_starcoder2,
    {
        "starcoder2-3b": (
            49_152,
            3072,
            12_288,
            30,
            24,
            2,
            16_384,
            {"rope_theta": 999_999.4420358813},
        ),
        "starcoder2-7b": (49_152, 4608, 18_432, 32, 36, 4, 16_384, {"rope_theta": 1e6}),
        "starcoder2-15b": (
            49_152,
            6144,
            24_576,
            40,
            48,
            4,
            16_384,
            {"rope_theta": 1e5, "tie_word_embeddings": False},
        ),
    },
    sliding_window=4096,
)
STARCODER2 = decoders.family(
    title="StarCoder 2",
    model_types=("starcoder2",),
    architecture="Starcoder2ForCausalLM",
    read=read_starcoder2,
    keys={"norm_epsilon": number(), "use_bias": flag()},
    sizes=STARCODER2_SIZES,
    renamed={"ff/wi": "mlp.c_fc", "ff/out": "mlp.c_proj"},
)
NEMOTRON_SIZES = decoders.sizes(
    read_nemotron, {"nemotron-mini-4b": (256_000, 3072, 9216, 32, 24, 8, 4096)}, head_dim=128
)
NEMOTRON = decoders.family(
    title="Nemotron-4, Minitron",
    model_types=("nemotron",),
    architecture="NemotronForCausalLM",
    read=read_nemotron,
    keys={"norm_eps": number()},
    sizes=NEMOTRON_SIZES,
)
_arcee = decoders.reader(
    "attention_bias", "mlp_bias", changed=_ungated, rms_norm_eps=1e-5, hidden_act="relu2"
)
ARCEE_SIZES = decoders.sizes(
    _arcee,
    {"afm-4.5b": (128_004, 2560, 18_432, 36, 20, 4, 65_536)},
    head_dim=128,
    rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
)
ARCEE = decoders.family(
    title="Arcee",
    model_types=("arcee",),
    architecture="ArceeForCausalLM",
    read=_arcee,
    sizes=ARCEE_SIZES,
)

APERTUS_SIZES = decoders.sizes(
    read_apertus,
    {
        "apertus-8b": (131_072, 4096, 21_504, 32, 32, 8, 65_536),
        "apertus-70b": (131_072, 8192, 43_008, 80, 64, 8, 65_536),
    },
)
APERTUS = decoders.family(
    title="Apertus",
    model_types=("apertus",),
    architecture="ApertusForCausalLM",
    read=read_apertus,
    sizes=APERTUS_SIZES,
    renamed={"attention_norm": "attention_layernorm", "ff_norm": "feedforward_layernorm"},
)
