"""The list of all rules is the list of what is exported, and says of each what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import accept
from jaxspec.accept import catalogue

TYPES = {"Choice", "Proposals", "Rule"}


def test_every_exported_rule_is_listed_once():
    names = [*catalogue.CHAINS, *catalogue.STEPS]
    assert len(set(names)) == len(names)
    assert set(names) == set(accept.__all__) - TYPES
    for name, entry in catalogue.CHAINS.items():
        assert entry.rule.name.partition("(")[0] == name
    assert all(getattr(accept, name) is step for name, step in catalogue.STEPS.items())


def test_inexact_rules_and_only_they_state_a_ceiling():
    assert all((entry.ceiling is None) == entry.rule.exact for entry in catalogue.CHAINS.values())
    assert {name for name, entry in catalogue.CHAINS.items() if entry.ceiling} == {"lenient", "typical"}


@pytest.mark.parametrize("name", ["lenient", "typical"])
def test_a_ceiling_is_above_the_law(name):
    """A text with the target's own law keeps every promise."""
    log_p = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (50, 7)).at[:, 3].set(-jnp.inf))
    ceiling = np.asarray(catalogue.CHAINS[name].ceiling(log_p))
    assert (ceiling >= np.exp(log_p) - 1e-6).all() and (ceiling <= 1 + 1e-6).all() and (ceiling < 1).any()
    assert (ceiling[:, 3] == 0).all()
