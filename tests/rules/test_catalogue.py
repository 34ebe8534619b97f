"""The catalogue lists every exported rule, with what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import rules
from jaxspec.rules import catalogue


def test_every_exported_rule_is_listed_once():
    assert set(catalogue.RULES) == set(rules.__all__)
    for name, entry in catalogue.RULES.items():
        assert entry.rule.name.partition("(")[0] == name


def test_rules_say_whether_they_judge_trees():
    trees = {name for name, entry in catalogue.RULES.items() if entry.rule.trees}
    assert set(catalogue.RULES) - trees == {"block", "classical_rejection", "trusting"}
    assert {name for name, entry in catalogue.RULES.items() if entry.rule.shares_noise} == {
        "coupled"
    }


def test_inexact_rules_and_only_they_state_a_ceiling():
    assert all((entry.bound is None) == entry.rule.exact for entry in catalogue.RULES.values())
    assert {name for name, entry in catalogue.RULES.items() if entry.bound} == {
        "lenient",
        "typical",
        "trusting",
    }


@pytest.mark.parametrize("name", ["lenient", "typical", "trusting"])
def test_a_ceiling_is_above_the_distribution(name):
    """So that a text with the target's own distribution keeps every promise."""
    log_p = jax.nn.log_softmax(
        2 * jax.random.normal(jax.random.key(0), (50, 7)).at[:, 3].set(-jnp.inf)
    )
    bound = np.asarray(catalogue.RULES[name].bound(log_p))
    assert (bound >= np.exp(log_p) - 1e-6).all() and (bound <= 1 + 1e-6).all() and (bound < 1).any()
    assert (bound[:, 3] == 0).all()
