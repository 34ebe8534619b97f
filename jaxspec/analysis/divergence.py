"""Acceptance rates from the two distributions alone: the paper's section 3.2, appendices A.2, A.5.

Functions of probabilities [..., vocabulary] that broadcast, computed in float64: p is the target's
distribution and q the drafter's, both as they are sampled from (after temperature and truncation).
An array that is not a distribution, or has another vocabulary, is a ValueError.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

SUM_ERROR = 1e-3  # a distribution's sum may be off by this: bfloat16 probabilities, not logits


def beta(p: ArrayLike, q: ArrayLike, lenience: float = 1.0) -> np.ndarray:
    """Computes how probably a draft token from q is accepted: sum_x min(p(x) / l, q(x)), Theorem
    3.5 (l = 1) and A.5.

    Args:
        p, q: distributions of target and drafter [..., vocabulary].
        lenience: l, above 0 and at most 1; below 1 the output's distribution differs from p, but is
            at most p / l.

    Raises:
        ValueError: p or q is not a distribution, their vocabularies differ, or the lenience is out
            of range.

    Example:
        >>> p, q = [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]
        >>> float(beta(p, q)), float(beta(q, p)), float(beta(q, p, lenience=0.5))
        (0.5, 0.5, 1.0)
        >>> float(
        ...     beta([0.5, 0.5005], [0.5, 0.5005])
        ... )  # distributions may be off by what rounding does
        1.0
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}: expected above 0 and at most 1")
    p, q = _distributions(p, q)
    return np.minimum(np.minimum(p / lenience, q).sum(axis=-1), 1.0)


def d_lk(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    """Computes the divergence of two distributions, Definition 3.2: sum_x |p(x) - q(x)| / 2, which
    is 1 - `beta`.

    It is symmetric, 0 for equal distributions and 1 for distributions without a common token (Lemma
    3.3, Corollary 3.4). Others call it total variation.

    Args:
        p, q: distributions of target and drafter [..., vocabulary].

    Raises:
        ValueError: p or q is not a distribution, or their vocabularies differ.

    Example, two positions:
        >>> d_lk([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], [[0.2, 0.6, 0.2], [0.0, 0.5, 0.5]]).round(
        ...     3
        ... ).tolist()
        [0.3, 1.0]
    """
    p, q = _distributions(p, q)
    return np.abs(p - q).sum(axis=-1) / 2


def alpha(p: ArrayLike, q: ArrayLike, lenience: float = 1.0) -> float:
    """Computes the acceptance rate E[sum_x min(p(x) / l, q(x))], Corollary 3.6: the mean of `beta`
    over all positions.

    It has the arguments and errors of `beta`. Take positions of text that the target generates;
    `jaxspec.analysis.acceptance` measures this for a pair of models.

    Example, two positions; the drafter is right at one:
        >>> alpha([[0.5, 0.5], [1.0, 0.0]], [[0.5, 0.5], [0.0, 1.0]])
        0.5
    """
    return float(beta(p, q, lenience).mean())


def beta_of_candidates(p: ArrayLike, q: ArrayLike, count: int) -> np.ndarray:
    """Computes how probably one of the first 1, 2, ... K independent draws from q is accepted, as
    siblings in a tree.

    `rules.rejection` accepts the first with probability sum_x min(p(x), q(x)). After a rejection it
    judges the next one by the residual, norm(max(0, p - q)), in place of p, and so on. The residual
    does not depend on the draft tokens, so nothing is sampled.

    Args:
        p, q: distributions of target and drafter [..., vocabulary].
        count: K.

    Returns:
        [..., K]; the first is `beta`.

    Raises:
        ValueError: p or q is not a distribution, their vocabularies differ, or count < 1.

    Example:
        >>> beta_of_candidates([0.5, 0.3, 0.2], [0.1, 0.2, 0.7], 3).round(
        ...     3
        ... ).tolist()  # p becomes (0.8, 0.2, 0)
        [0.5, 0.65, 0.685]

    Reference: Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781.
    """
    if count < 1:
        raise ValueError(f"count is {count}: expected at least 1 candidate")
    p, q = _distributions(p, q)
    all_rejected = np.ones(p.shape[:-1])
    any_accepted = []
    for _ in range(count):
        all_rejected = all_rejected * (1 - np.minimum(np.minimum(p, q).sum(axis=-1), 1.0))
        any_accepted.append(1 - all_rejected)
        p = residual(p, q)
    return np.stack(any_accepted, axis=-1)


def classical_rejection(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    """Computes how probably classical rejection sampling accepts a draft token: min_x q(x) / p(x),
    p(x) > 0 (A.2).

    Never more than `beta`, and 0 as soon as the drafter excludes one token that the target may
    generate.

    Example; `beta` accepts 0.75 and 0.9:
        >>> classical_rejection([[0.5, 0.5], [0.9, 0.1]], [[0.25, 0.75], [1.0, 0.0]]).tolist()
        [0.5, 0.0]
    """
    p, q = _distributions(p, q)
    return np.min(np.where(p > 0, q / np.where(p > 0, p, 1.0), np.inf), axis=-1)


def residual(p: ArrayLike, q: ArrayLike) -> np.ndarray:
    """Computes the distribution that replaces a rejected draft token, section 2.3: norm(max(0, p -
    q)); p if p = q.

    Example:
        >>> residual([0.5, 0.5, 0.0], [0.25, 0.5, 0.25]).tolist()
        [1.0, 0.0, 0.0]
    """
    p, q = _distributions(p, q)
    missing = np.maximum(p - q, 0)
    mass = missing.sum(axis=-1, keepdims=True)
    return np.where(mass > 0, missing / np.where(mass > 0, mass, 1.0), p)


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns both as arrays of one shape, once they are distributions over one vocabulary."""
    distributions = np.asarray(p, np.float64), np.asarray(q, np.float64)
    for name, distribution in zip("pq", distributions, strict=True):
        sums_to_one = distribution.ndim > 0 and np.all(
            np.abs(distribution.sum(axis=-1) - 1) <= SUM_ERROR
        )
        if not sums_to_one or not np.all(distribution >= 0):
            raise ValueError(
                f"{name} of shape {distribution.shape} is not a distribution: expected "
                "probabilities that sum to 1"
            )
    if distributions[0].shape[-1] != distributions[1].shape[-1]:
        sizes = f"{distributions[0].shape[-1]} and {distributions[1].shape[-1]} tokens"
        raise ValueError(f"p and q are distributions over {sizes}: expected one vocabulary")
    first, second = np.broadcast_arrays(*distributions)
    return first, second
