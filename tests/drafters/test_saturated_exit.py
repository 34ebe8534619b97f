"""A target that drafts with as many of its layers as it takes until two agree, with tiny
networks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, policies
from jaxspec.core import Prompt, Room, token_rows
from jaxspec.nets import decoder
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, table_model
from tests.small import random_params, tiny_gpt

LAYERS = 4
PROMPTS = [[1, 2], [0], [2, 2, 1]]


@functools.cache
def target_of(vocab=12, layers=LAYERS):
    config = tiny_gpt(vocab, layers=layers)
    return Model(
        decoder.language_model(config),
        random_params(decoder.init, config, 3, 0.6),
        None,
        config,
        "gpt",
    )


def exits_of(prefixes):
    """Computes from whole rows, without a cache, after how many layers each prefix is drafted for,
    and which token.
    """
    target = jaxspec.with_taps(target_of(), range(LAYERS))
    rows, inside = token_rows.pad(prefixes), target.lm.inside
    taps = jax.jit(
        lambda params: target.lm.prefill(params, rows, Room(rows.tokens.shape[1] + 1))[0].taps
    )(target.params)
    last = jnp.take_along_axis(taps, (rows.length - 1)[:, None, None], axis=1)
    best = []
    for stream in jnp.split(last, LAYERS, axis=-1):
        features = inside.layers.features(target.params, stream)
        best.append(np.argmax(inside.head(target.params, features)[:, 0], axis=-1))
    after = np.full(len(prefixes), LAYERS - 1)
    # the first layer that prefers what the one before it did
    for layer in range(LAYERS - 2, 0, -1):
        after = np.where(best[layer] == best[layer - 1], layer + 1, after)
    return after, np.stack(best)[after - 1, np.arange(len(prefixes))]


@pytest.mark.slow
def test_each_row_leaves_where_two_of_the_targets_layers_agree():
    """Greedily: text, layers and draft tokens are those of passes over whole rows, whatever the
    rest of the batch.
    """
    options = dict(
        max_new_tokens=14, gamma=3, drafter=drafters.saturated_exit(target_of()), trace_numbers=True
    )
    rows = token_rows.pad(PROMPTS, 4)
    out = jaxspec.generate(target_of(), rows, **options)
    np.testing.assert_array_equal(
        out.tokens, jaxspec.generate(target_of(), rows, max_new_tokens=14).tokens
    )
    columns, prefixes, drafted = out.trace.table(), [], []
    text = np.asarray(out.tokens)
    for row, number, position, token in zip(
        *(columns[name] for name in ("row", "round", "position", "token")), strict=True
    ):
        drafted = drafted if drafted and drafted[0] == (row, number) else [(row, number)]
        before = position - (len(drafted) - 1)
        prefixes.append([*PROMPTS[row], *text[row, :before].tolist(), *drafted[1:]])
        drafted.append(int(token))
    layers, tokens = exits_of(prefixes)
    np.testing.assert_array_equal(columns["layers"], layers)
    np.testing.assert_array_equal(columns["token"], tokens)
    assert len(set(layers)) > 1 and columns["accepted"].any()


@pytest.mark.slow
def test_the_distribution_of_the_text_is_the_targets():
    """At temperatures 1 and 0, and with a policy that stops the draft."""
    target, sampler = target_of(3, 3), at_temperature(3, True)
    plain = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))
    options = dict(drafter=drafters.saturated_exit(target), gamma=2, steps=3, sampler=sampler)
    options |= dict(
        prompt=Prompt(jnp.array([[1, 0]]), jnp.array([2])), policy=policies.confidence(0.45)
    )
    distances = [
        certify(target, sampling_params=params, **options)
        for params in (plain, plain._replace(temperature=jnp.zeros(1)))
    ]
    assert max(distances) < 1e-5, distances


def test_what_cannot_draft_is_refused():
    gpt = target_of()
    stateful = gpt._replace(lm=gpt.lm._replace(select=None))
    for make, message in (
        (
            lambda: drafters.saturated_exit(gpt, 0),
            "first_exit is 0, last_exit is 3, and gpt has 4 layers: expected 1",
        ),
        (lambda: drafters.saturated_exit(gpt, 2, 2), "first_exit is 2, last_exit is 2"),
        (
            lambda: drafters.saturated_exit(gpt, 1, 4),
            "last_exit is 4, and gpt has 4 layers: .* last_exit < 4",
        ),
        (
            lambda: drafters.saturated_exit(target_of(3, 2)),
            "first_exit is 1, last_exit is 1, and gpt has 2 layers",
        ),
        (
            lambda: drafters.saturated_exit(table_model(jax.random.key(0), 3)),
            "cannot be run in part",
        ),
        (lambda: drafters.saturated_exit(stateful), "gpt has layers with a state in place of keys"),
        (
            lambda: drafters.tree(drafters.saturated_exit(gpt), (2, 1)),
            "a token tree is made of its drafts",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match=r"target is 'gpt': expected a jaxspec\.Model"):
        drafters.saturated_exit("gpt")
