"""Whether samples of an inexact rule keep the bound that the rule states: exact binomial tests.

A ceiling says how probable each token may be, given what precedes it (`accept.catalogue`). Where more draws have a
token than that allows, the tail of the binomial law says how surprising it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.analysis.binomial import at_least
from jaxspec.analysis.samples import EXPECTED, Place


class Bounded(NamedTuple):
    """A test of a bound.

    Attributes:
        cells: tokens behind one prefix, or groups of those that are rarely allowed, whose frequency was tested.
        draws: how many pairs of tokens were looked at.
        pvalue: how likely it is that any of the cells is as far above its ceiling, or farther, if the bound holds: the
            least of their p-values times their number (Bonferroni).
    """

    cells: int
    draws: int
    pvalue: float


def check(place: Place, tokens: Int[np.ndarray, "N 2"], ceiling: Callable[[Array], Array]) -> Bounded:
    """Compares how often tokens were drawn with how often they may be.

    The first token of the pairs is tested, and the second one behind each frequent first one. Which cells there are
    depends on the ceilings alone: tokens that may have five draws or more by themselves, the others together.

    Args:
        place: the target's laws.
        tokens: draws behind its first token.
        ceiling: log probabilities [V] -> the most that each token's probability may be.

    Example:
        >>> place = Place(0, np.array([0.9, 0.1]), {})
        >>> twice = lambda log_p: jnp.minimum(2 * jnp.exp(log_p), 1.0)
        >>> for count in (19, 40):
        ...     drawn = np.repeat([[0, 0], [1, 0]], [100 - count, count], axis=0)
        ...     print(check(place, drawn, twice).pvalue < 0.001)
        False
        True
    """
    found = _tails(place.after, tokens[:, 0], ceiling)
    for x, law in place.then.items():
        found += _tails(law, tokens[tokens[:, 0] == x, 1], ceiling)
    return Bounded(len(found), len(tokens), min(1.0, len(found) * min(found)) if found else 1.0)


def _tails(
    law: Float[np.ndarray, " V"], drawn: Int[np.ndarray, " n"], ceiling: Callable[[Array], Array]
) -> list[float]:
    """P(as many draws or more) of each cell behind one prefix, if its probability is the ceiling."""
    if not len(drawn):
        return []
    most = np.asarray(ceiling(jnp.log(jnp.asarray(law, jnp.float32))), np.float64)
    seen, bounded = np.bincount(drawn, minlength=len(law)), most < 1
    alone = bounded & (most * len(drawn) >= EXPECTED)
    cells = list(zip(seen[alone].tolist(), most[alone].tolist(), strict=True))
    rest = bounded & ~alone
    if rest.any() and most[rest].sum() < 1:
        cells.append((int(seen[rest].sum()), float(most[rest].sum())))
    return [at_least(count, len(drawn), probability) for count, probability in cells]
