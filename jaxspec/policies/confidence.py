"""Stop drafting where the drafter is no longer sure."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.base import Law, Params, Policy
from jaxspec.policies.common import checked, forgetful, log_probs, unmoved


def confidence(threshold: Any = 0.4) -> Policy:
    """The draft ends behind the first guess whose law gives no token a probability of `threshold`.

    That guess is judged like the others: its pass has been paid for. What ends the draft is the law it was drawn from,
    not its own value, so nothing about the text changes. At temperature 0 the law is the drafter's at temperature 1.
    A drafter without laws (a look-up) goes on to gamma.

    Args:
        threshold: 0 never stops; 1 stops behind the first guess whose law is not certain, so most often behind the
            first of all.

    Raises:
        ValueError: a threshold outside [0, 1].

    Example:
        >>> policy = confidence(0.5)
        >>> signals = jnp.array([[0.9, 0.0, 0.0], [0.3, 0.0, 0.0]])
        >>> policy.go_on(policy.params, (), 0, signals).tolist()
        [True, False]

    Reference: Mamou et al., "Dynamic Speculation Lookahead", arXiv 2405.04304 (who train a classifier to decide, and
    compare it with a threshold); Kim et al., "Speculative Decoding with Big Little Decoder", arXiv 2302.07863.
    """
    return _confidence()._replace(params=checked(threshold, "threshold", 0, 1))


@functools.cache
def _confidence() -> Policy:
    def limit(params: Params, state: Params, gamma: int) -> Int[Array, " B"]:
        del state
        return jnp.full(jnp.shape(params), gamma, jnp.int32)

    def signal(law: Law) -> Float[Array, " B"]:
        return jnp.exp(jnp.max(log_probs(law), axis=-1))

    def go_on(
        params: Float[Array, " B"], state: Params, index: int | Int[Array, ""], signals: Float[Array, "B G"]
    ) -> Bool[Array, " B"]:
        del state
        return jax.lax.dynamic_index_in_dim(signals, index, axis=1, keepdims=False) >= params

    return Policy(forgetful, limit, unmoved, signal, go_on, reads_soft=True)
