"""The target as its own drafter, with the first and the last entries of its cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Model, drafters, nets
from jaxspec.core import Prompt, Room, token_rows
from jaxspec.core.layer_caches import window
from jaxspec.core.passes import Pass
from jaxspec.drafters.windowed import copied, copied_layer
from jaxspec.nets import decoder, t5
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, table_model
from tests.small import random_params, tiny_gpt, tiny_llama, tiny_t5


@pytest.mark.parametrize(
    ("own_window", "rewind", "window_size", "sinks", "lengths", "expected"),
    [
        # of two tokens that are fed, what the second one reads
        (None, None, 3, 2, [0, 4, 12], [[0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 9, 10, 11, 12, 13]]),
        (None, None, 3, 0, [2, 12], [[0, 1, 2, 3], [9, 10, 11, 12, 13]]),
        (None, None, 30, 2, [12], [list(range(14))]),  # all that there is
        # a ring
        (6, 2, 3, 1, [3, 12, 13], [[0, 1, 2, 3, 4], [9, 10, 11, 12, 13], [10, 11, 12, 13, 14]]),
        # the layer's own window is smaller
        (4, 2, 9, 1, [3, 12], [[1, 2, 3, 4], [10, 11, 12, 13]]),
    ],
)
def test_which_entries_are_read(own_window, rewind, window_size, sinks, lengths, expected):
    """Each key is the number of its entry."""
    empty = window(1, 1, own_window)(len(lengths), Room(16, rewind))

    def numbers(first, count):
        entries = first[:, None] + jnp.arange(count)[None, :]
        return entries[:, None, :, None].astype(jnp.float32)

    @jax.jit
    def keys_and_mask(length):
        zero = jnp.zeros_like(length)
        prefill, fed = Pass(zero, 14, real=length), Pass(length, 2)
        layer = empty.after(empty.read(prefill, (), *[numbers(zero, 14)] * 2), prefill)
        copy = copied_layer(layer, length, window_size, sinks, room=2)
        keys, _ = copy.read(fed, (), *[numbers(length, 2)] * 2)
        return keys[:, 0, :, 0], copy.view(fed).mask()[:, -1]

    keys, mask = map(np.asarray, keys_and_mask(jnp.array(lengths)))
    assert [sorted(row[seen].tolist()) for row, seen in zip(keys, mask, strict=True)] == expected


def test_one_layer_reads_what_a_model_with_a_window_reads():
    """Of one layer the cached keys do not depend on the window, so that such a model has the same
    logits.
    """
    config = tiny_llama(vocab=12)
    local = nets.replace(config, window=5, local=(True,))
    prompt = token_rows.pad([[*range(12)] * 2, [5, 2, 1], [7, 7, 3, 9, 1, 8, 8, 0, 4]], 24)
    next_token = jnp.array([[3], [1], [11]])

    @jax.jit
    def logits(params):
        whole, few = decoder.language_model(config), decoder.language_model(local)
        cache = whole.prefill(params, prompt, Room(40, 4))[1]
        drafting, _ = whole.extend(
            params, copied(cache, prompt.length, window=4, sinks=0, room=1), next_token
        )
        expected, _ = few.extend(params, few.prefill(params, prompt, Room(40, 4))[1], next_token)
        return drafting.logits, expected.logits, whole.extend(params, cache, next_token)[0].logits

    drafting, expected, of_target = logits(random_params(decoder.init, config, 3, 0.5))
    np.testing.assert_allclose(drafting, expected, rtol=1e-5, atol=1e-5)
    # Of the short row everything is read.
    assert (np.abs(drafting - of_target).max(axis=(1, 2)) > 0.1).tolist() == [True, False, True]


SMALL = nets.replace(tiny_llama(vocab=3, layers=2), window=4, local=(True, False), dim=8, ff_dim=8)
MAKE = {
    "a chain": lambda target: drafters.windowed(target, window=2, sinks=1),
    "a tree": lambda target: drafters.tree(drafters.windowed(target, window=2, sinks=1), [2, 1]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKE)
def test_the_distribution_of_the_text_is_the_targets(name):
    """At temperatures 1 and 0; one of the two layers is a ring, round which the prompt has gone."""
    target = Model(
        decoder.language_model(SMALL), random_params(decoder.init, SMALL, 1, 0.6), config=SMALL
    )
    prompt = Prompt(jnp.array([[1, 0, 2, 2, 1, 0, 0, 2, 1, 1, 2, 0]]), jnp.array([12]))
    drafter, sampler = MAKE[name](target), at_temperature(3, True)
    for temperature in (1.0, 0.0):
        params = SamplingParams(jnp.array([temperature]), jnp.array([3]), jnp.ones(1))
        distance = certify(
            target,
            drafter=drafter,
            gamma=2,
            steps=3,
            sampler=sampler,
            sampling_params=params,
            prompt=prompt,
        )
        assert distance < 1e-5


GPT, T5 = tiny_gpt(), tiny_t5()
TARGET = Model(decoder.language_model(GPT), None, config=GPT, name="gpt")
RELATIVE = TARGET._replace(
    lm=decoder.language_model(dataclasses.replace(GPT, positions="relative"))
)
NO_TREES = TARGET._replace(lm=TARGET.lm._replace(select=None))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: drafters.windowed(TARGET, window=0),
            "window is 0: expected a number of tokens, 1 or more",
        ),
        (
            lambda: drafters.windowed(TARGET, sinks=-1),
            "sinks is -1: expected a number of tokens, 0 or more",
        ),
        (lambda: drafters.windowed(TARGET, window=2.5), "window is 2.5: expected an integer"),
        (
            lambda: drafters.windowed(Model(t5.language_model(T5), None, name="t5")),
            "t5 cannot .* encoder-decoder",
        ),
        (
            lambda: drafters.windowed(table_model(jax.random.key(0), 3)),
            "its cache is not that of jaxspec's decoders",
        ),
        (lambda: drafters.windowed(RELATIVE), "gpt cannot .* position biases go by the slots"),
        (lambda: drafters.windowed(NO_TREES), "gpt cannot .* layers with a state in place of keys"),
    ],
)
def test_what_cannot_draft_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
