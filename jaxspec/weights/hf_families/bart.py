"""BART, mBART, Marian (opus-mt), M2M-100 and NLLB: one network, whose norms and positions the
family decides.

Keys of early files that repeat a family's fixed behaviour, such as normalize_before, are not read,
as in transformers. `forced_eos_token_id` is not done: a row that ends at its limit has no end
token.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.nets.bart import BartConfig
from jaxspec.weights.hf_families import common
from jaxspec.weights.hf_families.common import (
    HEAD,
    MOST_LAYERS,
    Family,
    FamilyError,
    Tensor,
    count,
    flag,
)

FIELDS = {  # the network's fields: those of config.json
    "vocab_size": "vocab_size",
    "dim": "d_model",
    "ff_dim": "decoder_ffn_dim",
    "heads": "decoder_attention_heads",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "max_positions": "max_position_embeddings",
    "scale_embedding": "scale_embedding",
    "tied_head": "tie_word_embeddings",
    "start_token": "decoder_start_token_id",
}
SIDES = {"encoder_ffn_dim": "decoder_ffn_dim", "encoder_attention_heads": "decoder_attention_heads"}
KEYS = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "d_model"), count()),
    **dict.fromkeys((*SIDES, *SIDES.values(), "max_position_embeddings"), count()),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), count(limit=MOST_LAYERS)),
    **dict.fromkeys(("decoder_start_token_id", "bos_token_id", "pad_token_id"), count(least=0)),
    **dict.fromkeys(("scale_embedding", "tie_word_embeddings"), flag()),
    "share_encoder_decoder_embeddings": flag(),
}
BANNED = "bad_words_ids"
BEFORE: dict[str, Any] = dict(norms_after=False, final_norm=True)
BART: dict[str, Any] = {}
MBART: dict[str, Any] = BEFORE
MARIAN: dict[str, Any] = dict(embedding_norm=False, positions="sinusoids", offset=0)
M2M_100: dict[str, Any] = BEFORE | dict(
    embedding_norm=False, logits_bias=False, positions="inclusive sinusoids"
)
OWN = "share_encoder_decoder_embeddings"


def read(options: dict[str, Any], activation: str, table: dict) -> BartConfig:
    """Reads the network of a config.json.

    Args:
        options: the fields that the family decides.
        activation: the default for files that do not name one.
        table: the file's content. Both sides must have layers of the same sizes.
    """
    common.only(
        table, **{key: common.need(table, decoder_key) for key, decoder_key in SIDES.items()}
    )
    source = None
    # Their vocab_size is then the encoder's alone.
    if table.get(OWN) is False:
        source = common.need(table, "vocab_size")
        table = table | {"vocab_size": common.decoder_vocab(table)}
    table = common.with_start(table)
    scaled = options.get("positions") == "inclusive sinusoids"
    if scaled and (pad := table.get("pad_token_id")) is not None:
        options = options | {"offset": pad + 1}
    fields = common.read_keys(
        table, FIELDS, max_positions=1024, scale_embedding=scaled, tied_head=True, start_token=2
    )
    return BartConfig(
        **fields,
        **options,
        source_vocab=source,
        activation=common.activation(table.get("activation_function") or activation),
    )


def read_generation(config: BartConfig, table: dict[str, Any]) -> BartConfig:
    """Reads the forced first token, and words that are single tokens; longer ones are left to
    `generate`.

    End tokens are not banned, as in transformers: no text would end.
    """
    words = [] if table.get(BANNED) is None else table[BANNED]
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise FamilyError(
            f"{BANNED} is {words!r}: expected a list of words, each a list of ids, such as [[5], "
            "[6, 7]]"
        )
    for token in (token for word in words for token in word):
        common.check_id(f"an id in {BANNED}", token, config.vocab_size)
    longer = [word for word in words if len(word) > 1]
    if longer:
        text = f"{BANNED} has %s: words of several tokens are not read; see sampling.banned_words"
        logging.getLogger(__name__).warning(text, longer)
    banned = tuple(word[0] for word in words if len(word) == 1 and word[0] not in config.end_tokens)
    return dataclasses.replace(common.read_begin(config, table), banned_tokens=banned)


def write_generation(config: BartConfig) -> dict[str, Any]:
    """Writes what `read_generation` reads."""
    banned = {}
    if config.banned_tokens:
        banned = {BANNED: [[token] for token in config.banned_tokens]}
    return common.write_begin(config) | banned


BLOCK = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
LAYER = {"ff_norm": "final_layer_norm", "ff/wi": "fc1", "ff/out": "fc2"}
for _path, _name in (("attention", "self_attn"), ("cross", "encoder_attn")):
    LAYER |= {
        f"{_path}_norm": f"{_name}_layer_norm",
        **{f"{_path}/{x}": f"{_name}.{y}" for x, y in BLOCK.items()},
    }
SIDE = {
    "position": "embed_positions",
    "embedding_norm": "layernorm_embedding",
    "norm": "layer_norm",
}
MODULES = {  # also Whisper's
    **{
        f"{side}_{path}": f"model.{side}.{x}"
        for side in ("encoder", "decoder")
        for path, x in SIDE.items()
    },
    **{
        f"{side}_{{}}/{path}": f"model.{side}.layers.{{}}.{x}"
        for side in ("encoder", "decoder")
        for path, x in LAYER.items()
    },
}


def names(config: BartConfig) -> dict[str, Tensor]:
    """Says where each parameter lies."""
    if config.source_vocab is None:
        embedding = "model.shared"
    else:
        embedding = "model.decoder.embed_tokens"
    modules = {"embedding": embedding, "encoder_embedding": "model.encoder.embed_tokens"}
    tensors = common.names_by(MODULES | modules | {"head/weight": HEAD, "head/bias": BIAS}, config)
    return {path: x._replace(is_row=path == "head/bias") for path, x in tensors.items()}


SHARED = "model.shared.weight"
BIAS = "final_logits_bias"
COPIES = {f"model.{side}.embed_tokens.weight": SHARED for side in ("encoder", "decoder")}


def canonical(name: str) -> str | None:
    """Adds "model.", which names of models without a head lack, and leaves out version numbers.

    >>> canonical("shared.weight"), canonical("model.encoder.version")
    ('model.shared.weight', None)
    """
    if name in (HEAD, BIAS):
        return name
    if name.endswith(".version"):
        return None
    return f"model.{name.removeprefix('model.')}"


def without_positions(name: str) -> str | None:
    """Leaves out sinusoids, too, which some files hold."""
    if ".embed_positions." in name:
        return None
    return canonical(name)


def _config(
    options: dict[str, Any], vocab: int, dim: int, ff_dim: int, heads: int, layers: int, **more: Any
) -> BartConfig:
    return BartConfig(vocab, dim, ff_dim, heads, layers, layers, **options, **more)


_MARIAN: dict[str, Any] = dict(activation="silu", scale_embedding=True, max_positions=512)
_M2M: dict[str, Any] = M2M_100 | dict(activation="relu", scale_embedding=True)
BART_SIZES = {
    "bart-base": _config(BART, 50_265, 768, 3072, 12, 6),
    "bart-large": _config(BART, 50_265, 1024, 4096, 16, 12),
    "bart-large-cnn": _config(BART, 50_264, 1024, 4096, 16, 12),
}
MBART_SIZES = {
    "mbart-large-50": _config(
        MBART, 250_054, 1024, 4096, 16, 12, scale_embedding=True, activation="relu"
    ),
}
MARIAN_SIZES = {
    "opus-mt-en-de": _config(MARIAN, 58_101, 512, 2048, 8, 6, start_token=58_100, **_MARIAN),
}
M2M_SIZES = {
    "m2m100-418m": _config(_M2M, 128_112, 1024, 4096, 16, 12),
    "m2m100-1.2b": _config(_M2M, 128_112, 1024, 8192, 16, 24),
    "nllb-200-distilled-600m": _config(_M2M, 256_206, 1024, 4096, 16, 12),
    "nllb-200-distilled-1.3b": _config(_M2M, 256_206, 1024, 8192, 16, 24),
    "nllb-200-3.3b": _config(_M2M, 256_206, 2048, 8192, 16, 24),
}


def _tied(table: Mapping[str, Any]) -> dict[str, Any]:
    """Ties embeddings in a config.json: false would untie those of the sides, which are stored once.

    The weights show a head of its own.
    """
    if table.get("tie_word_embeddings") is False:
        return {**table, "tie_word_embeddings": True}
    return dict(table)


def _family(
    title: str,
    model_type: str,
    architecture: str,
    options: dict[str, Any],
    sizes: dict[str, BartConfig],
    canonical: Callable[[str], str | None] = canonical,
    activation: str = "gelu",
) -> Family:
    return Family(
        title=title,
        model_types=(model_type,),
        architecture=architecture,
        keys=KEYS,
        read=functools.partial(read, options, activation),
        names=names,
        canonical=canonical,
        sizes=sizes,
        copies=COPIES,
        unwritten=(
            "dtype",
            "end_tokens",
            "logits_bias",
            "tied_head",
            "begin_tokens",
            "banned_tokens",
        ),
        read_generation=read_generation,
        write_generation=write_generation,
        generation_keys=(common.FORCED, BANNED),
        optional={BIAS: "logits_bias"},
        text=_tied,
    )


FAMILIES = (
    _family("BART", "bart", "BartForConditionalGeneration", BART, BART_SIZES),
    _family("mBART", "mbart", "MBartForConditionalGeneration", MBART, MBART_SIZES),
    _family("Marian, OPUS-MT", "marian", "MarianMTModel", MARIAN, MARIAN_SIZES, without_positions),
    _family(
        "M2M-100, NLLB",
        "m2m_100",
        "M2M100ForConditionalGeneration",
        M2M_100,
        M2M_SIZES,
        without_positions,
        "relu",
    ),
)
