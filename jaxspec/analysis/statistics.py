"""Numbers with their errors: ratios over independent texts, medians of repeats."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped
from scipy import special

LEVEL = 0.95  # of confidence intervals


class Rate(NamedTuple):
    """A ratio of totals over rows, with its error: texts are independent, the positions or rounds
    within one are not.

    >>> accepted = Rate.of(
    ...     np.array([3.0, 1.0, 4.0]), np.array([4, 2, 5]), probability=True
    ... )  # 8 of 11
    >>> (
    ...     round(accepted.value, 3),
    ...     round(accepted.stderr, 3),
    ...     [round(end, 3) for end in accepted.interval],
    ... )
    (0.727, 0.066, [0.445, 1.0])
    >>> Rate.of(np.array([3.0]), np.array([4]))
    Rate(value=0.75, stderr=nan, low=nan, high=nan, count=4)
    """

    value: float  # sum over sum; NaN of nothing
    stderr: float  # its standard error, by linearisation; NaN for a single row, which has no spread
    low: float  # the lower end of the 95% interval
    high: float  # the upper one
    count: int  # the denominator: positions, draft tokens that were tested, or rounds

    interval = property(lambda self: (self.low, self.high), doc="The 95% confidence interval.")

    @classmethod
    def of(
        cls,
        sums: Float[np.ndarray, " rows"],
        counts: Shaped[np.ndarray, " rows"],
        probability: bool = False,
    ) -> Rate:
        """Divides totals over rows. The interval is by Student's t: of three rows, 4.3 standard
        errors on either side.

        It takes the rows' spread to be like that of a normal distribution: of a few rows it is
        wide, and still optimistic if most of them are alike.

        Args:
            sums, counts: each row's contribution to the numerator, and to the denominator.
            probability: whether the ratio is one: its interval then lies in [0, 1].
        """
        rows = len(sums)
        total = float(counts.sum())
        value = float(sums.sum()) / total if total else math.nan
        if rows < 2 or not total:
            return cls(value, math.nan, math.nan, math.nan, round(total))
        stderr = float(np.sqrt(rows / (rows - 1) * np.square(sums - value * counts).sum()) / total)
        reach = special.stdtrit(rows - 1, (1 + LEVEL) / 2) * stderr
        ends = np.array([value - reach, value + reach])
        low, high = np.clip(ends, 0.0, 1.0) if probability else ends
        return cls(value, stderr, float(low), float(high), round(total))


class Spread(NamedTuple):
    """Median, least and largest of what was measured several times.

    >>> Spread.of(np.array([1.0, 4.0, 2.0]))
    Spread(median=2.0, min=1.0, max=4.0)
    """

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Float[np.ndarray, " repeats"]) -> Spread:
        """Summarises an array."""
        return cls(float(np.median(values)), float(np.min(values)), float(np.max(values)))
