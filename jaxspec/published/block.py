"""Checkpoints of block drafters: DFlash, DSpark, and either in the format of `speculators`."""

from __future__ import annotations

from typing import Any

from jaxspec.families.common import need
from jaxspec.nets.block import BlockConfig
from jaxspec.published.common import (
    VOCABULARY,
    FamilyError,
    Format,
    Shapes,
    TargetShape,
    check_shape,
    check_vocabulary,
    draft_vocab,
    layer_names,
    layer_of,
    plain,
    speculators,
    taps_of,
)

BEFORE = "markov_head.markov_w1.weight"


def canonical(name: str) -> str | None:
    """One spelling; what estimates confidences is not read."""
    found = plain(name)
    return None if found is None or found.startswith("confidence_head.") else found


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether there is one norm of all that is read, and layers that have none for it."""
    return {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= shapes.keys()


def read(table: dict, shapes: Shapes, target: TargetShape) -> BlockConfig:
    """The network of a config.json."""
    own = {**table, **(table.get("dflash_config") or {})}
    layer = layer_of(table, shapes)
    check_vocabulary(layer.vocab_size, target)
    hidden = table.get("target_hidden_size") or layer.dim
    if own.get("aux_hidden_state_layer_ids") is not None:
        taps = taps_of(own["aux_hidden_state_layer_ids"], -1, target)
    else:
        taps = taps_of(need(own, "target_layer_ids"), 0, target)
    made_for = own.get("num_target_layers")
    if made_for is not None and made_for != target.layers:
        raise FamilyError(f"it was made for a target of {made_for} layers, and the target has {target.layers}")
    if hidden != target.hidden_size:
        raise FamilyError(
            f"it reads hidden states of width {hidden}, and the target's have {target.hidden_size}: it was made for "
            "another target"
        )
    check_shape(shapes, "fc.weight", 1, len(taps) * hidden, f"{len(taps)} layers of a total width of")
    spark = table.get("speculators_model_type") == "dspark" or "DSpark" in "".join(table.get("architectures") or ())
    own_head, cap = "lm_head.weight" in shapes, own.get("final_logit_softcapping") or None
    theirs = getattr(target.config, "logits_cap", None)
    if not own_head and theirs is not None:
        if cap != theirs or own.get("output_multiplier", 1.0) != 1.0:
            raise FamilyError(f"the target's head caps its logits at {theirs}, and the drafter's at {cap}")
        cap = None  # the head does so
    options: dict[str, Any] = {
        "layer": layer,
        "hidden_size": hidden,
        "taps": taps,
        "block": int(need(own, "block_size")),
        "mask_token": int(need(own, "mask_token_id")),
        "from_anchor": bool(own.get("sample_from_anchor", spark)),
        "markov_rank": shapes[BEFORE][1] if BEFORE in shapes else 0,
        "markov": own.get("markov_head_type") or "vanilla",
        "draft_vocab": draft_vocab(shapes, layer.vocab_size),
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_head": own_head,
        "embedding_scale": float(own.get("input_embedding_scale", 1.0)),
        "logits_scale": float(own.get("output_multiplier", 1.0)),
        "logits_cap": cap,
    }
    try:
        return BlockConfig(**options)
    except ValueError as error:
        raise FamilyError(str(error)) from error


def names(config: BlockConfig) -> dict[str, str]:
    """Where each parameter lies."""
    found = {"fc/weight": "fc.weight", "hidden_norm/scale": "hidden_norm.weight", "norm/scale": "norm.weight"}
    found |= layer_names(config.layer)
    if config.own_embedding:
        found["embedding/embedding"] = "embed_tokens.weight"
    if config.own_head:
        found["head/weight"] = "lm_head.weight"
    if config.draft_vocab is not None:
        found["vocabulary"] = VOCABULARY
    if config.markov_rank:
        found |= {"markov/before/embedding": BEFORE, "markov/after/weight": "markov_head.markov_w2.weight"}
        for kind, ours, theirs in (("gated", "gate", "gate_proj"), ("rnn", "joint", "joint_proj")):
            if config.markov == kind:
                found |= {f"markov/{ours}/{x}": f"markov_head.{theirs}.{x}" for x in ("weight", "bias")}
    return found


def write(config: BlockConfig, verifier: dict, tokens: int) -> dict:
    """The config.json, as `speculators` has it."""
    if (config.embedding_scale, config.logits_scale, config.logits_cap) != (1.0, 1.0, None):
        raise FamilyError("the format of speculators has no scales or caps of embeddings and logits")
    kind = "dspark" if config.markov_rank else "dflash"
    own: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab or config.layer.vocab_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "block_size": config.block,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        "target_hidden_size": None if config.hidden_size == config.layer.dim else config.hidden_size,
    }
    if config.markov_rank:
        own |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov, "enable_confidence_head": False}
    architecture = "DSparkSpeculator" if config.markov_rank else "DFlashSpeculator"
    return speculators(kind, architecture, config.layer, own, verifier, min(tokens, config.count))


BLOCK = Format("block drafter", canonical, matches, read, names, write)
