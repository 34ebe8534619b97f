"""Random draft tokens: no more than a policy allows, and a policy reads the uniform
distribution.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import policies
from jaxspec.core import Caches, DraftContext, DraftStart, Forward, Prompt, noise
from jaxspec.drafters.uniform import uniform
from jaxspec.testing import table_model

VOCAB = 6
TARGET = table_model(jax.random.key(3), VOCAB)
PROMPT = Prompt(jnp.array([[1, 2, 0], [4, 5, 4]]), jnp.array([2, 3]))


@pytest.mark.parametrize(("limit", "draws"), [([0, 0], 0), ([1, 3], 3), ([4, 0], 4), ([4, 4], 4)])
def test_nothing_is_drawn_beyond_the_limits(limit, draws, monkeypatch):
    drawn, gumbel = [], noise.gumbel

    def counted(keys, vocab):
        jax.debug.callback(lambda: drawn.append(vocab))
        return gumbel(keys, vocab)

    monkeypatch.setattr(noise, "gumbel", counted)
    drafter, keys = uniform().functions, jax.random.split(jax.random.key(0), 2)
    caches = Caches(
        None, drafter.init(DraftStart(None, PROMPT, None, Forward(jnp.zeros((2, 1, VOCAB)), None)))
    )
    draft, _ = drafter.propose(
        None, caches, DraftContext(keys, PROMPT, jnp.array(limit), 4, True, None)
    )
    jax.effects_barrier()
    assert draft.length.tolist() == limit and drawn == [VOCAB] * draws
    for i, n in enumerate(limit):
        np.testing.assert_allclose(jnp.exp(draft.log_probs[i, :n]), 1 / VOCAB, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "draft_tokens"),
    [
        (policies.confidence(0.1), 3),  # below 1/6
        (policies.confidence(0.2), 1),
        (policies.entropy(1, 3, 0.0), 1),  # no distribution has more
        (policies.constant(2), 2),
        (policies.constant(0), 0),
    ],
)
def test_a_policy_reads_the_uniform_distribution(policy, draft_tokens):
    options = dict(max_new_tokens=12, temperature=1.0, key=jax.random.key(0))
    out = jaxspec.generate(TARGET, PROMPT, drafter=uniform(), gamma=3, policy=policy, **options)
    first = out.trace.draft_length[:, 0]
    assert first.tolist() == [draft_tokens] * 2 and out.trace.draft_length.max() == draft_tokens
