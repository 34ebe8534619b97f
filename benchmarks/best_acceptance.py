"""The chance that one of K draft tokens for a position can be accepted at all, and that each rule
accepts one.

Functions of one pair of distributions over V tokens, in float64: p is the target's and q the
drafter's. `draw` is how the K draft tokens are chosen from q, by the names of `drafters.tree`:

    replacement            independently of each other
    without_replacement    one after the other, each from what the earlier ones have left
    top                    the K most probable tokens
    mixed                  the K - 1 most probable tokens, and one drawn from the rest, which is judged first
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from jaxspec.analysis.divergence import beta_of_candidates, residual
from jaxspec.drafters.trees.children import DrawName, check

MOST = 200_000  # drafts that are enumerated
STEP, FIRST, LAST = 0.25, -24.0, 40.0  # of the logarithm of time, see `_arrivals`

Probabilities = Float[np.ndarray, " V"]


def best_acceptance(
    p: ArrayLike, q: ArrayLike, count: int, draw: DrawName = "replacement"
) -> float:
    """The probability that a token drawn from p is among K tokens drafted from q, when the two are
    coupled at best.

    No rule whose output has the distribution p can accept one of the draft tokens more often. By
    duality of optimal transport it is 1 + min over sets of tokens H of P(H) - Q(all K draft tokens
    are in H). For independent draws, and draws without replacement, the best H is a beginning of
    the tokens in order of p / q. For fixed tokens it is what p has of them, and with one drawn from
    the rest p(fixed) + sum over the others of min(p, q / q(others)).

    Args:
        p, q: distributions of target and drafter [V].
        count: K.
        draw: its name, as the top of this file says.

    Raises:
        ValueError: p or q is no distribution, their vocabularies differ, K is not in 1 .. V, or an
            unknown draw.

    Example:
        >>> p, q = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]
        >>> [
        ...     round(best_acceptance(p, q, k), 3) for k in (1, 2, 3)
        ... ]  # for one it is sum_x min(p(x), q(x))
        [0.5, 0.69, 0.771]
        >>> [
        ...     round(best_acceptance(p, q, 2, draw), 3)
        ...     for draw in ("without_replacement", "top", "mixed")
        ... ]
        [0.858, 0.5, 0.833]

    Reference: Hu et al., arXiv 2502.18779; Sun et al., SpecTr, arXiv 2310.15141.
    """
    p, q = _checked(p, q, count, draw)
    if draw in ("top", "mixed"):
        return float(np.minimum(p, _of_fixed_and_one(q, count, draw)).sum())
    order = np.argsort(np.where(q > 0, p / np.where(q > 0, q, 1.0), np.inf), kind="stable")
    inside = np.concatenate([[0.0], np.cumsum(p[order])])
    inside_q = np.minimum(np.concatenate([[0.0], np.cumsum(q[order])]), 1.0)
    count = min(count, int(np.count_nonzero(q)))  # no more can be drawn without replacement
    all_inside = inside_q**count if draw == "replacement" else _all_inside(q[order], count)
    return float(np.clip(1 + (inside - all_inside).min(), 0.0, 1.0))


def rule_acceptance(
    rule: str, p: ArrayLike, q: ArrayLike, count: int, draw: DrawName = "replacement"
) -> float:
    """The probability that a rule accepts one of K draft tokens for a position, of a tree of one
    level.

    Args:
        rule: "rejection" ("traversal" is the same on one level), "k_seq", or "coupled" (and
            "exact_match"), which accepts what plain sampling draws.

    Example:
        >>> p, q = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]
        >>> [round(rule_acceptance(rule, p, q, 2), 3) for rule in ("coupled", "rejection", "k_seq")]
        [0.385, 0.65, 0.658]
        >>> round(rule_acceptance("rejection", p, q, 2, "without_replacement"), 3)
        0.767
    """
    if rule not in ACCEPTANCE:
        raise ValueError(f"rule is {rule!r}: expected one of {', '.join(ACCEPTANCE)}")
    p, q = _checked(p, q, count, draw)
    return float(np.clip(ACCEPTANCE[rule](p, q, count, draw), 0.0, 1.0))


def _of_rejection(p: Probabilities, q: Probabilities, count: int, draw: DrawName) -> float:
    """1 - prod_i (1 - min(1, p_i(x_i) / q_i(x_i))), p_1 = p, p_{i+1} = norm(max(0, p_i - q_i)),
    over all drafts.
    """
    if draw == "replacement":
        return float(beta_of_candidates(p, q, count)[-1])
    accepted = 0.0
    for drafted in _drafts(q, count, draw):
        left, missed = p, 1.0
        for token, distribution in zip(drafted.tokens, drafted.distributions, strict=True):
            missed *= 1 - min(1.0, left[token] / distribution[token])
            if missed == 0:
                break
            left = residual(left, distribution)
        accepted += drafted.probability * (1 - missed)
    return accepted


def _of_k_seq(p: Probabilities, q: Probabilities, count: int, draw: DrawName) -> float:
    """1 - (1 - b)^K at the smallest r of which that is r b; of siblings that are no independent
    draws the first.
    """
    if draw in ("top", "mixed"):
        first = next(_drafts(q, count, draw)).distributions[0]
        return float(np.minimum(p, first).sum()) if draw == "mixed" else float(p[first.argmax()])
    count = count if draw == "replacement" else 1
    low, high = 1.0, float(count)
    for _ in range(60):
        middle = (low + high) / 2
        b = np.minimum(p / middle, q).sum()
        low, high = (low, middle) if 1 - (1 - b) ** count <= middle * b else (middle, high)
    return float(1 - (1 - np.minimum(p / high, q).sum()) ** count)


def _of_coupled(p: Probabilities, q: Probabilities, count: int, draw: DrawName) -> float:
    """sum_x p(x) P(x is drafted)."""
    if draw == "replacement":
        return float((p * (1 - (1 - q) ** count)).sum())
    return sum(
        drafted.probability * p[list(drafted.tokens)].sum() for drafted in _drafts(q, count, draw)
    )


ACCEPTANCE: dict[str, Callable[[Probabilities, Probabilities, int, DrawName], float]] = {
    "rejection": _of_rejection,
    "traversal": _of_rejection,
    "k_seq": _of_k_seq,
    "coupled": _of_coupled,
    "exact_match": _of_coupled,
}


class _Drafted(NamedTuple):
    """K draft tokens in the order in which they are judged, what each was drawn from, and how
    probable they are.
    """

    tokens: tuple[int, ...]
    distributions: tuple[Probabilities, ...]
    probability: float


def _drafts(q: Probabilities, count: int, draw: DrawName) -> Iterator[_Drafted]:
    """Yields all drafts that are distinct by construction."""
    vocab = len(q)
    if draw == "without_replacement":
        support = np.flatnonzero(q)
        count = min(count, len(support))
        if math.perm(len(support), count) > MOST:
            raise ValueError(
                f"{count} draws without replacement from {len(support)} tokens are too many to "
                f"enumerate: expected at most {MOST} drafts"
            )
        for tokens in itertools.permutations(support.tolist(), count):
            distributions = [_without(q, tokens[:i]) for i in range(count)]
            yield _Drafted(
                tokens,
                tuple(distributions),
                math.prod(float(x[t]) for x, t in zip(distributions, tokens, strict=True)),
            )
        return
    fixed = tuple(np.argsort(-q, kind="stable")[: count if draw == "top" else count - 1].tolist())
    points = tuple(np.eye(vocab)[token] for token in fixed)
    if draw == "top" or not np.any(_without(q, fixed)):
        yield _Drafted(fixed, points, 1.0)
        return
    rest = _without(q, fixed)
    for token in np.flatnonzero(rest).tolist():
        yield _Drafted((token, *fixed), (rest, *points), float(rest[token]))


def _without(q: Probabilities, tokens: tuple[int, ...]) -> Probabilities:
    """q without some tokens, normalised; zeros where these have all the mass."""
    left = q.copy()
    left[list(tokens)] = 0
    return left / left.sum() if left.sum() > 0 else left


def _of_fixed_and_one(q: Probabilities, count: int, draw: DrawName) -> Probabilities:
    """The probability that each token is among the draft tokens, all but one of which are fixed."""
    fixed = list(np.argsort(-q, kind="stable")[: count if draw == "top" else count - 1])
    drafted = np.zeros_like(q) if draw == "top" else _without(q, tuple(fixed))
    drafted[fixed] = 1
    return drafted


def _all_inside(q: Probabilities, count: int) -> Float[np.ndarray, " V+1"]:
    """The probability that `count` draws without replacement are all among the first 0, 1, ..., V
    tokens.

    Draws without replacement are the order in which independent exponential clocks of rates q ring.
    The other tokens' clocks ring first after a time t, of rate r. At least `count` of the first
    tokens must have rung before. That is an integral over t. Its integrand falls off on both sides
    in log t, so the trapezoidal rule converges exponentially.
    """
    log_time = np.arange(FIRST, LAST, STEP)
    time = np.exp(log_time)
    rung = np.zeros((count + 1, len(time)))  # 0, 1, ..., count or more of the first tokens
    rung[0], chances = 1.0, [0.0]
    outside = np.append(np.cumsum(q[::-1])[::-1][1:], 0.0)
    for rate, rest in zip(q, outside, strict=True):
        chance = -np.expm1(-rate * time)
        moved = rung * chance
        rung -= moved
        rung[1:] += moved[:-1]
        rung[-1] += moved[-1]
        chances.append(
            1.0
            if rest <= 0
            else float((rung[-1] * rest * time * np.exp(-rest * time)).sum() * STEP)
        )
    return np.minimum(np.array(chances), 1.0)


def _checked(
    p: ArrayLike, q: ArrayLike, count: int, draw: str
) -> tuple[Probabilities, Probabilities]:
    """Both as float64, normalised."""
    residual(p, q)  # which checks that they are distributions over one vocabulary
    first, second = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(
            f"got distributions of shapes {first.shape} and {second.shape}: expected one of each"
        )
    if not 1 <= count <= len(first):
        raise ValueError(
            f"count is {count}: expected 1 to {len(first)} draft tokens, the vocabulary's size"
        )
    check(draw)
    return first / first.sum(), second / second.sum()
