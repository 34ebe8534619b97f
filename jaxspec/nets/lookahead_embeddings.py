"""PaSS: vectors that, fed after a text, make the model itself predict tokens further ahead.

Monea, Joulin, Grave, arXiv 2311.13581. Only these vectors are trained; the model stays as it is.

Shapes: B batch, N vectors, M model dimension, C draft tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.base import LanguageModel, LookAheadEmbeddings, Needs, Params


@functools.cache
def head(lm: LanguageModel, count: int) -> LookAheadEmbeddings:
    """Look-ahead vectors of a network of `jaxspec.nets` as a pure function, for `drafters.lookahead_embeddings`.

    Args:
        lm: of the target.
        count: how many vectors there are.

    Raises:
        ValueError: the model has no embedding to which vectors could be added.
    """
    if lm.embed is None:
        raise ValueError("the target's LanguageModel has no embed: expected a network of jaxspec.nets")
    size = lm.vocab_size

    def logits(
        target_params: Params, params: Float[Array, "N M"], cache: Any, last: Int[Array, " B"], count: int
    ) -> tuple[Float[Array, "B C V"], Any]:
        ahead = jnp.broadcast_to(size + jnp.arange(count - 1, dtype=last.dtype)[None], (last.shape[0], count - 1))
        tokens = jnp.concatenate([last[:, None], ahead], axis=1)
        with_vectors = {**target_params, "embedding": {**target_params["embedding"], "more": params}}
        forward, cache = lm.extend(with_vectors, cache, tokens)
        return forward.logits, cache

    return LookAheadEmbeddings(logits, count + 1, Needs(size, lm.feature_size))


def init(dim: int, count: int, key: Key[Array, ""]) -> Float[Array, "N M"]:
    """Random vectors, of the size that embeddings begin with."""
    return 0.02 * jax.random.normal(key, (count, dim))
