"""Many tests at once: p-values corrected for their number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def corrected(pvalues: Sequence[float]) -> list[float]:
    """Holm's p-values: to call news what is below a level errs, over all tests together, no more often than the level.

    The smallest of m is multiplied by m, the next one by m - 1, and so on; none is below one before it. No test need be
    independent of another.

    >>> [round(p, 3) for p in corrected([0.02, 0.001, 0.9])]
    [0.04, 0.003, 0.9]

    Reference: Holm, Scandinavian Journal of Statistics 6, 1979.
    """
    order = np.argsort(pvalues, kind="stable")
    count = len(order)
    raised = np.asarray(pvalues, np.float64)[order] * (count - np.arange(count))
    found = np.empty(count)
    found[order] = np.minimum(np.maximum.accumulate(raised), 1.0)
    return found.tolist()
