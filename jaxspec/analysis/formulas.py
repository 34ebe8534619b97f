"""The paper's formulas: how many tokens a round is worth, what it costs, and which gamma is best.

Plain functions of numbers or arrays (they broadcast), computed in float64. The symbols are the
paper's:

    alpha   acceptance rate, E[sum_x min(p(x), q(x))], measured by `jaxspec.analysis.acceptance`.
    gamma   draft tokens a round.
    c       time of a one-token pass of the drafter over the target's, measured by `jaxspec.analysis.cost`.
    v       time of the target's pass over gamma + 1 tokens over its pass over one. The paper takes 1.
    c_hat   arithmetic operations per token of the drafter over those of the target.
    c_bytes bytes that a pass of the drafter reads over those of the target.

Equation 1 assumes an endless text, and draft tokens that are accepted independently of each other.
`expected_rounds` takes a text that ends and the probabilities of its positions (from `replay`). It
computes the mean of a Markov chain over the text's tokens, without sampling. An argument out of
range is a ValueError. `roofline` has v from a machine.

Shapes: T tokens of one text, G gamma.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

# v: a function of gamma, an array with v(gamma) at gamma, or a number
VerifyCost = Callable[[int], float] | ArrayLike

MOST = 64  # the largest gamma that `optimal_gamma` tries by default
# speeds are equal if they differ by less, relatively: alpha = c makes gamma 0 and 1 equally good
TIE = 1e-12


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> np.ndarray:
    """Computes the expected tokens of a round, Equation 1: (1 - alpha^(gamma+1)) / (1 - alpha).

    A round commits its leading accepted draft tokens and adds one token of the target's, so this is
    alpha^0 + alpha^1 + ... + alpha^gamma: 1 at alpha = 0, and gamma + 1 at alpha = 1.

    Args:
        alpha: acceptance rate, from 0 to 1; trials are taken to be independent.
        gamma: draft tokens a round, 0 or more; `inf` gives the bound 1 / (1 - alpha).

    Example, the curves of Figure 2 for gamma = 1, 3, 5, 7, 10 and infinity at alpha = 0.8, and
    their ends:
        >>> expected_tokens(0.8, [1, 3, 5, 7, 10, np.inf]).round(2).tolist()
        [1.8, 2.95, 3.69, 4.16, 4.57, 5.0]
        >>> expected_tokens([0.0, 1.0], 7).tolist()
        [1.0, 8.0]
    """
    alpha = _checked(alpha, "alpha", 1.0)
    gamma = _checked(gamma, "gamma")
    alpha, gamma = np.broadcast_arrays(alpha, gamma)
    with np.errstate(divide="ignore", invalid="ignore"):  # both ends are filled in below
        tokens = np.expm1((gamma + 1) * np.log(alpha)) / (alpha - 1)
    return np.where(alpha == 1, gamma + 1, tokens)[()]


def improvement(alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0) -> np.ndarray:
    """Computes the speed over plain decoding, Theorem 3.8: expected_tokens / (gamma c + v).

    Args:
        c: one pass of the drafter, in one-token passes of the target.
        v: the verify pass, in one-token passes of the target. 1 (the paper's) assumes compute to
            spare.

    Example, the speeds of Table 1; of Table 4 (T5-XXL with T5-small, base and large, translation,
    temperature 0); of Corollary 3.9 (gamma = 1: (1 + alpha) / (1 + c)); and of a drafter without
    cost:
        >>> improvement([0.6, 0.7, 0.8, 0.8, 0.9, 0.9], [2, 3, 2, 5, 2, 10], 0.0).round(2).tolist()
        [1.96, 2.53, 2.44, 3.69, 2.71, 6.86]
        >>> improvement([0.75, 0.80, 0.82], 7, [0.02, 0.04, 0.11]).round(1).tolist()
        [3.2, 3.3, 2.5]
        >>> round(float(improvement(0.6, 1, 0.25)), 2)
        1.28
        >>> improvement([0.5, 0.75], np.inf, 0.0).round(2).tolist()
        [2.0, 4.0]
    """
    # infinite where all draft tokens are right and free, and so are checks
    with np.errstate(divide="ignore"):
        return 1 / _per_token(alpha, gamma, _checked(c, "c"), _checked(v, "v"))


def operations(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> np.ndarray:
    """Computes operations over those of plain decoding, Theorem 3.11: (gamma c_hat + gamma + 1) /
    expected_tokens.

    Args:
        c_hat: operations per token of the drafter over those of the target.

    Example, the operations of Table 1:
        >>> operations([0.6, 0.7, 0.8, 0.8, 0.9, 0.9], [2, 3, 2, 5, 2, 10], 0.0).round(2).tolist()
        [1.53, 1.58, 1.23, 1.63, 1.11, 1.6]
    """
    return _per_token(alpha, gamma, _checked(c_hat, "c_hat") + 1, np.ones(()))


def memory_accesses(alpha: ArrayLike, gamma: ArrayLike, c_bytes: ArrayLike = 0.0) -> np.ndarray:
    """Computes bytes read over those of plain decoding, section 3.4: (gamma c_bytes + 1) /
    expected_tokens.

    A round reads the target's weights and caches once, however many tokens it yields. So the
    target's own reads (c_bytes = 0) shrink by the factor of Equation 1.

    Args:
        c_bytes: bytes that a pass of the drafter reads over those of the target.

    Example, the rows of Table 1, and the last one with a drafter of a fiftieth of the target's
    size:
        >>> memory_accesses([0.6, 0.7, 0.8, 0.8, 0.9, 0.9], [2, 3, 2, 5, 2, 10]).round(2).tolist()
        [0.51, 0.39, 0.41, 0.27, 0.37, 0.15]
        >>> round(float(memory_accesses(0.9, 10, 0.02)), 2)
        0.17
    """
    return _per_token(alpha, gamma, _checked(c_bytes, "c_bytes"), np.ones(()))


def oracle_improvement(alpha: ArrayLike, c: ArrayLike, v: ArrayLike = 1.0) -> np.ndarray:
    """Computes the speed of an oracle for gamma, the bound of section 3.5: 1 / (alpha c + (1 -
    alpha) v).

    The oracle knows how many draft tokens will be accepted and drafts as many: alpha / (1 - alpha)
    on average, for 1 / (1 - alpha) tokens a round. No way to vary gamma is faster, as long as the
    target verifies each draft. Where even this is slower than plain decoding (c above 1), the
    oracle decodes plainly.

    Args:
        v: the verify pass, in one-token passes of the target, whatever its length. Where each
            further token costs the same, add that to c instead.

    Example, and the gain over the best fixed gamma, "up to 60%" in the paper:
        >>> oracle = oracle_improvement([0.7, 0.8, 0.9], [0.02, 0.05, 0.1])
        >>> oracle.round(2).tolist()
        [3.18, 4.17, 5.26]
        >>> (oracle / improvement([0.7, 0.8, 0.9], [8, 8, 10], [0.02, 0.05, 0.1]) - 1).round(
        ...     2
        ... ).tolist()
        [0.15, 0.35, 0.53]
    """
    alpha = _checked(alpha, "alpha", 1.0)
    c = _checked(c, "c")
    v = _checked(v, "v")
    with np.errstate(divide="ignore"):  # infinite where all draft tokens are right and free
        return np.maximum(1.0, 1 / (alpha * c + (1 - alpha) * v))[()]


def optimal_gamma(
    alpha: ArrayLike, c: ArrayLike, v: VerifyCost = 1.0, most: int | None = None
) -> np.ndarray:
    """Finds the gamma that maximises `improvement` (section 3.5, Figure 3); 0, plain decoding,
    where none improves.

    Args:
        v: cost of the verify pass: a function of gamma, an array with v(gamma) at index gamma, or a
            number. Its value at gamma = 0 is ignored: that is a one-token pass, which costs 1.
        most: the largest gamma to try; 64, or the last of the array `v`, by default.

    Returns:
        Integers of the broadcast shape of alpha and c; the smaller of two that are equally good.

    Example, a drafter at a fiftieth of the target's cost, then the same on hardware with no compute
    to spare:
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


def break_even(c: float, v: VerifyCost = 1.0) -> float:
    """Finds the alpha above which some gamma improves on plain decoding; infinite if not even alpha
    = 1 does.

    Where v = 1 this is c itself, Corollary 3.9.

    Example, with compute to spare, with little, and with none:
        >>> [round(break_even(0.05, lambda gamma, s=s: 1 + s * gamma), 3) for s in (0.0, 0.2, 1.0)]
        [0.05, 0.25, inf]
    """
    if optimal_gamma(1.0, c, v) == 0:
        return float("inf")
    # some gamma improves at `high`; it then does at every larger alpha
    low = 0.0
    high = 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if optimal_gamma(middle, c, v) > 0 else (middle, high)
    return high


def obstacles(alpha: float, c: float, v: VerifyCost = 1.0) -> tuple[str, ...]:
    """Names what keeps every gamma from improving on plain decoding; nothing, if one does.

    Speculation loses in three regimes. Each is named if mending it alone would make some gamma
    improve:

    - "low alpha": draft tokens are rarely right (mended: alpha = 1).
    - "expensive draft": the drafter takes too long (mended: c = 0).
    - "no spare compute": the hardware is busy with the tokens it has, as at large batches (mended:
      v = 1).

    Returns:
        The regimes. If mending a single one is not enough, all that are not perfect.

    Example:
        >>> (
        ...     obstacles(0.75, 0.02),
        ...     obstacles(0.05, 0.1),
        ...     obstacles(0.6, 0.1, v=lambda gamma: 1 + gamma),
        ... )
        ((), ('low alpha', 'expensive draft'), ('no spare compute',))
    """
    if optimal_gamma(alpha, c, v) > 0:
        return ()
    largest = _most(v, None)
    costs = _verify_costs(v, np.arange(largest + 1))
    mended: dict[str, tuple[float, float, VerifyCost]] = {
        "low alpha": (1.0, c, costs),
        "expensive draft": (alpha, 0.0, costs),
        "no spare compute": (alpha, c, 1.0),
    }
    enough = tuple(name for name, numbers in mended.items() if optimal_gamma(*numbers, largest) > 0)
    imperfect = {
        "low alpha": alpha < 1,
        "expensive draft": c > 0,
        "no spare compute": bool((costs > 1).any()),
    }
    return enough or tuple(name for name, is_imperfect in imperfect.items() if is_imperfect)


def independent_survival(alpha: float, count: int, gamma: int) -> Float[np.ndarray, "T G"]:
    """Computes how probably 1 .. G draft tokens are accepted, if each is with probability alpha, as
    Equation 1 assumes.

    Draft tokens after the end of the `count` tokens are not emitted.

    >>> independent_survival(0.5, 3, 2).tolist()
    [[0.5, 0.25], [0.5, 0.25], [0.5, 0.0]]
    >>> [
    ...     round(n / expected_rounds(independent_survival(0.8, n, 3)), 2) for n in (10, 1000)
    ... ]  # Equation 1 promises 2.95
    [2.62, 2.95]
    """
    draft_token = np.arange(1, gamma + 1)
    tokens_left = count - np.arange(count)[:, None]
    return np.where(draft_token <= tokens_left, float(alpha) ** draft_token, 0.0)


def independent_tokens(alpha: float, counts: Int[np.ndarray, " rows"], gamma: int) -> float:
    """Computes tokens per round where draft tokens are accepted with probability alpha, in texts of
    `counts` tokens.

    Less than Equation 1 gives, since last rounds are cut short; it is what
    `replay.tokens_per_round` would be if right draft tokens did not cluster. A text's first token
    takes no round. NaN of texts that have no other.

    >>> round(independent_tokens(0.8, np.array([11, 11]), 3), 2)  # Equation 1 promises 2.95
    2.62
    """
    later, texts = np.unique(counts[counts > 1] - 1, return_counts=True)
    if not len(later):
        return float("nan")
    rounds = np.array(
        [expected_rounds(independent_survival(alpha, count, gamma)) for count in later.tolist()]
    )
    return float(later @ texts / (rounds @ texts))


def expected_rounds(survives: Float[np.ndarray, "T G"]) -> float:
    """Computes how many rounds a text of T tokens takes, if one from token t accepts k or more with
    survives[t, k-1].

    >>> expected_rounds(
    ...     np.array([[0.5], [0.5], [0.0]])
    ... )  # the second round begins at the second token, or the third
    2.25
    """
    count, gamma = survives.shape
    # rounds from token t on; none after the end
    exactly = exact_counts(survives)
    rounds = np.zeros(count + gamma + 1)
    for t in reversed(range(count)):
        rounds[t] = 1 + exactly[t] @ rounds[t + 1 : t + gamma + 2]
    return float(rounds[0])


def exact_counts(survives: Float[np.ndarray, "T G"]) -> Float[np.ndarray, "T G+1"]:
    """Computes how probably a round accepts exactly 0 .. G draft tokens, from how probably 1 .. G
    or more.

    >>> exact_counts(np.array([[0.5, 0.2]])).round(1).tolist()
    [[0.5, 0.3, 0.2]]
    """
    return -np.diff(np.pad(survives, ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0))), axis=1)


