"""A look-up's searches are timed like passes: all of a round, each at the row that the last one left."""

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.analysis import cost, searches
from jaxspec.base import Prompt
from jaxspec.testing import table_model

PROMPT = Prompt(jnp.array([[3, 1, 2], [2, 0, 0]], jnp.int32), jnp.array([3, 1], jnp.int32))
VOCAB = 5


@pytest.mark.parametrize("encoder", [False, True])
def test_a_search_is_timed_as_a_pass(encoder):
    """Each proposes and commits, behind a row that ends with what the last one guessed."""
    target, calls = table_model(jax.random.key(1), VOCAB, encoder=encoder), ([], [])
    real = jaxspec.drafters.online_ngram(3)

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]
        draft, state = real.propose(keys, params, state, context, gamma, to_law, budget)
        draft = draft._replace(tokens=(last[:, None] + 1) % VOCAB + jnp.zeros_like(draft.tokens))
        jax.debug.callback(lambda last: calls[0].append(last.tolist()), last)
        return draft, state

    def commit(params, state, context, verdict, forward):
        jax.debug.callback(lambda: calls[1].append(forward.logits.shape))
        return real.commit(params, state, context, verdict, forward)

    model = searches.as_model(real._replace(propose=propose, commit=commit), target, 3)
    loop = cost.looping(model, PROMPT, 8, 3, sampled=False)(1)
    jax.effects_barrier()
    for made in calls:
        made.clear()
    loop.call()
    jax.effects_barrier()
    assert sorted(calls[0]) == [[0, 0], [1, 1], [2, 2]] and calls[1] == [(2, 4, VOCAB)] * 3
    found = cost.measure(target, model, PROMPT, gamma=3, repeats=2, inner=2)
    assert found.c > 0 and found.gamma == 3
