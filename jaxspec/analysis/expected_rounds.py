"""How many rounds a text takes, if it is known how probably draft tokens are accepted: a Markov chain over its tokens.

A round that begins at some token accepts at least k draft tokens with probability S_k and emits one token more,
and the next one begins there. The mean number of rounds is computed, not sampled (`analysis.replay` has S_k).

Shapes: T tokens of one text, G gamma.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.1 (Equation 1, of an endless text).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def independent(alpha: float, count: int, gamma: int) -> Float[np.ndarray, "T G"]:
    """Computes S_1 .. S_G where draft tokens are accepted with probability alpha, as Equation 1 assumes.

    Draft tokens after the end of the `count` tokens are not emitted.

    >>> independent(0.5, 3, 2).tolist()
    [[0.5, 0.25], [0.5, 0.25], [0.5, 0.0]]
    >>> [round(n / expected_rounds(independent(0.8, n, 3)), 2) for n in (10, 1000)]  # Equation 1 promises 2.95
    [2.62, 2.95]
    """
    draft_token, left = np.arange(1, gamma + 1), count - np.arange(count)[:, None]
    return np.where(draft_token <= left, float(alpha) ** draft_token, 0.0)


def independent_tokens(alpha: float, counts: Int[np.ndarray, " rows"], gamma: int) -> float:
    """Computes tokens per round where draft tokens are accepted with probability alpha, in texts of `counts` tokens.

    Less than Equation 1 gives, since last rounds are cut short; it is what `replay.tokens_per_round` would be
    if right draft tokens did not cluster. A text's first token takes no round. NaN of texts that have no other.

    >>> round(independent_tokens(0.8, np.array([11, 11]), 3), 2)  # Equation 1 promises 2.95
    2.62
    """
    later, texts = np.unique(counts[counts > 1] - 1, return_counts=True)
    if not len(later):
        return float("nan")
    rounds = np.array([expected_rounds(independent(alpha, count, gamma)) for count in later.tolist()])
    return float(later @ texts / (rounds @ texts))


def expected_rounds(survives: Float[np.ndarray, "T G"]) -> float:
    """Computes how many rounds a text of T tokens takes, if one from token t accepts k or more with survives[t, k-1].

    >>> expected_rounds(np.array([[0.5], [0.5], [0.0]]))  # the second round begins at the second token, or the third
    2.25
    """
    count, gamma = survives.shape
    exactly = -np.diff(np.pad(survives, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))), axis=1)
    left = np.zeros(count + gamma + 1)
    for t in reversed(range(count)):
        left[t] = 1 + exactly[t] @ left[t + 1 : t + gamma + 2]
    return float(left[0])
