"""How often something happens in n independent trials: exact tails, and the exact confidence interval they make."""

from __future__ import annotations

from scipy import special


def at_least(successes: int, trials: int, probability: float) -> float:
    """P(X >= successes), X being binomial.

    >>> at_least(2, 2, 0.5), at_least(0, 9, 0.1), round(at_least(3, 10, 0.1), 4)
    (0.25, 1.0, 0.0702)
    """
    if not 0 < successes <= trials:
        return float(successes <= 0)
    return float(special.bdtrc(successes - 1, trials, probability))


def interval(successes: int, trials: int, error: float) -> tuple[float, float]:
    """The interval of Clopper and Pearson (1934): it holds the probability except in at most `error` of all cases.

    >>> [round(end, 3) for end in interval(8, 10, 0.05)]
    [0.444, 0.975]
    >>> interval(0, 10, 0.05)[0], interval(10, 10, 0.05)[1]
    (0.0, 1.0)
    """
    failures = trials - successes
    low = special.betaincinv(successes, failures + 1, error / 2) if successes else 0.0
    high = special.betaincinv(successes + 1, failures, 1 - error / 2) if failures else 1.0
    return float(low), float(high)
