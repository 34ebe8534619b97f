"""Whether a drafter that is a speculative decoder itself pays: Theorem 3.8 for its levels, from what is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxspec import rules
from jaxspec.analysis.bench import plan
from jaxspec.analysis.measure import batching, cost, replay
from jaxspec.analysis.theory import cascade, formulas
from jaxspec.core import Model
from jaxspec.decode.request import Prepared


class CascadePlan(NamedTuple):
    """The best gamma with and without the inner drafter, by the theory.

    Attributes:
        alpha, c: of the drafting model for the target, of the inner drafter for the drafting model, and so on down.
        gamma, improvement: of the drafting model alone, over plain decoding of the target.
        cascade_gamma, cascade_improvement: with the inner drafter.
    """

    alpha: tuple[float, ...]
    c: tuple[float, ...]
    gamma: int
    improvement: float
    cascade_gamma: int
    cascade_improvement: float

    @property
    def pays(self) -> bool:
        """Whether the cascade is the faster one, by more than timings are off."""
        return bool(self.cascade_improvement > max(1.0, self.improvement) * (1 + plan.TOLERANCE))


def of_levels(
    levels: Sequence[Prepared],
    gammas: Sequence[int],
    *,
    most: int = 16,
    repeats: int = cost.REPEATS,
    advance: Callable[[str], object] = lambda doing: None,
) -> CascadePlan:
    """The plan for `drafters.cascade(draft, inner, gamma=...)`, as if draft tokens were accepted independently.

    alpha, c and v of each level are measured on prompts, those of the lower ones along texts of the drafting model
    itself. alpha of a drafter that is no model is the one with which the theory has the tokens a round that it has.

    Args:
        levels: a generation of the target and the drafting model, one of the drafting model and what drafts for it (a
            model, a look-up or any other drafter of chains), and so on down.
        gammas: draft tokens of the rounds of each level but the first.
        most: the largest gamma of the first level to consider.
        repeats: of each timing.
        advance: called with what was done, once a level.

    Raises:
        ValueError: numbers below 1, another number of gammas, or a drafter of trees.
    """
    if len(gammas) != len(levels) - 1 or not gammas or min(*gammas, most) < 1:
        raise ValueError(
            f"gammas is {list(gammas)} and most {most} for {len(levels)} levels: expected 1 or more, for each but "
            "the first"
        )
    found = []
    for prepared, largest in zip(levels, (most, *gammas), strict=True):
        found.append(_level(prepared, largest, repeats))
        advance("a level")
    first, below = found[0], found[1:]
    tried = range(1, most + 1)
    alone = [float(cascade.improvement([first._replace(gamma=gamma)])) for gamma in tried]
    both = [float(cascade.improvement([first._replace(gamma=gamma), *below])) for gamma in tried]
    best = int(np.argmax(alone)), int(np.argmax(both))
    rates, costs = tuple(one.alpha for one in found), tuple(one.c for one in found)
    return CascadePlan(rates, costs, best[0] + 1, alone[best[0]], best[1] + 1, both[best[1]])


def _level(prepared: Prepared, gamma: int, repeats: int) -> cascade.Level:
    """What is measured of a model and what drafts for it."""
    (row,) = batching.whole_batches(prepared, 1, 1)
    if isinstance(prepared.options["drafter"], Model):
        rate = replay.evaluate(replay.collect(prepared), rules.rejection(), gamma=1).alpha.value
        c, v = plan.costs(row, gamma, repeats=repeats)
        return cascade.Level(min(rate, 1.0), gamma, float(c), v)
    if prepared.decoder.trees:
        raise ValueError(
            "the inner drafter drafts trees: the theory is of chains; `jaxspec bench` measures any cascade"
        )
    stats = batching.run(prepared.replace(gamma=gamma)).stats
    made = (stats.emitted - 1).sum() / max(1, stats.rounds.sum())
    rates = np.linspace(0, 1, 1001)
    alpha = np.interp(made, formulas.expected_tokens(rates, gamma), rates)
    c, v = cost.policy_costs(row.replace(gamma=gamma), repeats=repeats)
    return cascade.Level(float(alpha), gamma, float(c), v)


def sentence(found: CascadePlan) -> str:
    """Whether to use the cascade.

    >>> sentence(CascadePlan((0.85, 0.5), (0.2, 0.0), 5, 2.05, 6, 2.65))[:66]
    'The cascade pays: at most 2.65 times the speed of plain decoding w'
    """
    numbers = (
        f"at most {found.cascade_improvement:.2f} times the speed of plain decoding with γ = {found.cascade_gamma}, "
        f"against {found.improvement:.2f} times with γ = {found.gamma} without the inner drafter"
    )
    if found.pays:
        return f"The cascade pays: {numbers}."
    return f"The cascade does not pay: {numbers}; a draft token costs {found.c[0]:.3f} passes of the target alone."
