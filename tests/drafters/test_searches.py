"""A search that no row has use for is not made: counted in the program that runs."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import datastore, drafters, policies
from jaxspec.base import Draft, Drafter, Policy, Prompt
from jaxspec.testing import table_model

TARGET = table_model(jax.random.key(3), 6)  # greedy text of a small table soon runs in circles
PROMPT = Prompt(jnp.array([[1, 2, 1, 2], [4, 5, 4, 0]]), jnp.array([4, 3]))
STORE = drafters.retrieval(datastore.build([[1, 2, 3, 4, 5], [3, 4, 1, 2, 0]], vocab_size=6)).params
GAMMA = 3
SEARCHES = {"lookup": "_match_lengths", "online_ngram": "_vote", "retrieval": "_ranges"}  # what each calls
EVERY = pytest.mark.parametrize("name", SEARCHES)


@pytest.fixture
def watched(monkeypatch):
    """A drafter of its own by its name, and a list that grows with each of its searches."""

    def watch(name):
        module, calls = importlib.import_module(f"jaxspec.drafters.{name}"), []
        step = getattr(module, SEARCHES[name])

        def counted(*args):
            jax.debug.callback(lambda: calls.append(name))
            return step(*args)

        monkeypatch.setattr(module, SEARCHES[name], counted)
        make = {"lookup": (3, 1), "online_ngram": (4, 3, 1024), "retrieval": (8, 2, 32)}[name]
        function = module._retrieval if name == "retrieval" else getattr(module, name)
        drafter = function.__wrapped__(*make)  # not the one that is cached, and compiled
        return drafter._replace(params=STORE if name == "retrieval" else None), calls

    return watch


def searches(name, calls):
    jax.effects_barrier()
    return len(calls) / (GAMMA if name == "online_ngram" else 1)  # which votes for each guess


def every(period):
    """All guesses in every `period`-th round, none in between."""
    return Policy(
        lambda params, prompt: jnp.zeros_like(prompt.length),
        lambda params, state, gamma: jnp.where((state + 1) % period == 0, gamma, 0),
        lambda params, state, draft, verdict, kept: state + 1,
    )


@EVERY
def test_rounds_without_a_guess_are_not_searched_for(name, watched):
    drafter, calls = watched(name)
    options = dict(drafter=drafter, gamma=GAMMA, max_new_tokens=20)
    out = jaxspec.generate(TARGET, PROMPT, policy=every(3), **options)
    rounds = int(out.stats.rounds.max())
    assert rounds // 3 - 1 <= searches(name, calls) <= rounds // 3  # where a row has one token left it needs no guess
    assert out.stats.drafted.sum() > 0
    calls.clear()
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=20)
    none = jaxspec.generate(TARGET, PROMPT, policy=policies.fixed(0), **options)
    assert none.tokens.tolist() == plain.tokens.tolist() == out.tokens.tolist()
    assert searches(name, calls) == 0


def always(guesses):
    """A drafter that could abstain, and always makes so many guesses."""

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        length = jnp.full_like(context.length, guesses)
        return Draft(jnp.zeros((len(length), gamma), jnp.int32), None, length), state

    return Drafter(lambda *_: (), propose, lambda params, state, *_: state, abstains=True)


@EVERY
def test_what_is_behind_a_drafter_that_has_guesses_is_not_asked(name, watched):
    drafter, calls = watched(name)
    for guesses in (1, 0):
        calls.clear()
        both = drafters.first_of(always(guesses), drafter)
        out = jaxspec.generate(TARGET, PROMPT, drafter=both, gamma=GAMMA, max_new_tokens=20)
        rounds = int(out.stats.rounds.max())
        assert searches(name, calls) == 0 if guesses else searches(name, calls) == rounds
