"""GPT-2 (Radford et al. 2019), and the GPT-like decoder of the paper (arXiv 2211.17192, section 4):
one network.

By the paper's sizes, its head is a separate matrix; GPT-2's is tied to the embedding.
"""

from __future__ import annotations

from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.uniform import UniformGPT, configs, gpt_config, short_form
from jaxspec.weights.hf_families import common
from jaxspec.weights.hf_families.common import (
    HEAD,
    MOST_LAYERS,
    THEIRS,
    Family,
    Tensor,
    count,
    flag,
    number,
)

FIELDS = {  # the network's fields: those of config.json
    "vocab_size": "vocab_size",
    "dim": "n_embd",
    "ff_dim": "n_inner",
    "layers": "n_layer",
    "heads": "n_head",
    "max_positions": "n_positions",
    "tied_head": "tie_word_embeddings",
    "epsilon": "layer_norm_epsilon",
    "scale_scores": "scale_attn_weights",
    "scale_by_layer": "scale_attn_by_inverse_layer_idx",
}


KEYS = {
    **dict.fromkeys(("vocab_size", "n_embd", "n_inner", "n_head", "n_positions"), count()),
    "n_layer": count(limit=MOST_LAYERS),
    "layer_norm_epsilon": number(),
    "tie_word_embeddings": flag(),
    "scale_attn_weights": flag(),
    "scale_attn_by_inverse_layer_idx": flag(),
}


def read(table: dict) -> DecoderConfig:
    """Reads the network of a config.json."""
    common.only(table, add_cross_attention=False)
    wide = 4 * (table.get("n_embd") or 0)
    fields = common.read_keys(
        table,
        FIELDS,
        ff_dim=wide,
        tied_head=True,
        epsilon=1e-5,
        scale_scores=True,
        scale_by_layer=False,
    )
    return gpt_config(
        **fields, activation=common.activation(table.get("activation_function", "gelu_new"))
    )


def write(config: DecoderConfig) -> dict[str, Any]:
    """Writes the config.json of a network."""
    form = short_form(config)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **common.write_keys(form, FIELDS),
        "activation_function": "gelu_new" if form.activation == "gelu" else THEIRS[form.activation],
    }


LAYER = {"attention_norm": "ln_1", "ff_norm": "ln_2", "ff/wi": "mlp.c_fc", "ff/out": "mlp.c_proj"}
LAYER |= dict.fromkeys(("attention/query", "attention/key", "attention/value"), "attn.c_attn")
LAYER |= {"attention/out": "attn.c_proj"}
MODULES = {
    "embedding": "transformer.wte",
    "position": "transformer.wpe",
    "norm": "transformer.ln_f",
}
MODULES |= {
    "head/weight": HEAD,
    **{f"layers_{{}}/{path}": f"transformer.h.{{}}.{x}" for path, x in LAYER.items()},
}


def names(config: DecoderConfig) -> dict[str, Tensor]:
    """Says where each parameter lies: Conv1D stores [in, out], and queries, keys and values as
    one.
    """
    return {
        path: x._replace(transposed=path.startswith("layers") and path.endswith("weight"))
        for path, x in common.names_by(MODULES, config).items()
    }


def canonical(name: str) -> str | None:
    """Adds "transformer.", which names of the first checkpoints lack, and leaves out their causal
    masks.

    >>> canonical("h.0.ln_1.weight")
    'transformer.h.0.ln_1.weight'
    >>> canonical("h.0.attn.bias")
    """
    if name == HEAD:
        return HEAD
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return f"transformer.{name.removeprefix('transformer.')}"


def _gpt2(dim: int, layers: int, heads: int) -> UniformGPT:
    return UniformGPT(50_257, dim, 4 * dim, layers, heads, 1024)


SIZES = configs(
    {
        # Section 4.1 of the paper, trained on lm1b with 8k tokens; its counts have no biases and no
        # positions.
        "gpt-97m": UniformGPT(8192, 768, 3072, 12, 12, tied_head=False),
        "gpt-6m": UniformGPT(8192, 256, 1024, 2, 4, tied_head=False),
        "gpt2": _gpt2(768, 12, 12),
        "gpt2-medium": _gpt2(1024, 24, 16),
        "gpt2-large": _gpt2(1280, 36, 20),
        "gpt2-xl": _gpt2(1600, 48, 25),
    }
)

GPT2 = Family(
    title="GPT-2",
    model_types=("gpt2",),
    architecture="GPT2LMHeadModel",
    keys=KEYS,
    read=read,
    write=write,
    names=names,
    canonical=canonical,
    sizes=SIZES,
)
