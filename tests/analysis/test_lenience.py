"""Rates by lenience against the definitions, position by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Prompt
from jaxspec.analysis.measure import replay
from jaxspec.analysis.theory import divergence
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model

PROMPT = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
TARGET, DRAFT = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)


@pytest.fixture(scope="module", params=[0.0, 1.0])
def store(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores") / "store"
    options = dict(temperature=request.param, key=jax.random.key(0), max_new_tokens=20)
    return replay.collect(folder, prepare(TARGET, PROMPT, drafter=DRAFT, **options))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.1])
def test_against_the_definition(store, share):
    p, q = (np.asarray(jax.nn.softmax(jnp.asarray(side), axis=-1), np.float64) for side in (store.target, store.draft))
    if store.manifest["temperature"]:
        expected = divergence.alpha(p, q, share)
    else:
        draft_token = q.argmax(axis=-1)
        expected = np.mean(p[np.arange(len(p)), draft_token] >= share * p.max(axis=-1))
    found = replay.lenient_alpha(store, share)
    assert found.value == pytest.approx(expected, rel=1e-5)
    assert found.counts.tolist() == store.counts.tolist()


def test_out_of_range(store):
    with pytest.raises(ValueError, match="lenience is 0"):
        replay.lenient_alpha(store, 0.0)
