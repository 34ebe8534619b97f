"""A mean over positions or rounds of many texts, with an honest error: texts are independent, what is in one is not."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Shaped

NORMAL = 1.96  # standard errors on either side that hold 95% of a normal law


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of totals over rows.

    Attributes:
        sums: what each row adds to the numerator [rows].
        counts: what each row adds to the denominator [rows].

    >>> accepted = Ratio(np.array([3.0, 1.0]), np.array([4, 2]))
    >>> round(accepted.value, 3), round(accepted.stderr, 3)
    (0.667, 0.111)
    """

    sums: Float[np.ndarray, " rows"]
    counts: Shaped[np.ndarray, " rows"]

    @property
    def value(self) -> float:
        """Sum over sum: 4 of 6 is 0.667; NaN of nothing."""
        total = float(self.counts.sum())
        return float(self.sums.sum()) / total if total else float("nan")

    @property
    def stderr(self) -> float:
        """Its standard error, by linearisation; NaN for a single row, which says nothing about their spread."""
        rows, total = len(self.sums), float(self.counts.sum())
        if rows < 2 or not total:
            return float("nan")
        off = self.sums - self.value * self.counts
        return float(np.sqrt(rows / (rows - 1) * np.square(off).sum()) / total)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval: 0.667 with an error of 0.111 is (0.449, 0.884)."""
        return self.value - NORMAL * self.stderr, self.value + NORMAL * self.stderr

    def to_dict(self) -> dict[str, float | None]:
        """Value, error and interval, for JSON, which has no NaN: None is what a single row, or nothing, does not say.

        >>> Ratio(np.array([3.0]), np.array([4])).to_dict()
        {'value': 0.75, 'stderr': None, 'low': None, 'high': None}
        """
        low, high = self.interval
        numbers = {"value": self.value, "stderr": self.stderr, "low": low, "high": high}
        return {name: None if np.isnan(number) else number for name, number in numbers.items()}


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, least and largest.

    >>> spread(np.array([1.0, 4.0, 2.0]))
    {'median': 2.0, 'min': 1.0, 'max': 4.0}
    """
    return {"median": float(np.median(values)), "min": float(np.min(values)), "max": float(np.max(values))}
