"""Errors and intervals of ratios, against their definitions."""

import numpy as np
import pytest

from jaxspec.analysis.statistics import Rate


@pytest.mark.parametrize("rows", [3, 5, 12])
def test_an_interval_holds_a_mean_in_95_of_100_cases(rows):
    """Rows are normal, where Student's distribution is exact; 1.96 standard errors would hold it in
    81, 88 and 92.
    """
    random, held, counts = np.random.default_rng(0), 0, np.ones(rows)
    for _ in range(4000):
        low, high = Rate.of(random.normal(0.5, 1.0, rows), counts).interval
        held += low <= 0.5 <= high
    assert held / 4000 == pytest.approx(0.95, abs=0.015)


def test_probabilities_have_intervals_within_0_and_1():
    sums, counts = np.array([4.0, 3.0, 0.0]), np.array([4, 4, 4])
    low, high = Rate.of(sums, counts).interval
    assert low < 0 and high > 1
    assert Rate.of(sums, counts, probability=True).interval == (0.0, 1.0)
    alike = Rate.of(np.array([1.0, 1.0]), np.array([2, 2]), probability=True)
    assert alike.interval == (0.5, 0.5)


@pytest.mark.parametrize("probability", [True, False])
def test_a_single_row_and_nothing_have_none(probability):
    single = Rate.of(np.array([1.0]), np.array([2]), probability)
    assert single.value == 0.5 and np.isnan(single.interval).all()
    nothing = Rate.of(np.zeros(2), np.zeros(2), probability)
    assert nothing.count == 0 and np.isnan(nothing[:4]).all()
