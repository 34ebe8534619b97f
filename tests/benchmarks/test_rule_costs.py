"""The costs of rules are there, and not judged."""

import numpy as np
import pytest

from benchmarks import rule_costs as rules
from jaxspec.rules import catalogue


@pytest.mark.slow
def test_every_rule_is_timed():
    sizes, every = (
        rules.Sizes(vocab=11, batch=2, gamma=3),
        [entry.rule for entry in catalogue.RULES.values()],
    )
    costs = rules.costs(every, sizes, repeats=2, alike=True)
    assert list(costs) == ["distributions", *(rule.name for rule in every)]
    assert all(np.shape(seconds) == (2,) and (seconds > 0).all() for seconds in costs.values())
