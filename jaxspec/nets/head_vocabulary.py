"""Logits over a drafter's own vocabulary, a part of its target's, as logits over the target's."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def in_target_vocabulary(
    logits: Float[Array, "B T W"], vocabulary: Int[Array, " W"], size: int
) -> Float[Array, "B T V"]:
    """-inf for ids that the drafter does not have.

    Args:
        logits: of the drafter's ids.
        vocabulary: the target's id of each of them.
        size: of the target's vocabulary.

    >>> in_target_vocabulary(jnp.array([[[1.0, 2.0]]]), jnp.array([0, 3]), 4).tolist()
    [[[1.0, -inf, -inf, 2.0]]]
    """
    wide = jnp.full((*logits.shape[:2], size), -jnp.inf, logits.dtype)
    return wide.at[:, :, vocabulary].set(logits)
