"""A look-up's searches are timed like passes: all of a round, each at the row that the last one left."""

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.analysis.measure import batching, cost, lookup_cost
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.nets import gpt
from jaxspec.testing import table_model

PROMPT = Prompt(jnp.array([[3, 1, 2], [2, 0, 0]], jnp.int32), jnp.array([3, 1], jnp.int32))
VOCAB = 5
KEY = jax.random.key(0)


@pytest.mark.parametrize("encoder", [False, True])
def test_a_search_is_timed_as_a_pass(encoder):
    """Each proposes and commits, after a row that ends with what the last one drafted."""
    target, calls = table_model(jax.random.key(1), VOCAB, encoder=encoder), ([], [])
    real = jaxspec.drafters.online_ngram(3)
    functions = real.functions

    def propose(weights, caches, context):
        row = context.row
        last = jnp.take_along_axis(row.tokens, row.length[:, None] - 1, axis=1)[:, 0]
        draft, caches = functions.propose(weights, caches, context)
        draft = draft._replace(tokens=(last[:, None] + 1) % VOCAB + jnp.zeros_like(draft.tokens))
        jax.debug.callback(lambda last: calls[0].append(last.tolist()), last)
        return draft, caches

    def commit(weights, caches, row, verdict, forward):
        jax.debug.callback(lambda: calls[1].append(forward.logits.shape))
        return functions.commit(weights, caches, row, verdict, forward)

    drafter = real._replace(functions=functions._replace(propose=propose, commit=commit))
    prepared = prepare(target, PROMPT, drafter=drafter, gamma=3)
    model = lookup_cost.lookup_as_model(prepared)
    loop = cost.timed_loops(model, PROMPT, 8, 3, sampled=False)(1)
    jax.effects_barrier()
    for made in calls:
        made.clear()
    loop.call()
    jax.effects_barrier()
    assert sorted(calls[0]) == [[0, 0], [1, 1], [2, 2]] and calls[1] == [(2, 4, VOCAB)] * 3
    found = cost.measure(prepared.replace(drafter=model), repeats=2, inner=2)
    assert found.c > 0 and found.gamma == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["its own layers", "a cascade", "a cascade over a look-up", "a horizontal cascade"])
def test_draft_tokens_of_several_drafters_or_of_own_layers_have_a_cost(kind, temperature, monkeypatch):
    """Which `policies.adaptive` takes for c; v has no search in it."""
    shape = gpt.GPTConfig(VOCAB, 8, 8, layers=2, heads=2, max_positions=32)
    target = jaxspec.Model(gpt.language_model(shape), gpt.init(shape, jax.random.key(0)), config=shape)
    small = table_model(jax.random.key(1), VOCAB)
    made = {
        "its own layers": lambda: jaxspec.drafters.early_exit(target, 1),
        "a cascade": lambda: jaxspec.drafters.cascade(small, small, gamma=1),
        "a cascade over a look-up": lambda: jaxspec.drafters.cascade(small, jaxspec.drafters.prompt_lookup(), gamma=1),
        "a horizontal cascade": lambda: jaxspec.drafters.horizontal_cascade(small, jaxspec.drafters.jacobi()),
    }
    prepared = prepare(
        target, PROMPT, drafter=made[kind](), gamma=2, max_new_tokens=4, temperature=temperature, key=KEY
    )
    timed, measure = [], cost.measure
    monkeypatch.setattr(cost, "measure", lambda prepared, **how: timed.append(prepared) or measure(prepared, **how))
    found = cost.policy_costs(prepared, repeats=1, inner=1)
    assert [batching.is_sampled(one) for one in timed] == [
        temperature > 0
    ]  # a whole draft, drawn as the generation draws
    assert found.c > 0 and found.v.shape == (3,) and found.v[0] == 1 and cost.search_cost(prepared) == 0
