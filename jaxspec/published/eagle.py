"""EAGLE's checkpoints: the authors', those of SpecForge and SGLang, and of `speculators` (vLLM).

One layer is called midlayer, layers.0 or model.layers.0; all other names are the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.families import describe
from jaxspec.nets.eagle import EagleConfig
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

FUSED = "layers.0.hidden_norm.weight"  # which EAGLE-3 has, and EAGLE-1 has not


def canonical(name: str) -> str | None:
    """One spelling.

    >>> canonical("midlayer.hidden_norm.weight")
    'layers.0.hidden_norm.weight'
    """
    found = plain(name)
    return found and found.replace("midlayer.", "layers.0.", 1)


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether these are EAGLE's tensors: a projection, and a layer that reads pairs."""
    bare = "layers.0.self_attn.q_proj.weight" in shapes and "layers.0.input_layernorm.weight" not in shapes
    return "fc.weight" in shapes and (FUSED in shapes or bare)


def read(table: dict, shapes: Shapes, target: TargetShape) -> EagleConfig:
    """The network of a config.json."""
    layer = layer_of(table, shapes)
    check_vocabulary(layer.vocab_size, target)
    own = {"own_embedding": "embed_tokens.weight" in shapes, "own_head": "lm_head.weight" in shapes}
    biased = "fc.bias" in shapes
    if FUSED not in shapes:
        check_shape(shapes, "fc.weight", 0, target.hidden_size, "the width")
        return _made(layer=layer, hidden_size=target.hidden_size, fc_bias=biased, **own)
    hidden = table.get("target_hidden_size") or layer.dim
    if hidden != target.hidden_size:
        raise FamilyError(
            f"it reads hidden states of width {hidden}, and the target's have {target.hidden_size}: it was made for "
            "another target"
        )
    taps = _taps(table, target)
    check_shape(shapes, "fc.weight", 1, len(taps) * hidden, f"{len(taps)} layers of a total width of")
    return _made(
        layer=layer,
        hidden_size=hidden,
        taps=taps,
        draft_vocab=draft_vocab(shapes, layer.vocab_size),
        fc_bias=biased,
        norm_before_residual=bool(table.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in shapes,
        norm_each_tap="fc_norm.0.weight" in shapes,
        norm_output=bool(table.get("norm_output", False)),
        **own,
    )


def _made(**options: Any) -> EagleConfig:
    try:
        return EagleConfig(**options)
    except ValueError as error:
        raise FamilyError(str(error)) from error


def _taps(table: dict, target: TargetShape) -> tuple[int, ...]:
    if ids := (table.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        return taps_of(ids, 0, target)
    default = [2, target.layers // 2, target.layers - 3]
    return taps_of(table.get("eagle_aux_hidden_state_layer_ids") or default, -1, target)


def names(config: EagleConfig) -> dict[str, str]:
    """Where each parameter lies."""
    found = {"fc/weight": "fc.weight"}
    for path, name in layer_names(config.layer).items():
        if path.startswith("layers_0/attention_norm"):
            if config.taps:
                found["layers_0/embedding_norm/scale"] = name
                found["layers_0/hidden_norm/scale"] = FUSED
        else:
            found[path] = name
    if config.fc_bias:
        found["fc/bias"] = "fc.bias"
    if config.taps:
        found["norm/scale"] = "norm.weight"
    if config.norm_before_fc:
        found["taps_norm/scale"] = "input_norm.weight"
    if config.norm_each_tap:
        found |= {f"tap_norms_{i}/scale": f"fc_norm.{i}.weight" for i in range(len(config.taps))}
    if config.own_embedding:
        found["embedding/embedding"] = "embed_tokens.weight"
    if config.own_head:
        found["head/weight"] = "lm_head.weight"
    if config.draft_vocab is not None:
        found["vocabulary"] = VOCABULARY
    return found


def write(config: EagleConfig, verifier: dict, tokens: int) -> dict:
    """The config.json of EAGLE-3, as `speculators` has it; of EAGLE-1, as its authors have it."""
    if not config.taps:
        _, layer = describe(dataclasses.replace(config.layer, tied_head=False))
        return {**layer, "architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
    if config.fc_bias:
        raise FamilyError("the format of speculators has no bias of the projection of what is read (fc_bias)")
    own = {
        "draft_vocab_size": config.draft_vocab or config.layer.vocab_size,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "embed_requires_grad": False,
        "fc_norm": config.norm_each_tap,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "target_hidden_size": None if config.hidden_size == config.layer.dim else config.hidden_size,
    }
    return speculators("eagle3", "Eagle3Speculator", config.layer, own, verifier, tokens)


EAGLE = Format("EAGLE", canonical, matches, read, names, write)
