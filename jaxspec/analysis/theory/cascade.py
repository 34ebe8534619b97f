"""What a drafter costs that is a speculative decoder itself, and when that pays: Theorem 3.8, level by level.

A `Level` is one pair of a cascade: a model, and what drafts for it. The first level is the target and its drafter, the
next one that drafter and its own, and so on down.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Theorem 3.8; Chen et al., arXiv 2312.11462.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.analysis.theory import formulas
from jaxspec.core.checks import integer


class Level(NamedTuple):
    """A model and what drafts for it, in `formulas`' symbols.

    Attributes:
        alpha: acceptance rate of the drafts by the model.
        gamma: draft tokens of one of its rounds.
        c: a one-token pass of the drafting model alone, in those of the model.
        v: the model's pass over gamma + 1 tokens, in those over one: a number, a function of gamma or an array.
    """

    alpha: float
    gamma: int
    c: float
    v: formulas.Verify = 1.0


def draft_cost(count: int, levels: Sequence[Level]) -> float:
    """What `count` draft tokens cost, in one-token passes of the model that drafts them.

    Without levels, a pass for each. With them, the rounds of speculation that make as many tokens: one that needs n
    more drafts at most n - 1 of them, as the last comes with the pass.

    Args:
        count: draft tokens, 0 or more.
        levels: of the drafting model, from its own drafter down; empty: it drafts alone.

    Raises:
        ValueError: count < 0, a number of a level out of range, or a v with fewer than gamma + 1 entries.

    Example, a drafter of its own that is nearly free and right three times in four, and one that is never right:
        >>> round(draft_cost(8, [Level(0.75, gamma=3, c=0.02)]), 2), draft_cost(8, [])
        (3.46, 8.0)
        >>> round(draft_cost(8, [Level(0.0, gamma=3, c=0.02)]), 2)
        8.36
    """
    count = integer(count, "count", "an integer, 0 draft tokens or more")
    if count < 0:
        raise ValueError(f"count is {count}: expected 0 draft tokens or more")
    for level in levels:
        _check(level)
    if not levels:
        return float(count)
    (alpha, gamma, c, v), below = levels[0], levels[1:]
    made = [draft_cost(drafted, below) for drafted in range(min(gamma, max(count - 1, 0)) + 1)]
    expected = [0.0]
    for left in range(1, count + 1):
        drafted = min(gamma, left - 1)
        once = c * made[drafted] + (1.0 if drafted == 0 else verify_cost(v, drafted))
        # n draft tokens are accepted, and then one is not, or they were all: n + 1 tokens.
        chance = [alpha**n * (1 - alpha) for n in range(drafted)] + [alpha**drafted]
        expected.append(once + sum(p * expected[left - n - 1] for n, p in enumerate(chance)))
    return expected[count]


def verify_cost(v: formulas.Verify, gamma: int) -> float:
    """v at a gamma above 0.

    Raises:
        ValueError: it is negative, or an array without it.
    """
    costs = np.asarray(v(gamma) if callable(v) else v, np.float64)
    if costs.ndim > 1 or (costs.ndim and costs.size <= gamma):
        raise ValueError(f"v has shape {costs.shape}: expected a number, or {gamma + 1} entries: gamma is {gamma}")
    cost = float(costs[gamma] if costs.ndim else costs)
    if not 0 <= cost < np.inf:
        raise ValueError(f"v is {cost:g} at gamma {gamma}: expected 0 or more")
    return cost


def _check(level: Level) -> None:
    """Refuses a level with a number out of range.

    Raises:
        ValueError: there is one.
    """
    gamma = integer(level.gamma, "gamma", "an integer, 0 or more")
    formulas.expected_tokens(level.alpha, gamma)  # checks both
    if not 0 <= level.c < np.inf:
        raise ValueError(f"c is {level.c}: expected 0 or more passes of the model")
    for drafted in range(gamma, 0, -1):
        verify_cost(level.v, drafted)


def improvement(levels: Sequence[Level]) -> float:
    """Speed over plain decoding of a cascade, Theorem 3.8 with the drafter's own speculation in its cost.

    expected_tokens(alpha, gamma) / (c draft_cost(gamma) + v), where alpha, gamma, c and v are the first level's. With
    one level it is `formulas.improvement`.

    Args:
        levels: from the target down.

    Raises:
        ValueError: no levels, or a number out of range.

    Example, a drafter at a fifth of the target's cost, alone and with a look-up of its own:
        >>> above, lookup = Level(0.85, gamma=6, c=0.2), Level(0.5, gamma=4, c=0.0)
        >>> round(improvement([above]), 2), round(improvement([above, lookup]), 2)
        (2.06, 2.65)
    """
    if not levels:
        raise ValueError("got no levels: expected at least the target's")
    for level in levels:
        _check(level)
    (alpha, gamma, c, v), below = levels[0], levels[1:]
    if gamma == 0:
        return 1.0
    cost = c * draft_cost(gamma, below) + verify_cost(v, gamma)
    return float(formulas.expected_tokens(alpha, gamma)) / cost if cost else float(np.inf)


def pays(levels: Sequence[Level]) -> bool:
    """Whether the second level makes the first one faster: whether its model drafts faster with it than alone.

    That does not depend on the target: a cascade pays where the drafting model by itself gains from speculation, on
    drafts as short as these.

    Args:
        levels: at least two, from the target down.

    Raises:
        ValueError: fewer than two, or a number out of range.

    >>> above = Level(0.85, gamma=6, c=0.2)
    >>> pays([above, Level(0.5, gamma=4, c=0.0)]), pays([above, Level(0.5, gamma=4, c=0.3, v=1.5)])
    (True, False)
    """
    if len(levels) < 2:
        raise ValueError(f"got {len(levels)} levels: expected at least 2, of which the second is to pay")
    _check(levels[0])
    return draft_cost(levels[0].gamma, levels[1:]) < levels[0].gamma


def effective_c(levels: Sequence[Level]) -> float:
    """What a draft token costs, in one-token passes of the target: the c of a cascade, for `formulas` and
    `policies.adaptive`.

    Args:
        levels: from the target down, gamma of the first at least 1.

    Raises:
        ValueError: no levels, or a number out of range.

    >>> round(effective_c([Level(0.85, gamma=6, c=0.2), Level(0.5, gamma=4, c=0.0)]), 3)
    0.118
    """
    if not levels:
        raise ValueError("got no levels: expected at least the target's")
    first, *below = levels
    _check(first)
    return first.c * draft_cost(first.gamma, below) / max(first.gamma, 1)
