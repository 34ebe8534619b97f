"""A mean over positions or rounds of many texts, with an honest error: texts are independent, what is in one is not."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float, Shaped
from scipy import special

LEVEL = 0.95  # of confidence intervals


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio of totals over rows.

    Attributes:
        sums: what each row adds to the numerator [rows].
        counts: what each row adds to the denominator [rows].
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
        """Its standard error, by linearisation; NaN for a single row, which says nothing about their spread."""
        rows, total = len(self.sums), float(self.counts.sum())
        if rows < 2 or not total:
            return float("nan")
        off = self.sums - self.value * self.counts
        return float(np.sqrt(rows / (rows - 1) * np.square(off).sum()) / total)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval, by Student's t: of three rows, 4.3 standard errors on either side of the value.

        It leans on the rows' spread being like that of a normal law: of a few rows it is wide, and still optimistic if
        most of them are alike.
        """
        reach = special.stdtrit(max(len(self.sums) - 1, 1), (1 + LEVEL) / 2) * self.stderr
        ends = np.array([self.value - reach, self.value + reach])
        low, high = np.clip(ends, 0.0, 1.0) if self.probability else ends
        return float(low), float(high)

    def to_dict(self) -> dict[str, float | None]:
        """Value, error and interval, for JSON, which has no NaN: None is what a single row, or nothing, does not say.

        >>> Ratio(np.array([3.0]), np.array([4])).to_dict()
        {'value': 0.75, 'stderr': None, 'low': None, 'high': None}
        """
        low, high = self.interval
        numbers = {"value": self.value, "stderr": self.stderr, "low": low, "high": high}
        return {name: None if np.isnan(number) else number for name, number in numbers.items()}


def with_error(value: float, stderr: float | None) -> str:
    """A value and its standard error, if that is known.

    >>> with_error(0.8125, 0.02), with_error(0.8125, None)
    ('0.812 ± 0.020', '0.812')
    """
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, least and largest.

    >>> spread(np.array([1.0, 4.0, 2.0]))
    {'median': 2.0, 'min': 1.0, 'max': 4.0}
    """
    return {"median": float(np.median(values)), "min": float(np.min(values)), "max": float(np.max(values))}
