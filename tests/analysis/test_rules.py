"""What rules cost is only there, never judged."""

import numpy as np

from jaxspec.accept import catalogue
from jaxspec.analysis.measure import rules


def test_every_rule_and_number_of_candidates_is_timed():
    sizes, every = rules.Sizes(vocab=11, batch=2, gamma=3), [entry.rule for entry in catalogue.RULES.values()]
    taken = rules.costs(every, sizes, repeats=2, alike=True, candidates=(1, 4))
    names = [rule.name for rule in every]
    assert list(taken) == ["distributions", *names, "rejection, 1 candidate", "rejection, 4 candidates"]
    assert all(np.shape(seconds) == (2,) and (seconds > 0).all() for seconds in taken.values())
