"""Typical acceptance (Cai et al., Medusa, arXiv 2401.10774): accept tokens that the target finds
plausible. Inexact.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Distribution, Draft, Keys, Rule, Verdict, tree
from jaxspec.core.checks import number
from jaxspec.rules import common


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    r"""Inexact: accept draft token x if p(x) > min(epsilon, delta exp(-H(p))), where H is the
    entropy; then draw from p.

    An unsure target (large entropy) lets less likely tokens pass. Acceptance is deterministic and
    depends on the draft tokens, so the output leans towards the drafter. Guarantee: given the text
    before it, a token at or below the threshold has a probability of at most p(x). Tokens above the
    threshold have no bound.

    In a tree the longest path of draft tokens that all pass is accepted, as in Medusa; of several,
    the one that the target finds likeliest.

    At temperature 0, where p is certain, the rule is exact match.

    Args:
        epsilon: hard threshold; by default Medusa's.
        delta: factor of the threshold that depends on the entropy; by default Medusa's.

    Returns:
        A rule that does not read `draft.log_probs`.

    Raises:
        ValueError: a threshold that is not in (0, 1].

    Example:
        >>> import jax
        >>> from jaxspec.core import noise
        >>> p = jnp.log(
        ...     jnp.array([[[0.9, 0.1], [0.5, 0.5]]])
        ... )  # the threshold is min(0.5, 0.4 exp(-0.325)) = 0.289
        >>> keys = noise.row_keys(jax.random.key(0), 1)
        >>> for token in (0, 1):
        ...     draft = Draft(jnp.array([[token]]), jnp.array([1]))
        ...     typical(0.5, 0.4).verify(
        ...         keys, jnp.array([3]), draft, Distribution(log_probs=p)
        ...     ).num_accepted.tolist()
        [1]
        [0]
    """
    pairs = ("epsilon", epsilon), ("delta", delta)
    return _typical(
        *(number(value, name, "a number in (0, 1]", above=0, at_most=1) for name, value in pairs)
    )


@functools.lru_cache
def _typical(epsilon: float, delta: float) -> Rule:
    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        assert target.log_probs is not None
        least = thresholds(target.log_probs)
        if draft.parent is None:
            count = common.count_accepted(
                log_prob(target.log_probs[:, :-1], draft.tokens) > least[:, :-1], draft.length
            )
            next_token = common.sample_residual(
                keys, position, common.take_position(target.log_probs, count)
            )
            return common.chain_verdict(draft, count, next_token)
        parent = common.real_parent(draft)
        log_p = common.at_nodes(target.log_probs, draft)
        passes = log_p > jnp.take_along_axis(least, jnp.maximum(parent, 0), axis=1)
        last = likeliest_longest(parent, passes, log_p)
        next_token = common.sample_residual(
            keys, position, common.take_position(target.log_probs, last)
        )
        return common.tree_verdict(parent, *tree.path_to(parent, last), next_token)

    def thresholds(log_p: Float[Array, "B T V"]) -> Float[Array, "B T"]:
        """Computes one position at a time: the entropy of all would take another array of their
        size.
        """
        row_at = functools.partial(jax.lax.dynamic_index_in_dim, log_p, axis=1, keepdims=False)
        positions = jnp.arange(log_p.shape[1], dtype=jnp.int32)
        return jax.lax.map(lambda t: threshold(row_at(t), epsilon, delta), positions).T

    def log_prob(log_p: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
        return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]

    def acceptance_ratio(
        log_p: Float[Array, "B T V"], log_q: Float[Array, "B T V"], tokens: Int[Array, "B T"]
    ):
        """q / p, or nothing."""
        return jnp.where(
            log_prob(log_p, tokens) > thresholds(log_p),
            common.likelihood_ratio(log_p, log_q, tokens),
            0.0,
        )

    name = f"typical({epsilon:g}, {delta:g})"
    return common.rule_of(
        name, verify, verify, exact=False, sources=True, acceptance_ratio=acceptance_ratio
    )


def likeliest_longest(
    parent: Int[Array, "B N"], passes: Bool[Array, "B N"], log_p: Float[Array, "B N"]
) -> Int[Array, " B"]:
    """The fed token at the end of the longest path of nodes that all pass; of such paths, of the
    likeliest.

    >>> parent, passes = jnp.array([[0, 0, 1, 2]]), jnp.array([[True, True, True, True]])
    >>> likeliest_longest(
    ...     parent, passes, jnp.log(jnp.array([[0.5, 0.4, 0.6, 0.8]]))
    ... ).tolist()  # 0.3 and 0.32
    [4]
    """
    reached = tree.reached(parent, passes)
    above = tree.ancestors(tree.fed(parent))[:, 1:, 1:]
    # [B, N, N] over [node, ancestor]: nodes that were not reached add nothing, and are left out by
    # `longest`.
    path_log_prob = jnp.sum(
        jnp.where(above, jnp.where(reached, log_p, 0.0)[:, None, :], 0.0), axis=-1
    )
    depth = jnp.where(reached, jnp.sum(above, axis=-1), 0)
    longest = reached & (depth == jnp.max(depth, axis=1, keepdims=True))
    best = jnp.argmax(jnp.where(longest, path_log_prob, -jnp.inf), axis=1).astype(jnp.int32)
    return jnp.where(jnp.any(reached, axis=1), best + 1, 0)


def threshold(
    log_probs: Float[Array, "*shape V"], epsilon: float, delta: float
) -> Float[Array, "*shape"]:
    """log min(epsilon, delta exp(-H(p))): the threshold for a draft token's log probability.

    >>> round(
    ...     float(jnp.exp(threshold(jnp.log(jnp.array([[[0.5, 0.5]]])), 0.9, 0.3))[0, 0]), 4
    ... )  # 0.3 / 2
    0.15
    """
    return jnp.minimum(math.log(epsilon), math.log(delta) - entropy(log_probs))


def entropy(log_probs: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """H(p) = -sum_x p(x) log p(x) in nats, where tokens of probability 0 count for nothing.

    >>> round(float(entropy(jnp.log(jnp.array([[[0.5, 0.5, 0.0]]])))[0, 0]), 4)
    0.6931
    """
    finite = jnp.maximum(log_probs, jnp.finfo(log_probs.dtype).min)
    # a sum with exp in it is not vectorised on CPU
    return -jnp.einsum("...v,...v->...", jnp.exp(log_probs), finite)
