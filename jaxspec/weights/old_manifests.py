"""The networks of manifests from before these held a config.json: the fields of a dataclass, in a
table [model]. Nothing writes them any more, except the tables of n-grams, which have no config.json.
"""

from __future__ import annotations

from typing import Any

from jaxspec.files.strict_tables import RecipeError, build
from jaxspec.nets import NETWORKS
from jaxspec.nets.delta import DeltaShape
from jaxspec.nets.dense_and_experts import DenseAndExpertsShape
from jaxspec.nets.experts import ExpertsShape
from jaxspec.nets.per_layer import LayerEndShape, PerLayerShape
from jaxspec.nets.shapes import AttentionShape, DecoderConfig, FeedForwardShape
from jaxspec.nets.uniform import UniformDecoder, UniformGPT

FAMILIES: dict[str, type] = {name: network.config for name, network in NETWORKS.items()}
FAMILIES |= {"gpt": UniformGPT, "decoder": UniformDecoder}
BLOCKS: dict[str, type] = {  # by their names there, where a layer's place does not tell
    "attention": AttentionShape,
    "dense": FeedForwardShape,
    "experts": ExpertsShape,
    "dense_and_experts": DenseAndExpertsShape,
    "delta": DeltaShape,
    "per_layer": PerLayerShape,
    "layer_end": LayerEndShape,
}
ROLES: dict[str, type | None] = {
    "attention": AttentionShape,
    "cross": AttentionShape,
    "ff": FeedForwardShape,
    "last": None,
    "side": None,
}


def network(family: str, table: dict[str, Any]) -> Any:
    """Builds the configuration of a network.

    Args:
        family: the manifest's.
        table: its table [model].

    Raises:
        RecipeError: a key is missing, unknown or of another type.

    >>> sizes = {"vocab_size": 32, "dim": 8, "ff_dim": 16, "layers": 2, "heads": 2}
    >>> network("gpt", sizes).positions
    'learned'
    """
    if family == "decoder" and isinstance(table.get("layers"), list):
        layers = [_blocks(layer) for layer in table["layers"]]
        return build(DecoderConfig, _blocks(table) | {"layers": layers}, "[model]")
    form = build(FAMILIES[family], table, "[model]")
    if isinstance(form, UniformGPT | UniformDecoder):
        return form.config()
    return form


def _blocks(table: Any) -> Any:
    """Builds the blocks of a layer, or that of a whole network; no table stays as it is."""
    if not isinstance(table, dict):
        return table  # `build` says what it should be
    return {
        role: _block(role, x) if role in ROLES and isinstance(x, dict) else x
        for role, x in table.items()
    }


def _block(role: str, table: dict[str, Any]) -> Any:
    name = table.get("block")
    block_type = ROLES[role] if name is None else BLOCKS.get(name)
    if block_type is None:
        raise RecipeError(f"[model] {role} has block {name!r}: expected one of {', '.join(BLOCKS)}")
    sizes = {key: x for key, x in table.items() if key != "block"}
    return build(block_type, sizes, f"[model] {role}")
