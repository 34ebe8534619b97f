"""T5Gemma (arXiv 2504.06225), of Gemma 2's layers, and the text half of T5Gemma 2 (2512.14856), of
Gemma 3's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.shapes import LayerShape
from jaxspec.nets.t5gemma import T5GemmaConfig, t5gemma_config
from jaxspec.nets.uniform import configs, nearest
from jaxspec.weights.hf_families import common, decoders, gemma
from jaxspec.weights.hf_families.common import (
    BEGINNING,
    Family,
    FamilyError,
    Tensor,
    count,
    flag,
    need,
    only,
    table_of,
)

HEAD = "lm_head.out_proj.weight"
LAYER = {  # a layer's norms
    "attention_norm": "pre_self_attn_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "ff_norm": "pre_feedforward_layernorm",
    "ff_post_norm": "post_feedforward_layernorm",
}
CROSS = {  # cross-attention has the names of self-attention, with another word in them
    path.replace("attention", "cross"): name.replace("self_attn", "cross_attn")
    for path, name in (decoders.LLAMA | LAYER).items()
    if path.startswith("attention")
}
OF_IMAGES = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
TEXT = "model.encoder.text_model."


VISION = {  # the smallest: transformers makes no model without a vision tower
    **{"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 224, "patch_size": 14},
}


def text(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a T5Gemma 2 whose vision tower, which is not read, is small."""
    return {**table, "encoder": {**table["encoder"], "vision_config": VISION}}


def read(table: dict) -> T5GemmaConfig:
    """Reads the network of a T5Gemma; the encoder's windows reach as far ahead as back, and count a
    token's own place.

    A decoder's row begins with decoder_start_token_id; without one with bos_token_id, as in
    transformers.
    """
    encoder, decoder = (gemma.read_gemma2(need(table, side)) for side in ("encoder", "decoder"))
    only(table["decoder"], cross_attention_hidden_size=encoder.dim)
    encoder = _with_windows(encoder, _both_ways)
    tied = table.get("tie_word_embeddings", True) is not False
    return _joined(table, encoder, replace(decoder, tied_head=tied))


def read_2(table: dict) -> T5GemmaConfig:
    """Reads the text half of a T5Gemma 2, whose head and both of whose sides have one embedding."""
    only(table, tie_word_embeddings=True)
    encoder_table = need(table, "encoder")
    encoder, decoder = (
        gemma.read_gemma3(half)
        for half in (need(encoder_table, "text_config"), need(table, "decoder"))
    )
    if encoder.dim != decoder.dim:
        raise FamilyError(
            f"the encoder's hidden_size is {encoder.dim}: expected the decoder's, {decoder.dim}"
        )
    image_end = encoder_table.get("eoi_token_index")
    options = {
        "merged": True,
        "shares_embedding": True,
        "end_of_image": 256_000 if image_end is None else image_end,
    }
    return _joined(table, encoder, replace(decoder, tied_head=True), **options)


def _joined(
    table: dict, encoder: DecoderConfig, decoder: DecoderConfig, **options: Any
) -> T5GemmaConfig:
    if encoder.vocab_size != decoder.vocab_size:
        raise FamilyError(
            f"the encoder's vocab_size is {encoder.vocab_size}: expected {decoder.vocab_size}"
        )
    encoder = _as_encoder(encoder, decoder)
    tables = (table, table["decoder"])
    keys = ("decoder_start_token_id", "bos_token_id")
    starts = (x[key] for x in tables for key in keys if x.get(key) is not None)
    return t5gemma_config(encoder, decoder, start_token=next(starts, 2), **options)


def _as_encoder(encoder: DecoderConfig, decoder: DecoderConfig) -> DecoderConfig:
    """Drops a side's keys about its head and its longest row, which are the decoder's."""
    return replace(encoder, tied_head=True, logits_cap=None, max_positions=decoder.max_positions)


def _both_ways(window: int) -> int:
    """Counts the positions of an encoder's window, which reaches as far ahead as back."""
    return 2 * window + 1


def _with_windows(config: DecoderConfig, changed: Callable[[int], int]) -> DecoderConfig:
    def change(_: int, layer: LayerShape) -> LayerShape:
        window = layer.attention.window
        if window is None:
            return layer
        return decoders.change(layer, {"window": changed(window)})

    return decoders.with_layers(config, change)


