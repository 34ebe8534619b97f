"""Layers of newer families: norms after blocks alone, blocks side by side, pairs of adjacent
dimensions, factors.

Their caches and trees are among those of test_trees.py.
"""

import dataclasses

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Model
from jaxspec.nets import decoder
from jaxspec.nets.rotary import RopeScaling, Rotary
from jaxspec.nets.shapes import NormShape
from tests.marks import marked
from tests.small import near, random_params

PLAIN = decoder.decoder_config(
    37, dim=16, ff_dim=24, layers=2, heads=4, kv_heads=2, head_dim=4, window=5, local=(True, False)
)


def changed(attention=None, ff=None, layer=None, unrotated=False, **options):
    layers = []
    for shape in PLAIN.layers:
        mixer = dataclasses.replace(shape.attention, **attention or {})
        if unrotated and mixer.window is None:
            mixer = dataclasses.replace(mixer, rotary=None)
        blocks = {"attention": mixer, "ff": dataclasses.replace(shape.ff, **ff or {})}
        layers.append(dataclasses.replace(shape, **blocks, **layer or {}))
    return dataclasses.replace(PLAIN, layers=tuple(layers), **options)


CONFIGS = {
    "OLMo": changed(
        {"head_norms": True, "norms_of": "whole"}, layer={"post_norms": True, "pre_norms": False}
    ),
    "Command R": changed(
        {"rotary": Rotary(adjacent=True)},
        layer={"parallel": True},
        unrotated=True,
        norm=NormShape("layer", bias=False),
        logits_scale=0.25,
    ),
    "Granite": changed(
        {"query_scalar": 9.0}, layer={"added_scale": 0.3}, embedding_scale=7.0, logits_scale=4.0
    ),
    "Nemotron": changed(
        {"rotary": Rotary(dims=2)},
        {"gated": False, "activation": "relu2"},
        norm=NormShape("layer", from_one=True),
    ),
    "Command R+": changed({"head_norms": True, "norms_of": "each"}, norm=NormShape("layer")),
    "Ministral 3": changed({"rotary": Rotary(scaling=RopeScaling(original=4), query_beta=0.7)}),
    "Apertus": changed(ff={"gated": False, "activation": "xielu"}),
    "gpt-oss": changed({"sinks": True}),
    "Hunyuan": changed({"head_norms": True, "norms_of": "rotated"}),
}


# A round is made of passes, rewinds and paths, which test_trees.py has of all of these.
DRAFTED = ("Command R", "gpt-oss")


def random(config, seed):
    return Model(
        decoder.language_model(config),
        random_params(decoder.init, config, seed, 0.3),
        config=config,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(CONFIGS, exhaustive={*CONFIGS} - {*DRAFTED}))
def test_drafted_text_is_plain_text(name):
    """Ragged prompts, longer than the window; a chain and a tree from a model that is often
    right.
    """
    target = random(CONFIGS[name], 0)
    draft = near(target, random(CONFIGS[name], 1), 0.97)
    prompts, options = [[3, 1, 4, 1, 5, 9, 2], [6, 5]], {"max_new_tokens": 14}
    plain = jaxspec.generate(target, prompts, **options)
    for drafter in (draft, drafters.tree(draft, (2, 1))):
        drafted = jaxspec.generate(target, prompts, drafter=drafter, gamma=3, **options)
        np.testing.assert_array_equal(drafted.tokens, plain.tokens)
        assert (drafted.stats.acceptance_rate > 0).all() and (
            drafted.stats.acceptance_rate < 1
        ).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_has_its_own_parameters(name):
    """None of what a layer lacks, and every norm's bias where there is one."""
    config = CONFIGS[name]
    shapes = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))["layers_0"]
    layer = config.layers[0]
    assert ("attention_norm" in shapes) == layer.pre_norms
    assert ("ff_norm" in shapes) == (layer.pre_norms and not layer.parallel)
    assert ("ff_post_norm" in shapes) == layer.post_norms
    assert ("gate" in shapes["ff"]) == layer.ff.gated
    if layer.attention.norms_of == "whole":
        assert shapes["attention"]["query_norm"]["scale"].shape == (16,)
    if layer.attention.norms_of == "each":  # and no biases, though other norms have them
        assert shapes["attention"]["query_norm"]["scale"].shape == (4, 4)
        assert (
            shapes["attention"]["key_norm"].keys() == {"scale"}
            and "bias" in shapes["attention_norm"]
        )
    assert ("activation" in shapes["ff"]) == (layer.ff.activation == "xielu")
