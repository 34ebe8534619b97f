"""The test of fit finds what is wrong, and passes what is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.analysis import chisquare
from jaxspec.base import Prompt
from jaxspec.testing import table_model

TARGET, DRAFT = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
PROMPT = Prompt(jnp.array([[3, 1]]), jnp.array([2]))


def test_a_right_rule_passes_and_a_wrong_one_does_not(wrong_rule):
    right = chisquare.second_token(TARGET, DRAFT, PROMPT, jax.random.key(0))
    wrong = chisquare.second_token(TARGET, DRAFT, PROMPT, jax.random.key(0), accept=wrong_rule)
    assert right.pvalue > 1e-3 and wrong.pvalue < 1e-6
    assert 1000 < right.draws <= 4000 and 0.05 < right.acceptance_rate < 0.95
    np.testing.assert_allclose(right.pvalue, stats.chi2.sf(right.statistic, right.cells - 1), rtol=1e-4)


def test_bad_input_is_named():
    two = Prompt(jnp.array([[3, 1], [1, 1]]), jnp.array([2, 2]))
    with pytest.raises(ValueError, match="got 2 prompts: expected one"):
        chisquare.second_token(TARGET, DRAFT, two, jax.random.key(0))
    with pytest.raises(ValueError, match="give more rows"):
        chisquare.second_token(TARGET, DRAFT, PROMPT, jax.random.key(0), rows=4)
