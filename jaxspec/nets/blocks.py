"""The table of the kinds of blocks that layers are made of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxspec.nets.delta import DeltaShape
from jaxspec.nets.dense_and_experts import DenseAndExpertsShape
from jaxspec.nets.experts import ExpertsShape
from jaxspec.nets.per_layer import LayerEndShape, PerLayerShape
from jaxspec.nets.shapes import AttentionShape, FeedForwardShape

BLOCKS: dict[str, type] = {
    "attention": AttentionShape,
    "dense": FeedForwardShape,
    "experts": ExpertsShape,
    "dense_and_experts": DenseAndExpertsShape,
    "delta": DeltaShape,
    "per_layer": PerLayerShape,
    "layer_end": LayerEndShape,
}
"""The kinds of blocks, by their names in manifests; a block of another kind needs a line here to be
saved.
"""
STANDARD: Mapping[str, type] = MappingProxyType(  # not named
    {"attention": AttentionShape, "cross": AttentionShape, "ff": FeedForwardShape}
)
