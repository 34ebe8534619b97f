"""How often something happens in n independent trials: exact tails, and the exact confidence interval they make."""

from __future__ import annotations

import functools
import math

import numpy as np
from jaxtyping import Float

HALVINGS = 40  # of [0, 1], for the ends of an interval


def at_least(successes: int, trials: int, probability: float) -> float:
    """P(X >= successes), X being binomial.

    >>> at_least(2, 2, 0.5), at_least(0, 9, 0.1), round(at_least(3, 10, 0.1), 4)
    (0.25, 1.0, 0.0702)
    """
    if successes <= 0 or probability >= 1:
        return 1.0
    if probability <= 0 or successes > trials:
        return 0.0
    count, log_factorial = np.arange(successes, trials + 1), _log_factorials(trials)
    log_choose = log_factorial[-1] - log_factorial[count] - log_factorial[trials - count]
    chance = np.exp(log_choose + count * math.log(probability) + (trials - count) * math.log1p(-probability))
    return float(min(chance.sum(), 1.0))


def interval(successes: int, trials: int, error: float) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934): it holds the probability except in at most `error` of all cases.

    >>> [round(end, 3) for end in interval(8, 10, 0.05)]
    [0.444, 0.975]
    >>> interval(0, 10, 0.05)[0], interval(10, 10, 0.05)[1]
    (0.0, 1.0)
    """
    low = 0.0 if successes == 0 else _where(lambda p: at_least(successes, trials, p) >= error / 2)
    failures = trials - successes
    high = 0.0 if failures == 0 else _where(lambda p: at_least(failures, trials, p) >= error / 2)
    return low, 1.0 - high


def _where(reached) -> float:
    """The p at which a condition that larger ones meet begins to hold."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return (low + high) / 2


@functools.lru_cache(maxsize=4)
def _log_factorials(most: int) -> Float[np.ndarray, " n"]:
    """log 0!, log 1!, ..."""
    return np.concatenate([np.zeros(1), np.cumsum(np.log(np.arange(1, most + 1)))])
