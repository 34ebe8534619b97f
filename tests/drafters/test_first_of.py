"""Drafters in turn: exact, and each is asked only where those before it know nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import accept, policies
from jaxspec.base import Budget, Law, Prompt
from jaxspec.drafters import argmax, first_of, lookup
from jaxspec.testing import certify, table_model, table_model_from

TARGET, RANDOM = table_model(jax.random.key(1), 7), table_model(jax.random.key(2), 7, sharpness=1.5)
GOOD = table_model_from(0.8 * TARGET.params + 0.2 * RANDOM.params)
PROMPT = Prompt(jnp.array([[1, 0, 2, 0], [5, 0, 0, 0], [3, 3, 6, 1]]), jnp.array([3, 1, 4]))
THREE, OTHER = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3, sharpness=1.5)
PAIR = Prompt(jnp.array([[1, 0]]), jnp.array([2]))


@pytest.mark.slow
def test_the_law_of_the_text_with_another_rule():
    """Some rows propose point masses and others samples, and which is which changes from round to round."""
    both = first_of(lookup(longest=2, shortest=2), OTHER)
    assert certify(THREE, drafter=both, accept=accept.block(), gamma=2, steps=4, prompt=PAIR) < 1e-5


def test_the_model_reads_what_was_committed_while_others_drafted():
    """With the target behind the look-up, guesses are wrong only where the look-up made them."""
    both = first_of(lookup(longest=2, shortest=2), TARGET)
    options = dict(gamma=2, max_new_tokens=60)
    out = jaxspec.generate(TARGET, PROMPT, drafter=both, **options)
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=60)
    assert out.tokens.tolist() == plain.tokens.tolist()
    alone = jaxspec.generate(TARGET, PROMPT, drafter=lookup(longest=2, shortest=2), **options)
    wrong = alone.stats.drafted - alone.stats.accepted
    assert (out.stats.drafted - out.stats.accepted <= wrong + 2).all()
    assert (out.stats.rounds < alone.stats.rounds).all()


def test_rows_choose_by_themselves():
    """A row that the look-up knows, beside one that it does not know."""
    both = first_of(lookup(longest=3, shortest=3), GOOD)
    prompt = Prompt(jnp.array([[1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 5, 6, 0]]), jnp.array([7, 7]))
    context = Prompt(jnp.pad(prompt.tokens, ((0, 0), (0, 9))), prompt.length)
    state = both.init(both.params, prompt, 9, None)
    keys = jax.random.split(jax.random.key(0), 2)

    def to_law(logits, guesses=None, seen=None):
        return Law(log_probs=jax.nn.log_softmax(logits))

    draft, _ = both.propose(keys, both.params, state, context, 1, to_law)
    assert draft.tokens[0].tolist() == [4] and draft.length.tolist() == [1, 1]
    assert jnp.exp(draft.log_probs[0, 0]).tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert bool(jnp.isclose(jnp.exp(draft.log_probs[1, 0]), jax.nn.softmax(GOOD.params[6, 0]), atol=1e-6).all())


def test_rows_do_not_depend_on_mates():
    keys = jax.random.split(jax.random.key(3), 3)
    both = first_of(lookup(), GOOD)
    options = dict(drafter=both, gamma=3, temperature=1.0, max_new_tokens=17, policy=policies.estimated(0.1, 0.1))
    together = jaxspec.generate(TARGET, PROMPT, key=keys, **options)
    for row in range(3):
        prompt = Prompt(PROMPT.tokens[row : row + 1], PROMPT.length[row : row + 1])
        alone = jaxspec.generate(TARGET, prompt, key=keys[row : row + 1], **options)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()


def test_models_inside_must_belong_to_the_target():
    other = table_model(jax.random.key(5), 7, encoder=True)
    for drafter in (first_of(lookup(), other), argmax(other)):
        with pytest.raises(ValueError, match="both must be of one kind"):
            jaxspec.generate(TARGET, PROMPT, drafter=drafter, max_new_tokens=4)


def test_a_policy_reads_the_rows_that_have_laws():
    """Rows that took a look-up's guesses have no signal, and leave the policy's memory as it was."""
    both, policy = first_of(lookup(longest=3, shortest=3), GOOD), policies.entropy(1, 4, 0.5)
    prompt = Prompt(jnp.array([[1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 5, 6, 0]]), jnp.array([7, 7]))
    context = Prompt(jnp.pad(prompt.tokens, ((0, 0), (0, 9))), prompt.length)
    budget = Budget(jnp.array([2, 2]), policy.signal, lambda index, signals: signals[:, 0] >= 0)
    state, keys = both.init(both.params, prompt, 9, None), jax.random.split(jax.random.key(0), 2)
    draft, _ = both.propose(keys, both.params, state, context, 2, lambda logits, *_: Law(
        log_probs=jax.nn.log_softmax(logits)), budget)  # fmt: skip
    assert jnp.isnan(draft.signals[0, 0]) and draft.signals[1, 0] > 0
    memory = policy.update(policy.params, jnp.array([0.3, 0.3]), draft, None, None)
    assert memory[0] == jnp.float32(0.3) and memory[1] != jnp.float32(0.3)


def test_what_is_never_asked_is_refused():
    with pytest.raises(ValueError, match="at least one drafter"):
        first_of()
    with pytest.raises(ValueError, match="drafter 0 of 2 always has a guess"):
        first_of(GOOD, lookup())


def test_the_same_drafters_share_a_program():
    assert first_of(lookup(), GOOD).propose is first_of(lookup(), RANDOM).propose
