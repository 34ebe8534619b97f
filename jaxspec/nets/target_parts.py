"""What drafters' networks have to do with their targets: their vocabulary, and what they take of them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.base import Shared


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


def zeros(dim: int, vocab: int) -> Shared:
    """An embedding and a head of zeros, for initialisation, which needs shapes only."""

    def embed(tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        return jnp.zeros((*tokens.shape, dim))

    def logits(features: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        return jnp.zeros((*features.shape[:2], vocab))

    return Shared(embed, logits)
