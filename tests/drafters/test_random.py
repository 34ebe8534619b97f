"""Random guesses: no more than a policy allows, and a policy reads the uniform law."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, noise, policies
from jaxspec.base import Budget, Forward, Prompt
from jaxspec.testing import table_model

VOCAB = 6
TARGET = table_model(jax.random.key(3), VOCAB)
PROMPT = Prompt(jnp.array([[1, 2, 0], [4, 5, 4]]), jnp.array([2, 3]))


@pytest.mark.parametrize(("limit", "draws"), [([0, 0], 0), ([1, 3], 3), ([4, 0], 4), (None, 4)])
def test_nothing_is_drawn_beyond_the_budget(limit, draws, monkeypatch):
    drawn, gumbel = [], noise.gumbel

    def counted(keys, vocab):
        jax.debug.callback(lambda: drawn.append(vocab))
        return gumbel(keys, vocab)

    monkeypatch.setattr(noise, "gumbel", counted)
    drafter, keys = drafters.random(), jax.random.split(jax.random.key(0), 2)
    state = drafter.init(None, PROMPT, 9, Forward(jnp.zeros((2, 1, VOCAB)), None))
    budget = None if limit is None else Budget(jnp.array(limit))
    draft, _ = drafter.propose(keys, None, state, PROMPT, 4, None, budget)
    jax.effects_barrier()
    assert draft.length.tolist() == (limit or [4, 4]) and drawn == [VOCAB] * draws
    np.testing.assert_allclose(jnp.exp(draft.log_probs), 1 / VOCAB, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "guesses"),
    [
        (policies.confidence(0.1), 3),  # below 1/6
        (policies.confidence(0.2), 1),
        (policies.entropy(1, 3, 0.0), 1),  # no law has more
        (policies.fixed(2), 2),
        (policies.fixed(0), 0),
    ],
)
def test_a_policy_reads_the_uniform_law(policy, guesses):
    options = dict(max_new_tokens=12, temperature=1.0, key=jax.random.key(0))
    out = jaxspec.generate(TARGET, PROMPT, drafter=drafters.random(), gamma=3, policy=policy, **options)
    first = out.trace.draft_length[:, 0]
    assert first.tolist() == [guesses] * 2 and out.trace.draft_length.max() == guesses
