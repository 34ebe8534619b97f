"""Manifests from before these held a config.json: short forms, and networks layer by layer."""

import dataclasses
from typing import Any

import pytest

from jaxspec.files.strict_tables import RecipeError
from jaxspec.nets import short_form
from jaxspec.nets.rotary import Rotary
from jaxspec.nets.shapes import (
    AttentionShape,
    DecoderConfig,
    FeedForwardShape,
    LayerShape,
    NormShape,
)
from jaxspec.weights import old_manifests
from jaxspec.weights.hf_families import FAMILIES


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(x) for key, x in value.items() if x is not None}
    if isinstance(value, list | tuple):
        return [without_none(x) for x in value]
    return value


def named(role, block, table):
    """Adds the name that a block had where its place does not tell its type."""
    if role in table and old_manifests.ROLES[role] is not type(block):
        names = {block_type: name for name, block_type in old_manifests.BLOCKS.items()}
        table[role]["block"] = names[type(block)]


def written(config):
    """The family and the table of a manifest, as they were written."""
    form = short_form(config)
    table = dataclasses.asdict(form)
    if isinstance(form, DecoderConfig):
        for layer, blocks in zip(form.layers, table["layers"], strict=True):
            for role, block in layer.blocks.items():
                named(role, block, blocks)
        if form.side is not None:
            named("side", form.side, table)
    families = {kind: name for name, kind in old_manifests.FAMILIES.items()}
    return families.get(type(form), "decoder"), without_none(table)


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.sizes], ids=lambda family: family.title
)
def test_published_shapes_are_read(family):
    """In a short form, or layer by layer: OLMo's norms, Gemma 4's layers and experts have none."""
    for config in family.sizes.values():
        assert old_manifests.network(*written(config)) == config


def test_a_table_of_one_number_for_all_layers():
    """As manifests were written before layers were values: windows and rotary bases by turns."""
    table = dict(
        vocab_size=13, dim=8, ff_dim=16, layers=3, heads=2, kv_heads=1, head_dim=4, head_norms=True
    )
    table |= dict(
        window=3,
        local=[True, False],
        rope_base=100.0,
        local_rope_base=10.0,
        tied_head=True,
        activation="gelu",
    )
    local = AttentionShape(2, 1, 4, window=3, rotary=Rotary(10.0), head_norms=True)
    layers = [local, dataclasses.replace(local, window=None, rotary=Rotary(100.0)), local]
    expected = DecoderConfig(
        13,
        8,
        tuple(LayerShape(layer, FeedForwardShape(16, "gelu")) for layer in layers),
        NormShape(),
        tied_head=True,
    )
    assert old_manifests.network("decoder", table) == expected
    listed = without_none(dataclasses.asdict(expected))
    assert old_manifests.network("decoder", listed) == expected


def test_mistakes_are_named():
    layer = LayerShape(AttentionShape(2, 2, 4, rotary=Rotary()), FeedForwardShape(8))
    table = without_none(dataclasses.asdict(DecoderConfig(13, 8, (layer,), NormShape())))
    assert old_manifests.network("decoder", table).layers == (layer,)
    for change, message in (
        ({"postnorms": True}, r"\[model\] layers has an unknown key 'postnorms'"),
        ({"ff": {"block": "mamba"}}, "ff has block 'mamba': expected one of attention, dense, "),
        ({"last": {"dim": 3}}, "last has block None: expected one of attention, dense, "),
    ):
        changed = {"layers": [table["layers"][0] | change]}
        with pytest.raises(RecipeError, match=message):
            old_manifests.network("decoder", table | changed)
    with pytest.raises(
        RecipeError, match=r"\[model\] layers must be of type LayerShape, got 'all'"
    ):
        old_manifests.network("decoder", table | {"layers": ["all"]})
