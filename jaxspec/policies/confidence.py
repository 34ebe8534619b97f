"""Stop drafting where the drafter is no longer sure."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import BoundPolicy, Params, Policy
from jaxspec.policies.common import checked, is_sure, no_update, stateless_init, sureness


def confidence(threshold: Any = 0.4) -> BoundPolicy:
    """The draft ends after the first draft token whose distribution gives no token a probability of
    `threshold`.

    That draft token is judged like the others: its pass has been paid for. The draft ends by a
    token's distribution, not by its value, so the text keeps its distribution. At temperature 0 the
    distribution is the drafter's at temperature 1. A drafter without distributions (a look-up) goes
    on to gamma.

    A drafter may estimate itself how probably a token is accepted, before it draws that token
    (DSpark's confidence head). Then that estimate is compared with the threshold, each by itself:
    servers that multiply them need others.

    Args:
        threshold: 0 never stops; 1 stops after the first draft token whose distribution is not
            certain, so most often after the first of all.

    Raises:
        ValueError: a threshold outside [0, 1].

    Example:
        >>> policy = confidence(0.5)
        >>> confidences = jnp.array([[0.9, 0.0, 0.0], [0.3, 0.0, 0.0]])
        >>> policy.functions.should_continue(policy.params, (), 0, confidences).tolist()
        [True, False]

    Reference: Mamou et al., "Dynamic Speculation Lookahead", arXiv 2405.04304 (a trained
    classifier, compared with a threshold). Kim et al., "Speculative Decoding with Big Little
    Decoder", arXiv 2302.07863.
    """
    return BoundPolicy(_confidence(), checked(threshold, "threshold", 0, 1), name="confidence")


@functools.lru_cache
def _confidence() -> Policy:
    def max_draft(
        params: Params, state: Params, gamma: int, remaining: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return jnp.full(jnp.shape(params), gamma, jnp.int32)

    def should_continue(
        params: Float[Array, " B"],
        state: Params,
        index: int | Int[Array, ""],
        confidences: Float[Array, "B G"],
    ) -> Bool[Array, " B"]:
        return is_sure(confidences, index, params)

    return Policy(stateless_init, max_draft, no_update, sureness, should_continue)
