"""A search that no row has use for is not made: counted in the program that runs."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import drafters, policies
from jaxspec.core import BoundDrafter, Draft, Drafter, Policy, Prompt
from jaxspec.drafters.lookups import datastore
from jaxspec.testing import table_model

TARGET = table_model(jax.random.key(3), 6)  # greedy text of a small table soon runs in circles
PROMPT = Prompt(jnp.array([[1, 2, 1, 2], [4, 5, 4, 0]]), jnp.array([4, 3]))
STORE = drafters.retrieval(datastore.build([[1, 2, 3, 4, 5], [3, 4, 1, 2, 0]], vocab_size=6)).params
GAMMA = 3
# what each calls
SEARCHES = {"prompt_lookup": "match_lengths", "online_ngram": "_vote", "retrieval": "_ranges"}
EVERY = pytest.mark.parametrize("name", SEARCHES)


@pytest.fixture
def watched(monkeypatch):
    """A drafter of its own by its name, and a list that grows with each of its searches."""

    def watch(name):
        module, calls = importlib.import_module(f"jaxspec.drafters.lookups.{name}"), []
        step = getattr(module, SEARCHES[name])

        def counted(*args):
            jax.debug.callback(lambda: calls.append(name))
            return step(*args)

        monkeypatch.setattr(module, SEARCHES[name], counted)
        make = {
            "prompt_lookup": (3, 1, None, None),
            "online_ngram": (4, 3, 1024),
            "retrieval": (8, 2, 32, None),
        }[name]
        function = getattr(module, f"_{name}")
        functions = function.__wrapped__(*make)  # not the one that is cached, and compiled
        return BoundDrafter(functions, STORE if name == "retrieval" else None), calls

    return watch


def searches(name, calls):
    jax.effects_barrier()
    return len(calls) / (GAMMA if name == "online_ngram" else 1)  # which votes for each draft token


def every(period):
    """Return a policy that drafts in every `period`-th round and not in between."""
    return Policy(
        lambda params, prompt: jnp.zeros_like(prompt.length),
        lambda params, state, gamma, live: jnp.where((state + 1) % period == 0, gamma, 0),
        lambda params, state, draft, verdict, num_committed: state + 1,
    )


@pytest.mark.slow
@EVERY
def test_rounds_without_a_draft_token_are_not_searched_for(name, watched):
    drafter, calls = watched(name)
    options = dict(drafter=drafter, gamma=GAMMA, max_new_tokens=20)
    out = jaxspec.generate(TARGET, PROMPT, policy=every(3), **options)
    rounds = int(out.stats.rounds.max())
    assert (
        rounds // 3 - 1 <= searches(name, calls) <= rounds // 3
    )  # where a row has one token left it needs no draft token
    assert out.stats.drafted.sum() > 0
    calls.clear()
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=20)
    none = jaxspec.generate(TARGET, PROMPT, policy=policies.constant(0), **options)
    assert none.tokens.tolist() == plain.tokens.tolist() == out.tokens.tolist()
    assert searches(name, calls) == 0


def always(draft_tokens):
    """A drafter that might draft nothing, and always drafts so many tokens."""

    def propose(weights, caches, context):
        length = jnp.full_like(context.row.length, draft_tokens)
        return Draft(jnp.zeros((len(length), context.gamma), jnp.int32), length), caches

    return Drafter(lambda *_: (), propose, lambda end: end.caches, may_be_empty=True)


@pytest.mark.slow
@EVERY
def test_after_a_drafter_that_has_draft_tokens_nothing_is_searched(name, watched):
    """After one that has none every round is searched for, but where all rows have one token
    left.
    """
    drafter, calls = watched(name)
    for draft_tokens in (1, 0):
        calls.clear()
        both = drafters.fallback(always(draft_tokens), drafter)
        out = jaxspec.generate(TARGET, PROMPT, drafter=both, gamma=GAMMA, max_new_tokens=20)
        rounds = int(out.stats.rounds.max())
        least, most = (0, 0) if draft_tokens else (rounds - 1, rounds)
        assert least <= searches(name, calls) <= most