def names(encoder: str, embedding: str, config: T5GemmaConfig) -> dict[str, Tensor]:
    """Says where each parameter lies; the first two are in front of the names of the encoder and of
    the embedding.
    """
    modules = {
        "embedding": f"{embedding}embed_tokens",
        "encoder_embedding": f"{encoder}embed_tokens",
        "encoder_image_end": f"{encoder}embed_tokens.eoi_embedding",
        "encoder_norm": f"{encoder}norm",
        "norm": "model.decoder.norm",
        "head/weight": HEAD,
        **decoders.layer_modules(config, LAYER | CROSS, name="model.decoder.layers.{}"),
        **decoders.layer_modules(config, LAYER, "encoder_{}", f"{encoder}layers.{{}}"),
    }
    return common.names_by(modules, config)


def canonical(name: str) -> str | None:
    """Leaves out rotary frequencies, and what reads images; finds the encoder's text half in either
    of its layouts.

    >>> canonical("model.encoder.layers.0.mlp.up_proj.weight")
    'model.encoder.text_model.layers.0.mlp.up_proj.weight'
    >>> canonical("model.encoder.vision_tower.vision_model.post_layernorm.bias")
    """
    if name.startswith(OF_IMAGES):
        return None
    return decoders.canonical(name.replace(TEXT, "model.encoder.").replace("model.encoder.", TEXT))


def _size(encoder: DecoderConfig, decoder: DecoderConfig, **options: Any) -> T5GemmaConfig:
    return t5gemma_config(_as_encoder(encoder, decoder), decoder, **options)


# The sizes of T5 v1.1, with Gemma 2's layers; and those of Gemma 2.
_S = replace(
    nearest(gemma.SIZES_2["gemma-2-2b"]),
    **{
        "dim": 512,
        "ff_dim": 1024,
        "layers": 8,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 64,
        "query_scalar": 64.0,
    },
)
_SIDES = configs(
    {
        "s": _S,
        "b": replace(_S, dim=768, ff_dim=2048, layers=12, heads=12, kv_heads=12),
        "l": replace(_S, dim=1024, ff_dim=2816, layers=24, heads=16, kv_heads=16),
        "xl": replace(_S, dim=2048, ff_dim=5120, layers=24, heads=32, kv_heads=32),
    }
) | {size: gemma.SIZES_2[f"gemma-2-{size}"] for size in ("2b", "9b")}
_PAIRS = [*((size, size) for size in _SIDES), ("9b", "2b")]
SIZES = {
    f"t5gemma-{encoder}-{decoder}": _size(
        _with_windows(_SIDES[encoder], _both_ways), _SIDES[decoder]
    )
    for encoder, decoder in _PAIRS
}
_SCALED = {"vocab_size": 262_144, "rope_scaling": "linear", "rope_factor": 8.0}
_SIDES_2 = {
    size: replace(nearest(gemma.SIZES_3[f"gemma-3-{size}"]), **_SCALED).config()
    for size in ("270m", "1b", "4b")
}
SIZES_2 = {
    f"t5gemma-2-{size}-{size}": _size(
        side, side, merged=True, shares_embedding=True, end_of_image=256_000
    )
    for size, side in _SIDES_2.items()
}

_STARTS = dict.fromkeys(("decoder_start_token_id", "bos_token_id"), count(least=0))
_SIDE = gemma.KEYS | {"cross_attention_hidden_size": count()}
KEYS = {
    "encoder": table_of(decoders.with_text(_SIDE)),
    "decoder": table_of(_SIDE | _STARTS),
    "tie_word_embeddings": flag(),
    **_STARTS,
}
UNWRITTEN = ("dtype", "end_tokens", "begin_tokens")
T5GEMMA = Family(
    title="T5Gemma",
    model_types=("t5gemma",),
    architecture="T5GemmaForConditionalGeneration",
    keys=KEYS,
    read=read,
    names=functools.partial(names, "model.encoder.", "model.decoder."),
    canonical=decoders.canonical,
    sizes=SIZES,
    copies={},
    unwritten=UNWRITTEN,
    head=HEAD,
    **BEGINNING,
)
T5GEMMA2 = Family(
    title="T5Gemma 2, text",
    model_types=("t5gemma2",),
    architecture="T5Gemma2ForConditionalGeneration",
    text=text,
    keys=KEYS,
    read=read_2,
    names=functools.partial(names, TEXT, TEXT),
    canonical=canonical,
    sizes=SIZES_2,
    copies={
        f"model.decoder.{name}": f"{TEXT}{name}"
        for name in ("embed_tokens.weight", "embed_tokens.eoi_embedding")
    },
    unwritten=UNWRITTEN,
    head=HEAD,
    **BEGINNING,
)
