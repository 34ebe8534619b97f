"""The paper's formulas: how many tokens a round is worth, what it costs, and which gamma is best.

Plain functions of numbers or arrays (they broadcast), computed in float64. The symbols are the paper's:

    alpha   acceptance rate, E[sum_x min(p(x), q(x))]: `jaxspec.analysis.acceptance` measures it
    gamma   guesses a round
    c       time of a one-token pass of the drafter, in those of the target: `jaxspec.analysis.cost`
    v       time of the target's pass over gamma + 1 tokens, in the same unit: the paper takes 1
    c_hat   arithmetic operations per token of the drafter over those of the target

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

MOST = 64  # the largest gamma that `optimal_gamma` tries unless told
TIE = 1e-12  # speeds are equal if they differ by less, relatively: alpha = c makes gamma 0 and 1 equally good


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
    """Tokens that one round is expected to yield, Equation 1: (1 - alpha^(gamma+1)) / (1 - alpha).

    A round keeps its leading accepted guesses and adds one token of the target's, so this is
    alpha^0 + alpha^1 + ... + alpha^gamma: 1 at alpha = 0, and gamma + 1 at alpha = 1.

    Args:
        alpha: acceptance rate, from 0 to 1; trials are taken to be independent.
        gamma: guesses a round, 0 or more; `inf` gives the bound 1 / (1 - alpha).

    Raises:
        ValueError: alpha or gamma out of range.

    Example, the curves of Figure 2 for gamma = 1, 3, 5, 7, 10 and infinity at alpha = 0.8, and their ends:
        >>> expected_tokens(0.8, [1, 3, 5, 7, 10, np.inf]).round(2).tolist()
        [1.8, 2.95, 3.69, 4.16, 4.57, 5.0]
        >>> expected_tokens([0.0, 1.0], 7).tolist()
        [1.0, 8.0]
    """
    alpha, gamma = _checked(alpha, "alpha", 1.0), _checked(gamma, "gamma")
    alpha, gamma = np.broadcast_arrays(alpha, gamma)
    with np.errstate(divide="ignore", invalid="ignore"):  # both ends are filled in below
        tokens = np.expm1((gamma + 1) * np.log(alpha)) / (alpha - 1)
    return np.where(alpha == 1, gamma + 1, tokens)[()]


def improvement(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0) -> np.ndarray:
    """Speed over plain decoding, Theorem 3.8: expected_tokens / (gamma c + v).

    Args:
        alpha, gamma: as in `expected_tokens`.
        c: one pass of the drafter, in one-token passes of the target.
        v: the verify pass, in one-token passes of the target. 1 (the paper's) assumes compute to spare.

    Raises:
        ValueError: an argument out of range.

    Example, Table 4 (T5-XXL with T5-small, base and large, translation, temperature 0), then Corollary 3.9,
    which is the case gamma = 1, (1 + alpha) / (1 + c):
        >>> improvement([0.75, 0.80, 0.82], 7, [0.02, 0.04, 0.11]).round(1).tolist()
        [3.2, 3.3, 2.5]
        >>> round(float(improvement(0.6, 1, 0.25)), 2)
        1.28
    """
    c, v = _checked(c, "c"), _checked(v, "v")
    return expected_tokens(alpha, gamma) / (np.asarray(gamma, np.float64) * c + v)


def operations(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> np.ndarray:
    """Operations over those of plain decoding, Theorem 3.11: (gamma c_hat + gamma + 1) / expected_tokens.

    Args:
        alpha, gamma: as in `expected_tokens`.
        c_hat: operations per token of the drafter over those of the target.

    Raises:
        ValueError: an argument out of range.

    Example, Table 1:
        >>> operations([0.6, 0.7, 0.8, 0.8, 0.9, 0.9], [2, 3, 2, 5, 2, 10], 0.0).round(2).tolist()
        [1.53, 1.58, 1.23, 1.63, 1.11, 1.6]
    """
    gamma, c_hat = _checked(gamma, "gamma"), _checked(c_hat, "c_hat")
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: ArrayLike, c: ArrayLike, v: Callable[[int], float] | ArrayLike = 1.0, most: int | None = None
) -> np.ndarray:
    """The gamma that maximises `improvement` (section 3.5, Figure 3); 0, plain decoding, where none improves.

    Args:
        alpha, c: as in `improvement`; arrays broadcast.
        v: cost of the verify pass: a function of gamma, an array with v(gamma) at index gamma, or a number.
            What it says of gamma = 0 is ignored: that is a one-token pass, which costs 1.
        most: the largest gamma to try; 64, or the last of the array `v`, by default.

    Returns:
        Integers of the broadcast shape of alpha and c; the smaller of two that are equally good.

    Raises:
        ValueError: an argument out of range, or an array `v` of fewer than most + 1 entries.

    Example, a drafter at a fiftieth of the target's cost, then the same on hardware with no compute to spare:
        >>> optimal_gamma([0.0, 0.5, 0.75, 0.9], 0.02).tolist()
        [0, 4, 9, 19]
        >>> optimal_gamma(0.75, 0.02, v=lambda gamma: 1 + 0.2 * gamma).tolist()
        3
    """
    alpha, c = np.broadcast_arrays(_checked(alpha, "alpha", 1.0), _checked(c, "c"))
    gammas = np.arange(_most(v, most) + 1)
    speed = improvement(alpha[..., None], gammas, c[..., None], _verify_costs(v, gammas))
    best = speed.max(axis=-1, keepdims=True)
    return np.argmax(speed >= best * (1 - TIE), axis=-1)


def _most(v: Callable[[int], float] | ArrayLike, most: int | None) -> int:
    given = None if callable(v) or np.ndim(v) == 0 else np.size(v) - 1
    if most is None:
        most = MOST if given is None else given
    if most < 0 or (given is not None and given < most):
        have = "" if given is None else f" (v has entries up to gamma {given})"
        raise ValueError(f"most is {most}: expected 0 or more, and a v for each gamma{have}")
    return most


def _verify_costs(v: Callable[[int], float] | ArrayLike, gammas: np.ndarray) -> np.ndarray:
    """v of each gamma, 1 for gamma 0."""
    if callable(v):
        costs = np.array([1.0, *(float(v(int(gamma))) for gamma in gammas[1:])])
    elif np.ndim(v) == 0:
        costs = np.full(gammas.shape, v, np.float64)
    else:
        costs = np.array(v, np.float64)[: len(gammas)]
    costs[0] = 1.0
    return costs


def _checked(value: ArrayLike, name: str, largest: float = np.inf) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if not np.all((array >= 0) & (array <= largest)):
        wanted = "0 or more" if largest == np.inf else f"0 to {largest:g}"
        raise ValueError(f"{name} is {value!r}: expected {wanted}")
    return array
