"""Modules for multi-token prediction: tensors beside a model's own, in its folder, or in one of `speculators`.

    Qwen3-Next, Qwen3.5    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm, mtp.layers.0.*
    speculators            mtp_layers.0.{input_proj, token_layernorm, hidden_layernorm, final_layernorm, *}
    MiMo                   model.mtp_layers.0.*, with the same names
    DeepSeek-V3, GLM-4     model.layers.N.{eh_proj, enorm, hnorm, shared_head.*, embed_tokens, *}, N the number of
    layers

The layer of a module is read if it is one of `nets.decoder`: no mixture of experts, no latent or gated attention. Of
several modules the first is read.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.mtp import MTPConfig
from jaxspec.published.common import (
    FamilyError,
    Format,
    Shapes,
    TargetShape,
    check_shape,
    check_vocabulary,
    layer_names,
    layer_of,
    speculators,
)

QWEN, SPECULATORS, MIMO, NEXTN = "qwen.", "speculators.", "mimo.", "nextn."  # in front of names, by where they lie
PARTS = {
    "fc": "fc",
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "norm": "norm",
    "input_proj": "fc",
    "token_layernorm": "embedding_norm",
    "hidden_layernorm": "hidden_norm",
    "final_layernorm": "norm",
    "eh_proj": "fc",
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}
THEIRS = {"fc": "input_proj", "embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm"}


def canonical(name: str) -> str | None:
    """Where it lies, and one spelling; None for the rest of a model.

    >>> canonical("mtp.pre_fc_norm_hidden.weight"), canonical("mtp.layers.0.mlp.up_proj.weight")
    ('qwen.hidden_norm.weight', 'qwen.layers.0.mlp.up_proj.weight')
    >>> canonical("model.layers.61.eh_proj.weight"), canonical("model.embed_tokens.weight")
    ('nextn.61.fc.weight', None)
    """
    for pattern, place in (
        (r"mtp\.layers\.0\.(.+)", QWEN),
        (r"mtp\.(.+)", QWEN),
        (r"mtp_layers\.0\.(.+)", SPECULATORS),
        (r"model\.mtp_layers\.0\.(.+)", MIMO),
        (r"model\.layers\.(\d+\..+)", NEXTN),
    ):
        if found := re.fullmatch(pattern, name):
            number, rest = "", found[1]
            if place == NEXTN:
                number, rest = re.fullmatch(r"(\d+\.)(.+)", rest).groups()  # type: ignore[union-attr]
            stem, _, last = rest.rpartition(".")
            if stem in PARTS and not name.startswith("mtp.layers."):
                return f"{place}{number}{PARTS[stem]}.{last}"
            if stem.startswith("layers."):  # a second module's
                return None
            return f"{place}{number}layers.0.{rest}"
    return None


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether there is a module's projection."""
    return place_of(shapes) is not None


def place_of(shapes: Shapes) -> str | None:
    """In front of which names a module lies; of DeepSeek's the first."""
    for place in (QWEN, SPECULATORS, MIMO):
        if f"{place}fc.weight" in shapes:
            return place
    numbers = [int(name.split(".")[1]) for name in shapes if re.fullmatch(r"nextn\.\d+\.fc\.weight", name)]
    return f"{NEXTN}{min(numbers)}." if numbers else None


def read(table: dict, shapes: Shapes, target: TargetShape) -> MTPConfig:
    """The module beside a model, whose layer is as the model's are."""
    place = place_of(shapes)
    assert place is not None
    check_shape(shapes, f"{place}fc.weight", 0, target.hidden_size, "a width of")
    if place == SPECULATORS:
        layer = layer_of(table, shapes, f"{place}layers.0.")
        check_vocabulary(layer.vocab_size, target)
    elif isinstance(target.config, DecoderConfig):
        layer = target.config
    else:
        raise FamilyError(
            f"its layer is as the target's, and the target is a {type(target.config).__name__}: expected one of "
            "nets.decoder"
        )
    layer = dataclasses.replace(layer, layers=1, local=(), window=None, tied_head=False)
    nextn = place.startswith(NEXTN)
    try:
        return MTPConfig(
            layer,
            hidden_first=place == MIMO,
            feeds_normed=not nextn,
            zero_first=nextn or place == MIMO,
            own_embedding=f"{place}embed_tokens.weight" in shapes,
            own_head=f"{place}lm_head.weight" in shapes,
        )
    except ValueError as error:
        raise FamilyError(str(error)) from error


def names(config: MTPConfig) -> dict[str, str]:
    """Where each parameter lies, but for the place (`place_of`)."""
    found = {"fc/weight": "fc.weight", "norm/scale": "norm.weight"}
    found |= {f"{norm}/scale": f"{norm}.weight" for norm in ("embedding_norm", "hidden_norm")}
    found |= {path.replace("layers_0/", "layer/"): name for path, name in layer_names(config.layer).items()}
    if config.own_embedding:
        found["embedding/embedding"] = "embed_tokens.weight"
    if config.own_head:
        found["head/weight"] = "lm_head.weight"
    return found


def write(config: MTPConfig, verifier: dict, tokens: int) -> dict:
    """The config.json, as `speculators` has it."""
    if (config.hidden_first, config.feeds_normed, config.zero_first) != (False, True, False):
        raise FamilyError(
            "the format of speculators has modules as Qwen's: hidden_first, zero_first false, feeds_normed"
        )
    if config.own_embedding or config.own_head:
        raise FamilyError("in the format of speculators a module uses its target's embedding and head")
    if not config.layer.head_norms:
        raise FamilyError(
            "speculators takes modules with Qwen 3's layer only, whose queries and keys are normalised, and this one "
            "has head_norms=False: train it with head_norms = true (the default of a recipe's [head])"
        )
    own: dict[str, Any] = {"num_nextn_predict_layers": 1}
    return speculators("mtp", "MTPDraftModel", config.layer, own, verifier, tokens)


def spelled(name: str) -> str:
    """As `speculators` has it.

    >>> spelled("fc.weight"), spelled("layers.0.mlp.up_proj.weight")
    ('mtp_layers.0.input_proj.weight', 'mtp_layers.0.mlp.up_proj.weight')
    """
    stem, _, last = name.rpartition(".")
    theirs = {**THEIRS, "norm": "final_layernorm"}.get(stem, stem.removeprefix("layers.0."))
    return f"mtp_layers.0.{theirs}.{last}"


MTP = Format("MTP", canonical, matches, read, names, write, spelled, lambda shapes: place_of(shapes) or "")
