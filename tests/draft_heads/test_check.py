"""A drafter that is read in another way than it was trained: what is said to be looked at.

The target repeats its last token. Its first layer moves the hidden state to another token, its
second layer moves it back. The drafter adds nothing to the second layer's output, whose token it
repeats.
"""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Model, Prompt, nets
from jaxspec.draft_heads import assistant, check, eagle, kind_of
from jaxspec.nets import decoder
from tests.draft_heads.test_drafters import CONFIGS, DFLASH, target_of
from tests.draft_heads.test_drafters import LLAMA as TINY

SIZE = 8  # of the vocabulary and of hidden states
SHAPE = decoder.decoder_config(
    SIZE, SIZE, SIZE, layers=2, heads=2, kv_heads=1, head_dim=4, activation="relu"
)
CONFIG = eagle.EagleConfig(
    nets.replace(SHAPE, layers=1), SIZE, taps=(1,), own_embedding=True, own_head=True
)
PROMPTS = Prompt(jnp.arange(1, SIZE)[:, None], jnp.ones(SIZE - 1, jnp.int32))
# matrices from a token to itself, and to another
SAME, NEXT = jnp.eye(SIZE), jnp.roll(jnp.eye(SIZE), 1, axis=0)


def zeros(init, config):
    shapes = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(np.zeros(x.shape, x.dtype)), shapes)


@pytest.fixture(scope="module")
def target():
    params = zeros(decoder.init, SHAPE)
    # [1 at t, 3 at t + 1] after the first layer, [3 at t, less elsewhere] after the second
    feeds = 3 / 8 * NEXT, NEXT.T / 3 - SAME / 2
    for i, out in enumerate(feeds):
        layer = params[f"layers_{i}"]
        layer["ff"] = {"gate": {"weight": SAME}, "wi": {"weight": SAME}, "out": {"weight": out}}
        layer["ff_norm"]["scale"] = layer["attention_norm"]["scale"] = jnp.ones(SIZE)
    params |= {
        "embedding": {"embedding": SAME},
        "head": {"weight": SAME},
        "norm": {"scale": jnp.ones(SIZE)},
    }
    return Model(decoder.language_model(SHAPE), params, None, SHAPE, "repeats")


def weights(head=SAME, embedding=SAME):
    params = zeros(eagle.init, CONFIG)
    params |= {
        "fc": {"weight": SAME},
        "head": {"weight": head},
        "embedding": {"embedding": embedding},
    }
    for norm in (
        (params, "norm"),
        (params["layers_0"], "hidden_norm"),
        (params["layers_0"], "embedding_norm"),
    ):
        norm[0][norm[1]] = {"scale": jnp.ones(SIZE)}
    params["layers_0"]["ff_norm"] = {"scale": jnp.ones(SIZE)}
    return params


def without_ones(params):
    """Norms as a format has them that stores the difference from 1."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x - 1 if path[-1].key == "scale" else x, params
    )


BROKEN = {  # configuration, weights, what is said
    "taps": (
        dataclasses.replace(CONFIG, taps=(0,)),
        weights(),
        r"look at its taps: taps \[1\] in place of \[0\]\.",
    ),
    "taps, an embedding of its own": (
        dataclasses.replace(CONFIG, taps=(0,)),
        weights(embedding=NEXT),
        r"target's +0\.00\nSo look at its taps: taps \[1\] in place of \[0\]\.",
    ),
    "norms": (
        CONFIG,
        without_ones(weights()),
        "look at its norms: 1 added to the weights of norms",
    ),
    "tokens": (
        CONFIG,
        weights(NEXT, NEXT),
        "look at the tokenizer: rows of its own embedding are not those",
    ),
    "another's": (
        CONFIG,
        weights(NEXT),
        "no change of how it is read helps: .* it is another model's",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_low_rate_says_what_to_look_at(name, target):
    config, params, advice = BROKEN[name]
    drafter = check.bound(config, params, target)
    with pytest.warns(
        UserWarning, match=f"(?s)it has 0% .*Tried again with changes:\n  as it is +0%\n.*{advice}"
    ):
        assert (
            check.check_acceptance(drafter, PROMPTS, tokens=4, network=lambda: (config, params))
            == 0
        )


def test_a_drafter_that_is_right_is_not_tried_again(target):
    def network():
        raise AssertionError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafter = check.bound(CONFIG, weights(), target)
        assert check.check_acceptance(drafter, PROMPTS, tokens=4, network=network) == 1


TAPS = "taps [1, 2] in place of [0, 1]"
TRIED = {  # by the kind's name in `CONFIGS`: two of the changes, as far as there are any
    **{key: {TAPS, "norm_output True in place of False"} for key in ("eagle 3", "p-eagle")},
    **{
        key: {TAPS, "causal_full True in place of False"}
        for key in ("dflash", "dflash 2", "dspark", "block")
    },
    "jetspec": {TAPS, "causal_full False in place of True"},
    "mtp": {"hidden_first True in place of False", "zero_first False in place of True"},
    "kangaroo": {"exit 1 in place of 2"},
    "assistant": {"positions_back 2 in place of 1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_change_of_every_kind_makes_a_drafter(name):
    config, goal = CONFIGS[name], target_of("t5" if name == "block, source" else "decoder")
    tried = list(check.changes(config, kind_of(config).init(config, jax.random.key(0)), goal))
    descriptions, kind = {changed.description for changed in tried}, name.partition(",")[0]
    assert TRIED.get(kind, set()) <= descriptions and (kind in TRIED) == bool(tried)
    for changed in tried:
        assert changed.config != config
        check.bound(changed.config, changed.params, goal)


def test_what_is_tried_with_each_kind_of_drafter(target):
    """Settings that weights fit; norms that a change adds are ones, and what needs other weights is
    left out.
    """
    tried = {x.description: x for x in check.changes(CONFIG, weights(), target)}
    assert set(tried) == {"taps [0] in place of [1]"} | {
        f"{name} True in place of False"
        for name in ("norm_before_residual", "norm_before_fc", "norm_each_tap", "norm_output")
    }
    added = tried["norm_before_fc True in place of False"].params["taps_norm"]["scale"]
    assert (added == 1).all() and added.shape == (SIZE,)
    scaled = dataclasses.replace(TINY, scale_embedding=True)
    model = Model(decoder.language_model(scaled), {}, None, scaled)
    scales = [x.description for x in check.changes(DFLASH, {}, model) if x.part == "scales"]
    assert scales == [] and DFLASH.embedding_scale == 1  # weights that are missing fit nothing
    parts = assistant.AssistantConfig(
        dataclasses.replace(nets.replace(TINY, layers=1), tied_head=True),
        TINY.dim,
        (2,),
        positions_back=2,
    )
    params = assistant.init(parts, jax.random.key(0))
    moved = [x for x in check.changes(parts, params, model) if x.part == "position"]
    assert [x.config.positions_back for x in moved] == [1] and re.match(
        "positions_back 1", moved[0].description
    )
