"""What the metadata of a GGUF file means: the config.json of the same model.

llama.cpp names an architecture, and its sizes by keys that begin with that name (the GGUF specification lists them).
Some facts are not among the metadata; llama.cpp's code has them for each architecture, or the tensors show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.families.common import FamilyError, need

Shape = tuple[int, ...]


def config_json(metadata: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """A config.json that `families.of` reads.

    Args:
        metadata: of the file, by key.
        shapes: of its tensors, by llama.cpp's names; rows first.

    Raises:
        FamilyError: the architecture is none of ours, or a key is missing.

    >>> config_json({"general.architecture": "rwkv7"}, {})
    Traceback (most recent call last):
    jaxspec.families.common.FamilyError: the architecture is 'rwkv7', expected one of gpt2, t5, llama, qwen2, ...
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise FamilyError(f"the architecture is {architecture!r}, expected one of {', '.join(ARCHITECTURES)}")
    if "token_embd.weight" not in shapes:
        raise FamilyError("it has no tensor token_embd.weight")
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    table = ARCHITECTURES[architecture](keys, shapes)
    table |= {"vocab_size": shapes["token_embd.weight"][0], "tie_word_embeddings": "output.weight" not in shapes}
    return {key: value for key, value in table.items() if value is not None}


def _gpt2(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": need(keys, "embedding_length"),
        "n_inner": keys.get("feed_forward_length"),
        "n_layer": need(keys, "block_count"),
        "n_head": need(keys, "attention.head_count"),
        "n_positions": need(keys, "context_length"),
        "layer_norm_epsilon": need(keys, "attention.layer_norm_epsilon"),
    }


def _t5(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    gated = "enc.blk.0.ffn_gate.weight" in shapes
    return {
        "model_type": "t5",
        "d_model": need(keys, "embedding_length"),
        "d_ff": need(keys, "feed_forward_length"),
        "d_kv": need(keys, "attention.key_length"),
        "num_heads": need(keys, "attention.head_count"),
        "num_layers": need(keys, "block_count"),
        "num_decoder_layers": keys.get("decoder_block_count"),
        "relative_attention_num_buckets": need(keys, "attention.relative_buckets_count"),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "layer_norm_epsilon": keys.get("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon")),
        "decoder_start_token_id": keys.get("decoder_start_token_id"),
    }


def _decoder(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    width = need(keys, "attention.key_length") if "attention.key_length" in keys else keys.get("rope.dimension_count")
    table = {
        "hidden_size": need(keys, "embedding_length"),
        "intermediate_size": need(keys, "feed_forward_length"),
        "num_hidden_layers": need(keys, "block_count"),
        "num_attention_heads": need(keys, "attention.head_count"),
        "num_key_value_heads": keys.get("attention.head_count_kv"),
        "head_dim": width,
        "rms_norm_eps": need(keys, "attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.get("rope.freq_base", 10_000.0),
        "max_position_embeddings": keys.get("context_length"),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "sliding_window": keys.get("attention.sliding_window"),
    }
    if (kind := keys.get("rope.scaling.type", "none")) != "none":
        table["rope_scaling"] = {
            "rope_type": kind,
            "factor": need(keys, "rope.scaling.factor"),
            "original_max_position_embeddings": keys.get("rope.scaling.original_context_length"),
        }
    return table


def _llama(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Of Mistral's files, too, which have a window if anything tells them from Llama's."""
    table = _decoder(keys, shapes)
    return table | {"model_type": "llama" if table["sliding_window"] is None else "mistral"}


def _qwen2(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    return _decoder(keys, shapes) | {"model_type": "qwen2"}


def _qwen3(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    return _decoder(keys, shapes) | {"model_type": "qwen3"}


def _gemma(keys: dict[str, Any], shapes: Mapping[str, Shape], model_type: str, largest: int) -> dict[str, Any]:
    """Scores are divided by the root of the heads' dimension; of the largest, as its layers show, by dim / heads."""
    table = _decoder(keys, shapes)
    scalar = table["head_dim"] or 256
    if table["num_hidden_layers"] == largest:
        scalar = table["hidden_size"] / table["num_attention_heads"]
    return table | {
        "model_type": model_type,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": keys.get("attn_logit_softcapping"),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
    }


def _gemma2(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    return _gemma(keys, shapes, "gemma2", largest=46)


def _gemma3(keys: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    found = _gemma(keys, shapes, "gemma3_text", largest=62)
    return found | {"rope_local_base_freq": keys.get("rope.freq_base_swa")}


ARCHITECTURES = {
    "gpt2": _gpt2,
    "t5": _t5,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
NORMS_FROM_ONE = ("gemma2", "gemma3")  # whose norms are stored as what they multiply by; transformers subtracts 1
INTERLEAVED = ("llama",)  # whose queries and keys are stored for rotations of dimensions 2i and 2i + 1
