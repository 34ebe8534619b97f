"""PaSS: vectors that, fed after a text, make the model itself predict tokens further ahead.

Monea, Joulin, Grave, arXiv 2311.13581. Only these vectors are trained; the model stays as it is.

Shapes: B batch, R tokens of a row, S = R - 1, A places where drafts begin, N vectors, M model dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.base import Extend, Forward, LookAheadEmbeddings, Needs, Params, Shared


@dataclasses.dataclass(frozen=True)
class LookAheadConfig:
    """How many vectors, for whom.

    Attributes:
        vocab_size, dim: the target's vocabulary, and the width of its features.
        vectors: how many. Vector i predicts the token after i + 1 draft tokens: the first one is the target's own.
        dtype: of the target's computation.
    """

    vocab_size: int
    dim: int
    vectors: int
    dtype: str = "float32"

    def __post_init__(self):
        if self.vectors < 1:
            raise ValueError(f"vectors is {self.vectors}: expected at least 1")


@functools.lru_cache
def head(config: LookAheadConfig) -> LookAheadEmbeddings:
    """Look-ahead vectors as pure functions, for `drafters.lookahead_embeddings`."""

    def extend(
        params: Params, run: Extend, target: Params, cache: Any, tokens: Array, parent: Array | None
    ) -> tuple[Forward, Any]:
        embedding = {**target["embedding"], "more": params["vectors"]}
        return run({**target, "embedding": embedding}, cache, tokens, parent)

    def logits(params: Params, shared: Shared, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        return shared.logits(hidden)

    needs = Needs(config.vocab_size, config.dim, embedding=True, head=True)
    return LookAheadEmbeddings(extend, logits, config.vectors + 1, needs)


def init(config: LookAheadConfig, key: Key[Array, ""]) -> Params:
    """Random vectors, of the size that embeddings begin with."""
    return {"vectors": 0.02 * jax.random.normal(key, (config.vectors, config.dim))}


def features(
    config: LookAheadConfig,
    params: Params,
    read: Callable[[Callable[..., Any], Int[Array, "B n"], Int[Array, "B n"]], Forward],
    tokens: Int[Array, "B S"],
    place: Int[Array, " A"],
    depths: int,
) -> Float[Array, "B A depths M"]:
    """The target's features at the token after each place, and at the vectors after that, in one pass over a tree.

    Args:
        config, params: of the vectors.
        read: (extend, nodes, parent) -> the target's pass over the nodes of a tree after the first token of each row.
        tokens: of the rows, after the first one.
        place: positions before the tokens that drafts begin after.
        depths: draft tokens: one more than vectors that are fed.
    """
    size, count = tokens.shape[1], depths - 1
    fed = jnp.tile(config.vocab_size + jnp.arange(count, dtype=tokens.dtype), place.shape[0])
    nodes = jnp.concatenate([tokens, jnp.broadcast_to(fed, (tokens.shape[0], fed.shape[0]))], axis=1)
    vector = size + jnp.arange(fed.shape[0], dtype=jnp.int32).reshape(-1, count)
    index = jnp.concatenate([place[:, None].astype(jnp.int32), vector], axis=1)
    parent = jnp.concatenate([jnp.arange(-1, size - 1, dtype=jnp.int32), index[:, :-1].reshape(-1)])
    forward = read(functools.partial(head(config).extend, params), nodes, jnp.broadcast_to(parent, nodes.shape))
    return forward.features[:, index]
