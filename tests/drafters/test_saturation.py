"""A target that drafts for itself, and leaves its layers where two in a row agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Model, core, drafters
from jaxspec.core import Prompt, Room
from jaxspec.drafters import saturation, self_speculative
from jaxspec.nets import decoder
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, table_model
from tests.small import random_params, tiny_gpt, tiny_llama

V, LAYERS = 3, 5
CONFIG = tiny_llama(V, layers=LAYERS)
TARGET = Model(decoder.language_model(CONFIG), random_params(decoder.init, CONFIG, 4, 0.6), config=CONFIG, name="llama")


def test_each_row_takes_the_logits_of_its_own_layer():
    """Against all layers run over all rows, in NumPy from there on; the second token is bound by the first one's."""
    lm, leading, batch = TARGET.lm, core.Parts((0,), (0,)), 24
    draft = saturation.SaturationExit(*self_speculative.self_draft(lm, leading, None, None))
    tokens = jnp.array(np.random.default_rng(0).integers(0, V, (batch, 6)))
    length = jnp.full(batch, 4)

    @jax.jit
    def logits_and_layers(params):
        cache = lm.prefill(params, Prompt(tokens[:, :4], length), Room(9, 3))[1]
        weights, stream = core.Weights(params, self_speculative.SelfDraftParams()), jnp.zeros((batch, 2, 16))
        nodes = self_speculative.Nodes(stream, length, cache, depth=jnp.full(batch, LAYERS - 1))
        logits, depths = [], []
        for offset in range(2):
            stream, nodes = draft.feed(weights, nodes, tokens[:, 4 + offset : 5 + offset], offset)
            logits_now, nodes = draft.logits_after(weights, nodes, stream, offset)
            logits.append(logits_now[:, 0])
            depths.append(nodes.depth)
        x, layers = lm.inside.layers.embed(params, cache, tokens[:, 4:]), []
        for layer in range(LAYERS):
            x, _ = lm.inside.layers.run(params, cache, x, core.Parts((layer,), (layer,)))
            layers.append(lm.inside.head(params, lm.inside.layers.features(params, x)))
        return logits, depths, layers

    logits, depths, layers = jax.tree.map(np.asarray, logits_and_layers(TARGET.params))
    limit = np.full(batch, LAYERS - 1)
    for offset in range(2):
        expected = limit.copy()
        for row in range(batch):
            best = [layer[row, offset].argmax() for layer in layers]
            agreeing = [n for n in range(2, limit[row]) if best[n - 1] == best[n - 2]]
            expected[row] = min([*agreeing, limit[row]])
        assert depths[offset].tolist() == expected.tolist()
        taken = [layers[depth - 1][row, offset] for row, depth in enumerate(expected)]
        np.testing.assert_allclose(logits[offset], np.stack(taken), rtol=1e-4, atol=1e-4)
        limit = expected
    assert len(set(depths[0].tolist())) > 1  # the depth depends on the token


@pytest.mark.slow
def test_the_distribution_of_the_text_is_the_targets():
    drafter, sampler = drafters.saturation_exit(TARGET, 1), at_temperature(3, True)
    prompt = Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    for temperature in (1.0, 0.0):
        params = SamplingParams(jnp.array([temperature]), jnp.array([3]), jnp.ones(1))
        distance = certify(
            TARGET, drafter=drafter, gamma=2, steps=3, sampler=sampler, sampling_params=params, prompt=prompt
        )
        assert distance < 1e-5


TWO = Model(decoder.language_model(tiny_gpt(layers=2)), None, name="two")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafters.saturation_exit(TARGET, 4), "first is 4 and llama has 5 layers: expected at least 1, and"),
        (lambda: drafters.saturation_exit(TARGET, 0), "first is 0 and llama has 5 layers"),
        (lambda: drafters.saturation_exit(TWO, 1), "first is 1 and two has 2 layers"),
        (lambda: drafters.saturation_exit(table_model(jax.random.key(0), 3), 1), "cannot be run in part"),
        (lambda: drafters.tree(drafters.saturation_exit(TARGET, 1), (2,)), "chains"),
    ],
)
def test_what_cannot_draft_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
