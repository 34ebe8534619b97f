"""The search for layers to skip: the fastest set stays, and what cannot be searched is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import layers_to_skip
from jaxspec import Model, Prompt
from jaxspec.nets import decoder
from jaxspec.testing import table_model
from tests.small import random_params, tiny_gpt

PROMPT = Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))


def target(count):
    shape = tiny_gpt(layers=count)
    return Model(decoder.language_model(shape), random_params(decoder.init, shape))


@pytest.mark.slow
def test_the_fastest_set_stays_and_none_is_tried_twice(monkeypatch):
    """With speeds that grow with what is skipped."""
    best = [5.0]

    def measure(skipped, prepared, before, repeats):
        speed = 10.0 + 2 * len(skipped[0]) + len(skipped[1])
        trial = layers_to_skip.Trial(*skipped, speed, speed / best[0], 1.5)
        best[0] = max(best[0], speed)
        return trial

    monkeypatch.setattr(layers_to_skip, "_measure", measure)
    monkeypatch.setattr(
        layers_to_skip.cost, "interleave", lambda calls, repeats: np.array([[3.0], [1.5]])
    )
    search = layers_to_skip.search_layers(
        target(4), PROMPT, trials=12, progress=False, max_new_tokens=4
    )
    assert (
        search.best.tokens_per_second
        == max(trial.tokens_per_second for trial in search.trials)
        > 12
    )
    assert search.over_plain == 2.0 and len(search.trials) == 12
    assert len({(trial.attention, trial.mlp) for trial in search.trials}) == 12


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (target(2), {"trials": 0}, "trials is 0: expected at least 1"),
        (target(1), {}, "the target has 1 layer: expected at least 2"),
        (table_model(jax.random.key(0), 32), {}, "cannot be run in part"),
    ],
)
def test_what_cannot_be_searched(model, options, message):
    with pytest.raises(ValueError, match=message):
        layers_to_skip.search_layers(model, PROMPT, progress=False, max_new_tokens=4, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": table_model(jax.random.key(0), 32)}, "got a drafter: expected none"),
        ({"gamma": 0}, "gamma is 0: expected at least 1"),
        ({"gamma": -1}, "gamma is -1: expected at least 1"),
        ({"trials": 1.5}, "trials is 1.5: expected an integer"),
        ({"repeats": 2.0}, "repeats is 2.0: expected an integer"),
    ],
)
def test_what_is_no_search_is_refused_before_the_prompts_are_read(options, message, monkeypatch):
    monkeypatch.setattr(layers_to_skip, "prepare", lambda *_, **__: pytest.fail("prepared"))
    with pytest.raises(ValueError, match=message):
        layers_to_skip.search_layers(target(2), PROMPT, progress=False, max_new_tokens=4, **options)
