"""Whether a drafter that is a speculative decoder itself pays: Theorem 3.8 for two levels, from what is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxspec import accept
from jaxspec.analysis.bench import plan
from jaxspec.analysis.measure import cost, jobs, replay
from jaxspec.analysis.theory import cascade
from jaxspec.decode.request import Job

STEPS = 2  # how often `of_pairs` calls `advance`


class CascadePlan(NamedTuple):
    """The best gamma with and without the inner drafter, by the theory.

    Attributes:
        alpha, c: of the drafting model for the target, and of the inner drafter for the drafting model.
        gamma, improvement: of the drafting model alone, over plain decoding of the target.
        cascade_gamma, cascade_improvement: with the inner drafter.
    """

    alpha: tuple[float, float]
    c: tuple[float, float]
    gamma: int
    improvement: float
    cascade_gamma: int
    cascade_improvement: float

    @property
    def pays(self) -> bool:
        """Whether the cascade is the faster one, by more than timings are off."""
        return bool(self.cascade_improvement > max(1.0, self.improvement) * (1 + plan.TOLERANCE))


def of_pairs(
    upper: Job,
    lower: Job,
    inner_gamma: int,
    *,
    most: int = 16,
    repeats: int = cost.REPEATS,
    advance: Callable[[str], object] = lambda doing: None,
) -> CascadePlan:
    """The plan for `drafters.cascade(draft, inner, gamma=inner_gamma)`, as if draft tokens were accepted independently.

    alpha, c and v of each pair are measured on prompts, the second's along texts of the drafting model itself.

    Args:
        upper: of the target and the drafting model.
        lower: of the drafting model and the inner drafter, which is a model.
        inner_gamma: draft tokens of an inner round.
        most: the largest gamma to consider.
        repeats: of each timing.
        advance: called with what was done.
    """
    if inner_gamma < 1 or most < 1:
        raise ValueError(f"inner_gamma is {inner_gamma} and most {most}: expected at least 1 of each")
    levels = []
    for job, largest in ((upper, most), (lower, inner_gamma)):
        rate = replay.evaluate(replay.collect(job), accept.rejection(), gamma=1).alpha.value
        (row,) = jobs.whole_batches(job, 1, 1)
        c, v = plan.costs(row, largest, repeats=repeats)
        levels.append(cascade.Level(min(rate, 1.0), inner_gamma, float(c), v))
        advance("a pair")
    first, second = levels
    gammas = range(1, most + 1)
    alone = [float(cascade.improvement([first._replace(gamma=gamma)])) for gamma in gammas]
    both = [float(cascade.improvement([first._replace(gamma=gamma), second])) for gamma in gammas]
    best = int(np.argmax(alone)), int(np.argmax(both))
    rates, costs = (first.alpha, second.alpha), (first.c, second.c)
    return CascadePlan(rates, costs, best[0] + 1, alone[best[0]], best[1] + 1, both[best[1]])


def sentence(found: CascadePlan) -> str:
    """Whether to use the cascade.

    >>> sentence(CascadePlan((0.85, 0.5), (0.2, 0.0), 5, 2.05, 6, 2.65))[:66]
    'The cascade pays: 2.65 times the speed of plain decoding with γ = '
    """
    numbers = (
        f"{found.cascade_improvement:.2f} times the speed of plain decoding with γ = {found.cascade_gamma}, against "
        f"{found.improvement:.2f} times with γ = {found.gamma} without the inner drafter"
    )
    if found.pays:
        return f"The cascade pays: {numbers}."
    return f"The cascade does not pay: {numbers}; a draft token costs {found.c[0]:.3f} passes of the target alone."
