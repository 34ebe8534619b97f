"""T5 1.0 and v1.1 (arXiv 1910.10683), FLAN-T5 (2210.11416), mT5 (2010.11934), ByT5 (2105.13626),
umT5 (2304.09151).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.nets.t5 import SIZES as PAPER
from jaxspec.nets.t5 import T5Config
from jaxspec.weights.hf_families import common
from jaxspec.weights.hf_families.common import (
    BEGINNING,
    HEAD,
    MOST_HEAD_DIM,
    MOST_LAYERS,
    Family,
    FamilyError,
    Tensor,
    count,
    flag,
    number,
)

FIELDS = {  # the network's fields: those of config.json
    "vocab_size": "vocab_size",
    "dim": "d_model",
    "ff_dim": "d_ff",
    "heads": "num_heads",
    "head_dim": "d_kv",
    "encoder_layers": "num_layers",
    "decoder_layers": "num_decoder_layers",
    "buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "start_token": "decoder_start_token_id",
    "epsilon": "layer_norm_epsilon",
}
KEYS = {
    **dict.fromkeys(("vocab_size", "d_model", "d_ff", "num_heads"), count()),
    "d_kv": count(limit=MOST_HEAD_DIM),
    **dict.fromkeys(("num_layers", "num_decoder_layers"), count(limit=MOST_LAYERS)),
    "relative_attention_num_buckets": count(limit=2**16),
    "relative_attention_max_distance": count(limit=2**17),
    **dict.fromkeys(("decoder_start_token_id", "bos_token_id", "pad_token_id"), count(least=0)),
    "layer_norm_epsilon": number(),
    "tie_word_embeddings": flag(),
    "scale_decoder_outputs": flag(),
}
FEED_FORWARD = {  # config.json's feed_forward_proj: our activation, and whether it is gated
    "relu": ("relu", False),
    "gated-gelu": ("gelu", True),  # by tanh
    "gated-relu": ("relu", True),
    "gated-silu": ("silu", True),
    "silu": ("silu", False),
    "gelu": ("gelu_erf", False),
}


def read(table: dict) -> T5Config:
    """Reads the network of a config.json.

    Whether the head is tied and whether it is scaled are two facts. Older files have one key for
    both, tie_word_embeddings. transformers 5 writes scale_decoder_outputs for the second, and
    tie_word_embeddings is then always true: whether the head is tied is decided by the weights
    (`jaxspec.weights.huggingface`). A decoder's row begins with decoder_start_token_id; without one
    with bos_token_id, as in transformers, or pad_token_id, as T5's do.
    """
    feed_forward = table.get("feed_forward_proj", "relu")
    if feed_forward not in FEED_FORWARD:
        raise FamilyError(
            f"feed_forward_proj is {feed_forward!r}: expected one of {', '.join(FEED_FORWARD)}"
        )
    activation, gated = FEED_FORWARD[feed_forward]
    tied = table.get("tie_word_embeddings", True) is not False
    scaled = table.get("scale_decoder_outputs", tied) is not False
    table = common.with_start(table | {"pad_token_id": table.get("pad_token_id", 0)})
    usual = dict(decoder_layers=table.get("num_layers"), buckets=32, max_distance=128, epsilon=1e-6)
    fields = common.read_keys(table, FIELDS, **usual)
    return T5Config(
        **fields, activation=activation, gated=gated, tied_head=tied, scaled_head=scaled
    )


def read_mt5(table: dict) -> T5Config:
    """Reads the network of an mT5, whose head is not scaled, whatever the file says."""
    return read({"feed_forward_proj": "gated-gelu", **table, "scale_decoder_outputs": False})


def read_umt5(table: dict) -> T5Config:
    """Reads the network of an umT5, whose layers each have position biases."""
    return dataclasses.replace(
        read({"feed_forward_proj": "gated-gelu", **table}), bias_by_layer=True
    )


def write(config: T5Config) -> dict[str, Any]:
    """Writes the config.json of a network. It has no place for `max_positions`."""
    kinds = {value: key for key, value in FEED_FORWARD.items()}
    name = "umt5" if config.bias_by_layer else "t5"
    return {
        "architectures": [f"{name.upper()}ForConditionalGeneration"],
        "model_type": name,
        "is_encoder_decoder": True,
        **common.write_keys(config, FIELDS),
        "feed_forward_proj": kinds[config.activation, config.gated],
        "tie_word_embeddings": config.tied_head,
        "scale_decoder_outputs": config.scaled_head,
    }


PROJECTIONS = ("query", "key", "value", "out")  # of attention
# The feed-forward block's names, by whether it is gated.
FF = {False: {"wi": "wi", "out": "wo"}, True: {"gate": "wi_0", "wi": "wi_1", "out": "wo"}}
# The blocks of a layer, in their order.
BLOCKS = {"encoder": ("attention", "ff"), "decoder": ("attention", "cross", "ff")}
_CALLED = {"attention": "SelfAttention", "cross": "EncDecAttention", "ff": "DenseReluDense"}
_BIAS = "layer.0.SelfAttention.relative_attention_bias"


def _modules(gated: bool) -> dict[str, str]:
    modules = {"embedding": "shared", "head/weight": HEAD}
    for side, blocks in BLOCKS.items():
        modules |= {
            f"{side}_norm": f"{side}.final_layer_norm",
            f"{side}_bias": f"{side}.block.0.{_BIAS}",
        }
        modules[f"{side}_{{}}/bias"] = f"{side}.block.{{}}.{_BIAS}"
        for i, block in enumerate(blocks):
            path = f"{side}_{{}}/{block}"
            name = f"{side}.block.{{}}.layer.{i}"
            if block == "ff":
                parts = FF[gated]
            else:
                parts = {x: x[0] for x in PROJECTIONS}
            modules |= {
                f"{path}/{x}": f"{name}.{_CALLED[block]}.{module}" for x, module in parts.items()
            }
            modules[f"{path}_norm"] = f"{name}.layer_norm"
    return modules


_MODULES = {gated: _modules(gated) for gated in FF}


def names(config: T5Config) -> dict[str, Tensor]:
    """Says where each parameter lies."""
    return common.names_by(_MODULES[config.gated], config)


SHARED = "shared.weight"
COPIES = {"encoder.embed_tokens.weight": SHARED, "decoder.embed_tokens.weight": SHARED}
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def canonical(name: str) -> str | None:
    """Leaves out a bias that the first checkpoints have and no T5 uses.

    >>> canonical("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")
    """
    if name == _UNUSED:
        return None
    return name


def _mt5(dim: int, ff_dim: int, heads: int, layers: int) -> T5Config:
    return T5Config(250_112, dim, ff_dim, heads, 64, layers, layers)


def _byt5(dim: int, ff_dim: int, heads: int, encoder_layers: int) -> T5Config:
    return T5Config(384, dim, ff_dim, heads, 64, encoder_layers, encoder_layers // 3)


SIZES = PAPER | {
    **{
        f"flan-t5-{size}": PAPER[f"t5-v1_1-{size}"]
        for size in ("small", "base", "large", "xl", "xxl")
    },
    "byt5-small": _byt5(1472, 3584, 6, 12),
    "byt5-base": _byt5(1536, 3968, 12, 18),
    "byt5-large": _byt5(1536, 3840, 16, 36),
    "byt5-xl": _byt5(2560, 6720, 32, 36),
    "byt5-xxl": _byt5(4672, 12_352, 64, 36),
}
MT5_SIZES = {
    "mt5-small": _mt5(512, 1024, 6, 8),
    "mt5-base": _mt5(768, 2048, 12, 12),
    "mt5-large": _mt5(1024, 2816, 16, 24),
    "mt5-xl": _mt5(2048, 5120, 32, 24),
    "mt5-xxl": _mt5(4096, 10_240, 64, 24),
}

UMT5_SIZES = {
    name.replace("mt5", "umt5"): dataclasses.replace(config, vocab_size=256_384, bias_by_layer=True)
    for name, config in MT5_SIZES.items()
    if name != "mt5-large"  # which was never published
}

UNWRITTEN = ("begin_tokens", "dtype", "end_tokens", "max_positions")
T5 = Family(
    title="T5, FLAN-T5, ByT5",
    model_types=("t5",),
    architecture="T5ForConditionalGeneration",
    keys=KEYS,
    read=read,
    write=write,
    names=names,
    canonical=canonical,
    sizes=SIZES,
    copies=COPIES,
    unwritten=UNWRITTEN,
    **BEGINNING,
)
MT5 = Family(
    title="mT5",
    model_types=("mt5",),
    architecture="MT5ForConditionalGeneration",
    keys=KEYS,
    read=read_mt5,
    write=write,
    names=names,
    canonical=canonical,
    sizes=MT5_SIZES,
    copies=COPIES,
    unwritten=UNWRITTEN,
    **BEGINNING,
)
UMT5 = Family(
    title="umT5",
    model_types=("umt5",),
    architecture="UMT5ForConditionalGeneration",
    keys=KEYS,
    read=read_umt5,
    write=write,
    names=names,
    canonical=canonical,
    sizes=UMT5_SIZES,
    copies=COPIES,
    unwritten=UNWRITTEN,
    **BEGINNING,
)
