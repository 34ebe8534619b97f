"""Drafters in order of preference: exact, and each drafts only where those before it have
nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import policies, rules
from jaxspec.core import Caches, Distribution, DraftContext, DraftStart, Prompt, Room, Weights
from jaxspec.drafters import fallback, greedy, horizontal_cascade, jacobi, prompt_lookup, tree
from jaxspec.testing import certify, table_model
from tests.small import between

TARGET, RANDOM = table_model(jax.random.key(1), 7), table_model(jax.random.key(2), 7, sharpness=1.5)
GOOD = between(TARGET, RANDOM, 0.8)
PROMPT = Prompt(jnp.array([[1, 0, 2, 0], [5, 0, 0, 0], [3, 3, 6, 1]]), jnp.array([3, 1, 4]))
THREE, OTHER = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3, sharpness=1.5)
PAIR = Prompt(jnp.array([[1, 0]]), jnp.array([2]))


@pytest.mark.slow
def test_the_distribution_of_the_text_with_another_rule():
    """Some rows propose point masses and others samples, and which is which changes from round to
    round.
    """
    both = fallback(prompt_lookup(longest=2, shortest=2), OTHER)
    assert certify(THREE, drafter=both, rule=rules.block(), gamma=2, steps=4, prompt=PAIR) < 1e-5


@pytest.mark.slow
def test_the_model_reads_what_was_committed_while_others_drafted():
    """With the target after the look-up, draft tokens are wrong only where the look-up made
    them.
    """
    both = fallback(prompt_lookup(longest=2, shortest=2), TARGET)
    options = dict(gamma=2, max_new_tokens=60)
    out = jaxspec.generate(TARGET, PROMPT, drafter=both, **options)
    plain = jaxspec.generate(TARGET, PROMPT, max_new_tokens=60)
    assert out.tokens.tolist() == plain.tokens.tolist()
    alone = jaxspec.generate(
        TARGET, PROMPT, drafter=prompt_lookup(longest=2, shortest=2), **options
    )
    wrong = alone.stats.drafted - alone.stats.accepted
    assert (out.stats.drafted - out.stats.accepted <= wrong + 2).all()
    assert (out.stats.rounds < alone.stats.rounds).all()


def drafted(drafter, prompt, gamma, **options):
    """Return what the drafter proposes after a prompt."""
    row, (functions, params, *_) = (
        Prompt(jnp.pad(prompt.tokens, ((0, 0), (0, 9))), prompt.length),
        drafter,
    )
    weights, keys = Weights(None, params), jax.random.split(jax.random.key(0), len(prompt.length))

    def to_distribution(logits, draft_tokens=None, seen=None):
        return Distribution(log_probs=jax.nn.log_softmax(logits))

    @jax.jit  # by itself every operation would be a program
    def propose(weights, prompt, row, keys):
        limit = jnp.full_like(prompt.length, gamma)
        context = DraftContext(keys, row, limit, gamma, True, to_distribution)._replace(**options)
        caches = Caches(
            None,
            functions.init(DraftStart(weights, prompt, Room(prompt.tokens.shape[1] + 9, 9), None)),
        )
        return functions.propose(weights, caches, context)[0]

    return propose(weights, prompt, row, keys)


@pytest.mark.slow
def test_rows_choose_by_themselves():
    """A row that the look-up knows, beside one that it does not know."""
    both = fallback(prompt_lookup(longest=3, shortest=3), GOOD)
    prompt = Prompt(jnp.array([[1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 5, 6, 0]]), jnp.array([7, 7]))
    draft = drafted(both, prompt, 1)
    assert draft.tokens[0].tolist() == [4] and draft.length.tolist() == [1, 1]
    assert jnp.exp(draft.log_probs[0, 0]).tolist() == [0, 0, 0, 0, 1, 0, 0]
    assert bool(
        jnp.isclose(
            jnp.exp(draft.log_probs[1, 0]), jax.nn.softmax(GOOD.params[6, 0]), atol=1e-6
        ).all()
    )


@pytest.mark.slow
def test_rows_do_not_depend_on_mates():
    keys = jax.random.split(jax.random.key(3), 3)
    both = fallback(prompt_lookup(), GOOD)
    options = dict(
        drafter=both,
        gamma=3,
        temperature=1.0,
        max_new_tokens=17,
        policy=policies.adaptive(0.1, 0.1),
    )
    together = jaxspec.generate(TARGET, PROMPT, key=keys, **options)
    for row in range(3):
        prompt = Prompt(PROMPT.tokens[row : row + 1], PROMPT.length[row : row + 1])
        alone = jaxspec.generate(TARGET, prompt, key=keys[row : row + 1], **options)
        assert alone.tokens[0].tolist() == together.tokens[row].tolist()


def test_models_inside_must_belong_to_the_target():
    other = table_model(jax.random.key(5), 7, encoder=True)
    for drafter in (fallback(prompt_lookup(), other), greedy(other)):
        with pytest.raises(ValueError, match="both must be of one kind"):
            jaxspec.generate(TARGET, PROMPT, drafter=drafter, max_new_tokens=4)


@pytest.mark.slow
def test_a_policy_reads_the_rows_that_have_distributions():
    """Rows that took a look-up's draft tokens have no distribution, and leave the policy's memory
    as it was.
    """
    both, policy = fallback(prompt_lookup(longest=3, shortest=3), GOOD), policies.entropy(1, 4, 0.5)
    prompt = Prompt(jnp.array([[1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 5, 6, 0]]), jnp.array([7, 7]))
    watching = dict(
        confidence=policy.functions.confidence, should_continue=lambda index, read: read[:, 0] >= 0
    )
    draft = drafted(both, prompt, 2, **watching)
    assert jnp.isnan(draft.aux["confidence"][0, 0]) and draft.aux["confidence"][1, 0] > 0
    memory = policy.functions.update(policy.params, jnp.array([0.3, 0.3]), draft, None, None)
    assert memory[0] == jnp.float32(0.3) and memory[1] != jnp.float32(0.3)


def test_a_drafter_that_would_never_draft_is_refused():
    with pytest.raises(ValueError, match="at least one drafter"):
        fallback()
    with pytest.raises(ValueError, match="drafter 0 of 2 always has a draft, so"):
        fallback(GOOD, prompt_lookup())


@pytest.mark.parametrize(
    "make", [lambda: fallback(jacobi(2)), lambda: horizontal_cascade(jacobi(2), GOOD, tokens=3)]
)
def test_rounds_may_be_longer_than_jacobi_drafts(make):
    out = jaxspec.generate(TARGET, PROMPT, drafter=make(), gamma=5, max_new_tokens=9)
    assert (out.tokens == jaxspec.generate(TARGET, PROMPT, max_new_tokens=9).tokens).all()


def test_the_same_drafters_share_a_program():
    assert fallback(prompt_lookup(), GOOD).functions is fallback(prompt_lookup(), RANDOM).functions


def test_trees_are_refused():
    with pytest.raises(
        ValueError, match=r"drafter 1 of 2 drafts trees: .* of chains; .*prompt_lookup.candidates="
    ):
        fallback(prompt_lookup(), tree(GOOD, (2, 1)))
