"""Corrected p-values and exact intervals, against scipy and against their definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jaxspec.analysis import binomial, holm

pvalues = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(pvalues, st.floats(0.001, 0.5))
def test_holm_rejects_what_its_procedure_does(found, level):
    """Step down: the i-th smallest is news while it is below level / (m - i)."""
    m, news = len(found), set()
    for i, index in enumerate(np.argsort(found, kind="stable")):
        if found[index] >= level / (m - i) * (1 - 1e-12):
            break
        news.add(int(index))
    adjusted = holm.corrected(found)
    assert {i for i, p in enumerate(adjusted) if p < level * (1 - 1e-12)} <= news
    assert news <= {i for i, p in enumerate(adjusted) if p < level * (1 + 1e-12)}
    assert all(a >= p for a, p in zip(adjusted, found, strict=True))


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (3, 7), (7, 7), (12, 1000), (990, 1000)])
def test_tails_and_intervals_are_scipys(successes, trials):
    for p in (0.0, 0.01, 0.3, 0.99, 1.0):
        assert binomial.at_least(successes, trials, p) == pytest.approx(stats.binom.sf(successes - 1, trials, p))
    theirs = stats.binomtest(successes, trials).proportion_ci(0.999, "exact")
    assert binomial.interval(successes, trials, 0.001) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
