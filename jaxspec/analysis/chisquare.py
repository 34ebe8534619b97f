"""Whether samples of a real pair have the target's law: a chi-square test of fit over pairs of tokens.

For models too large to enumerate (`jaxspec.testing.certify`) this is the next best: fixed keys, and a p-value.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxspec.analysis.samples import EXPECTED, Place


class ChiSquare(NamedTuple):
    """A test of fit.

    Attributes:
        statistic: sum over cells of (observed - expected)^2 / expected.
        cells: pairs of tokens, or groups of rare ones.
        draws: how many pairs were looked at.
        pvalue: how likely a statistic this large is if the law is right. One below 0.001 is news.
    """

    statistic: float
    cells: int
    draws: int
    pvalue: float


def fit(place: Place, tokens: Int[np.ndarray, "N 2"]) -> ChiSquare:
    """Compares what was drawn with the target's own law there.

    Cells are pairs of tokens that should be drawn five times or more, the rest behind each first token of which there
    is as much, and all that is left; so both tokens are tested, and how they go together. A token that the target never
    says is found for certain. With one cell only, as where the law is nearly certain, nothing is tested: p is 1.

    Args:
        place: the target's laws.
        tokens: draws behind its first token.

    Example:
        >>> place = Place(0, np.array([0.5, 0.5]), {0: np.array([0.5, 0.5]), 1: np.array([1.0, 0.0])})
        >>> drawn = np.repeat([[0, 0], [0, 1], [1, 0]], [30, 20, 50], axis=0)
        >>> found = fit(place, drawn)
        >>> found.statistic, found.cells, round(found.pvalue, 3)
        (2.0, 3, 0.368)
    """
    due = expected(place, len(tokens))
    if any(place.after[x] == 0 or (x in place.then and place.then[x][y] == 0) for x, y in tokens.tolist()):
        return ChiSquare(float("inf"), len(due), len(tokens), 0.0)
    names = {cell: index for index, cell in enumerate(due)}
    which = [next(names[cell] for cell in ((x, y), (x,), ()) if cell in names) for x, y in tokens.tolist()]
    seen, hoped = merged(np.bincount(which, minlength=len(due)).astype(np.float64), np.array(list(due.values())))
    if len(seen) < 2:
        return ChiSquare(0.0, 1, len(tokens), 1.0)
    statistic = float(np.sum((seen - hoped) ** 2 / hoped))
    pvalue = float(jax.scipy.special.gammaincc((len(seen) - 1) / 2, statistic / 2))
    return ChiSquare(statistic, len(seen), len(tokens), pvalue)


def expected(place: Place, draws: int) -> dict[tuple[int, ...], float]:
    """How many draws each cell should have: a pair of tokens, a token and any other behind it, or (): all else.

    >>> place = Place(0, np.array([0.75, 0.25]), {0: np.array([0.5, 0.5])})
    >>> expected(place, 40)
    {(0, 0): 15.0, (0, 1): 15.0, (1,): 10.0, (): 0.0}
    >>> expected(place, 12)
    {(0,): 9.0, (): 3.0}
    """
    due: dict[tuple[int, ...], float] = {}
    for x in np.flatnonzero(draws * place.after >= EXPECTED).tolist():
        whole = float(draws * place.after[x])
        pairs = whole * place.then[x] if x in place.then else np.zeros(0)
        frequent = {(x, y): float(pairs[y]) for y in np.flatnonzero(pairs >= EXPECTED).tolist()}
        due |= frequent
        left = whole - sum(frequent.values())
        if left >= EXPECTED:
            due[(x,)] = left
    return due | {(): max(draws - sum(due.values()), 0.0)}


def merged(seen: Float[np.ndarray, " cells"], due: Float[np.ndarray, " cells"]):
    """The last cell, if too little is expected of it, goes to the smallest of the others.

    >>> [x.tolist() for x in merged(np.array([6.0, 9.0, 1.0]), np.array([5.0, 9.0, 2.0]))]
    [[7.0, 9.0], [7.0, 9.0]]
    """
    if due[-1] >= EXPECTED or len(due) == 1:
        return seen, due
    smallest = int(np.argmin(due[:-1]))
    seen, due = seen.copy(), due.copy()
    for values in (seen, due):
        values[smallest] += values[-1]
    return seen[:-1], due[:-1]
