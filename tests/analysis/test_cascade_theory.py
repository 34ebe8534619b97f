"""What a cascade costs, by the theory: against simulated rounds, and what is out of range."""

import numpy as np
import pytest

from jaxspec.analysis.theory.cascade import Level, draft_cost, effective_c, improvement, pays

ROUNDS = 20_000
ABOVE = Level(0.8, gamma=5, c=0.3, v=[1.0, 1.05, 1.1, 1.2, 1.25, 1.3])
MIDDLE = Level(0.7, gamma=3, c=0.1, v=lambda gamma: 1 + 0.1 * gamma)
LOWEST = Level(0.4, gamma=2, c=0.05, v=1.2)


def accepted(rng, alpha, drafted):
    """Draft tokens before the first that a coin rejects."""
    for n in range(drafted):
        if rng.random() >= alpha:
            return n
    return drafted


def of_pass(level, drafted):
    v = level.v
    return 1.0 if drafted == 0 else v(drafted) if callable(v) else v if np.ndim(v) == 0 else v[drafted]


def drafting(rng, count, levels):
    """Cost of `count` tokens that a model makes by rounds of speculation, in its passes; the last comes with a pass."""
    if not levels:
        return count
    cost, made = 0.0, 0
    while made < count:
        drafted = min(levels[0].gamma, count - made - 1)
        cost += levels[0].c * drafting(rng, drafted, levels[1:]) + of_pass(levels[0], drafted)
        made += accepted(rng, levels[0].alpha, drafted) + 1
    return cost


@pytest.mark.parametrize(
    "below", [[MIDDLE], [MIDDLE, LOWEST], [MIDDLE._replace(alpha=0.0)], [MIDDLE._replace(alpha=1.0)]]
)
@pytest.mark.parametrize("count", [1, 5, 8])
def test_what_drafting_costs_is_the_mean_of_simulated_rounds(count, below):
    rng = np.random.default_rng(count)
    costs = np.array([drafting(rng, count, below) for _ in range(ROUNDS // 4)])
    error = costs.std() / np.sqrt(len(costs))
    assert draft_cost(count, below) == pytest.approx(costs.mean(), rel=1e-9, abs=4 * error)


@pytest.mark.parametrize("below", [[], [MIDDLE], [MIDDLE, LOWEST]])
def test_improvement_is_tokens_over_cost_of_simulated_rounds(below):
    rng = np.random.default_rng(7)
    tokens = np.array([accepted(rng, ABOVE.alpha, ABOVE.gamma) + 1 for _ in range(ROUNDS)])
    drafts = np.array([drafting(rng, ABOVE.gamma, below) for _ in range(ROUNDS)])
    costs = ABOVE.c * drafts + of_pass(ABOVE, ABOVE.gamma)
    ratio = tokens.mean() / costs.mean()
    error = (tokens - ratio * costs).std() / costs.mean() / np.sqrt(ROUNDS)  # of a ratio, to first order
    assert error < 0.01 * ratio
    assert improvement([ABOVE, *below]) == pytest.approx(ratio, abs=4 * error)
    assert effective_c([ABOVE, *below]) == pytest.approx(ABOVE.c * drafts.mean() / ABOVE.gamma, rel=0.01)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        (Level(0.7, 3, -1), "c is -1: expected 0 or more"),
        (Level(0.7, 3, np.nan), "c is nan: expected 0 or more"),
        (Level(1.5, 3, 0.1), "alpha is 1.5: expected 0 to 1"),
        (Level(0.7, -1, 0.1), "gamma is -1"),
        (Level(0.7, 2.5, 0.1), "gamma is 2.5: expected an integer, 0 or more"),
        (Level(0.7, 3, 0.1, [1.0, 1.1]), r"v has shape \(2,\): expected a number, or 4 entries: gamma is 3"),
        (Level(0.7, 3, 0.1, np.ones((4, 4))), r"v has shape \(4, 4\): expected a number"),
        (Level(0.7, 3, 0.1, -1.0), "v is -1 at gamma 3: expected 0 or more"),
        (Level(0.7, 3, 0.1, lambda gamma: 2.0 - gamma), "v is -1 at gamma 3: expected 0 or more"),
    ],
)
def test_numbers_out_of_range_are_refused_on_every_level(level, message):
    for compute in (
        *(lambda: draft_cost(8, [level]), lambda: draft_cost(0, [level]), lambda: draft_cost(1, [MIDDLE, level])),
        *(lambda: improvement([level]), lambda: improvement([ABOVE, level]), lambda: effective_c([level])),
        *(lambda: improvement([ABOVE._replace(gamma=0), level]), lambda: pays([level, LOWEST])),
    ):
        with pytest.raises(ValueError, match=message):
            compute()


def test_counts_out_of_range_are_refused():
    for count, message in ((-1, "count is -1"), (2.5, "count is 2.5: expected an integer")):
        with pytest.raises(ValueError, match=message):
            draft_cost(count, [LOWEST])
    for compute in (improvement, effective_c):
        with pytest.raises(ValueError, match="got no levels"):
            compute([])
    assert improvement([ABOVE._replace(v=0.0, c=0.0)]) == np.inf
