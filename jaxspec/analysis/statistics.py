"""Numbers with their errors: ratios over independent texts, medians of repeats."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped
from scipy import special

LEVEL = 0.95  # of confidence intervals


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of totals over rows: texts are independent, the positions or rounds within one are not.

    Attributes:
        sums: each row's contribution to the numerator [rows].
        counts: each row's contribution to the denominator [rows].
        probability: whether what is estimated is one: its interval then lies in [0, 1].

    >>> accepted = Ratio(np.array([3.0, 1.0, 4.0]), np.array([4, 2, 5]), probability=True)
    >>> round(accepted.value, 3), round(accepted.stderr, 3), [round(end, 3) for end in accepted.interval]
    (0.727, 0.066, [0.445, 1.0])
    """

    sums: Float[np.ndarray, " rows"]
    counts: Shaped[np.ndarray, " rows"]
    probability: bool = False

    @property
    def value(self) -> float:
        """Sum over sum: 8 of 11 is 0.727; NaN of nothing."""
        total = float(self.counts.sum())
        return float(self.sums.sum()) / total if total else float("nan")

    @property
    def stderr(self) -> float:
        """Its standard error, by linearisation; NaN for a single row, which has no spread."""
        rows, total = len(self.sums), float(self.counts.sum())
        if rows < 2 or not total:
            return float("nan")
        off = self.sums - self.value * self.counts
        return float(np.sqrt(rows / (rows - 1) * np.square(off).sum()) / total)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval, by Student's t: of three rows, 4.3 standard errors on either side of the value.

        It takes the rows' spread to be like that of a normal distribution: of a few rows it is wide, and still
        optimistic if most of them are alike.
        """
        reach = special.stdtrit(max(len(self.sums) - 1, 1), (1 + LEVEL) / 2) * self.stderr
        ends = np.array([self.value - reach, self.value + reach])
        low, high = np.clip(ends, 0.0, 1.0) if self.probability else ends
        return float(low), float(high)


class Rate(NamedTuple):
    """A ratio of totals over texts as numbers: with its standard error and 95% interval (None of a single text).

    Attributes:
        value: None of nothing.
        stderr, low, high: the standard error and the 95% interval, as in `Ratio`.
        count: the denominator: positions, draft tokens that were tested, or rounds.

    >>> Rate.of(Ratio(np.array([3.0]), np.array([4])))
    Rate(value=0.75, stderr=None, low=None, high=None, count=4)
    """

    value: float | None
    stderr: float | None
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, ratio: Ratio) -> Rate:
        """Makes the numbers of a ratio."""
        numbers = (None if np.isnan(x) else x for x in (ratio.value, ratio.stderr, *ratio.interval))
        return cls(*numbers, count=round(float(ratio.counts.sum())))


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
