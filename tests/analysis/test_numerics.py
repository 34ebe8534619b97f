"""The places where greedy texts differ, and the margins there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.analysis import numerics
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model, table_model_from

PROMPT = Prompt(jnp.array([[0, 2], [1, 0]]), jnp.array([2, 1]))


def test_a_pair_that_is_exact_differs_nowhere():
    target, draft = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
    assert (
        numerics.mismatches(prepare(target, PROMPT, drafter=draft, gamma=3, max_new_tokens=16))
        == []
    )


@pytest.mark.slow
def test_a_pass_that_rounds_otherwise_is_seen_with_its_margin():
    """A target whose passes over several tokens see token 1 a little better: 0.01 after, it then
    wins.
    """
    target = table_model_from(jnp.array([1.0, 0.99, -3.0]))

    def extend(params, cache, tokens, parent=None, real=None):
        forward, cache = target.lm.extend(params, cache, tokens, parent, real)
        wide = 0.02 * (tokens.shape[1] > 1)
        return forward._replace(
            logits=forward.logits + wide * jnp.array([[[0.0, 1.0, 0.0]]])
        ), cache

    rounding = target._replace(lm=target.lm._replace(extend=extend))
    differences = numerics.mismatches(
        prepare(rounding, PROMPT, drafter=target, gamma=2, max_new_tokens=8)
    )
    assert [(d.row, d.position, d.plain, d.speculative) for d in differences] == [
        (0, 1, 0, 1),
        (1, 1, 0, 1),
    ]
    np.testing.assert_allclose([d.margin for d in differences], 0.01, atol=1e-6)
    np.testing.assert_allclose([d.top_two_margin for d in differences], 0.01, atol=1e-6)


def test_a_token_that_was_no_near_tie_shows_in_its_own_margin():
    """The second best is 0.01 after, and the token of a wrong pass 4: only one of the margins
    tells.
    """
    target = table_model_from(jnp.array([1.0, 0.99, -3.0]))

    def extend(params, cache, tokens, parent=None, real=None):
        forward, cache = target.lm.extend(params, cache, tokens, parent, real)
        wide = 9.0 * (tokens.shape[1] > 1)
        return forward._replace(
            logits=forward.logits + wide * jnp.array([[[0.0, 0.0, 1.0]]])
        ), cache

    wrong = target._replace(lm=target.lm._replace(extend=extend))
    (first, _) = numerics.mismatches(
        prepare(wrong, PROMPT, drafter=target, gamma=2, max_new_tokens=4)
    )
    assert (first.speculative, first.margin, first.top_two_margin) == (
        2,
        pytest.approx(4),
        pytest.approx(0.01),
    )


def test_the_summary_names_the_earliest_mismatch(monkeypatch):
    prepared = prepare(table_model(jax.random.key(1), vocab=5), PROMPT, max_new_tokens=4)
    late, early = numerics.Mismatch(1, 2, 1, 0, 0.5, 0.5), numerics.Mismatch(0, 7, 1, 0, 0.25, 0.75)
    for differences, first, largest in (([], None, None), ([early, late], late, 0.75)):
        monkeypatch.setattr(
            numerics, "mismatches", lambda prepared, differences=differences: differences
        )
        summary = numerics.summary(prepared)
        assert (summary.first, summary.largest_top_two_margin) == (first, largest)
        assert summary.same + len(differences) == summary.prompts == 2


@pytest.mark.parametrize("size", [1, 2])
def test_prompts_may_be_few(size):
    target = table_model(jax.random.key(1), vocab=5)
    prompts = Prompt(PROMPT.tokens[:size], PROMPT.length[:size])
    assert numerics.mismatches(prepare(target, prompts, drafter=target, max_new_tokens=4)) == []