def _most(v: VerifyCost, largest: int | None) -> int:
    """Returns the largest gamma to try, which an array v has an entry for."""
    last = None
    if not (callable(v) or np.ndim(v) == 0):
        last = np.size(v) - 1
    if largest is None:
        largest = MOST if last is None else last
    if largest < 0 or (last is not None and last < largest):
        bound = ""
        if last is not None:
            bound = f" (v has entries up to gamma {last})"
        raise ValueError(f"most is {largest}: expected 0 or more, and a v for each gamma{bound}")
    return largest


def _verify_costs(v: VerifyCost, gammas: np.ndarray) -> np.ndarray:
    if callable(v):
        costs = np.array([1.0, *(float(v(int(gamma))) for gamma in gammas[1:])])
    elif np.ndim(v) == 0:
        costs = np.full(gammas.shape, v, np.float64)
    else:
        costs = np.array(v, np.float64)[: len(gammas)]
    costs[0] = 1.0
    return costs


def _per_token(
    alpha: ArrayLike, gamma: ArrayLike, per_draft: np.ndarray, per_round: np.ndarray
) -> np.ndarray:
    """Computes the cost of a token from those of a draft token and of a round; of an infinite gamma
    the limit.
    """
    tokens = expected_tokens(alpha, gamma)
    gamma = np.asarray(gamma, np.float64)
    with np.errstate(invalid="ignore"):  # both cases are filled in
        cost = np.where(per_draft == 0, per_round, gamma * per_draft + per_round) / tokens
    return np.where(np.isinf(tokens), per_draft, cost)[()]


def _checked(value: ArrayLike, name: str, largest: float = np.inf) -> np.ndarray:
    array = np.asarray(value, np.float64)
    if not np.all((array >= 0) & (array <= largest)):
        if largest == np.inf:
            expected = "0 or more"
        else:
            expected = f"0 to {largest:g}"
        raise ValueError(f"{name} is {value!r}: expected {expected}")
    return array
