"""Recurrent drafters over whole rows, fed what they made: how EAGLE-3 and MTP modules learn to draft several tokens.

In decoding such a network is fed the target's hidden states up to the last committed token, and its own after that.
Training-time test (Li et al., EAGLE-3, arXiv 2503.01840) does the same at every position of a row at once. At depth k
the network is fed at each position what it made there at depth k - 1, with the token that is k places further on. It
attends to the pairs of depth 0 up to its position, and to those of its own position at the depths after that: to what
it would have fed itself had its draft begun there.

Shapes: B batch, S positions, D hidden states, K key-value heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.base import Forward, Params, Shared
from jaxspec.nets.stack import KeysValues, Layer

Past = tuple[KeysValues, ...]


class Step(Protocol):
    def __call__(
        self,
        params: Params,
        hidden: Float[Array, "B S D"],
        tokens: Int[Array, "B S"],
        position: Int[Array, "1 S"],
        mask: Bool[Array, "1 1 S past"],
        past: Past,
    ) -> tuple[Float[Array, "B S D"], Past]:
        """Feeds a pair at each position; `mask` says which of the keys of `past`, and then of these, it may read.

        Returns the hidden states that are fed next, and all keys and values so far.
        """
        ...


class Unroll(Protocol):
    def __call__(
        self, params: Params, shared: Shared, forward: Forward, tokens: Int[Array, "B S+depths-1"], depths: int
    ) -> Float[Array, "B S depths D"]:
        """The hidden states that logits are made of, at each position and depth.

        Args:
            params, shared: of the network, and what it takes of its target.
            forward: of the target, at S positions.
            tokens: token s is the one after position s.
            depths: draft tokens.
        """
        ...


def with_past(layers: Iterable[Layer], x: Float[Array, "B S D"], past: Past) -> tuple[Float[Array, "B S D"], Past]:
    """Runs layers whose keys and values are put after those of earlier calls."""
    kept: list[KeysValues] = []
    for index, layer in enumerate(layers):
        before = past[index] if past else None

        def update_cache(k, v, before=before):
            return (
                (k, v)
                if before is None
                else tuple(jnp.concatenate(x, axis=2) for x in zip(before, (k, v), strict=True))
            )

        x, keys, values = layer(x, update_cache)
        kept.append((keys, values))
    return x, tuple(kept)


def unrolled(
    step: Step, params: Params, hidden: Float[Array, "B S D"], tokens: Int[Array, "B S+depths-1"], depths: int
) -> Float[Array, "B S depths D"]:
    """Runs `step` for each depth; what a step computed inside is computed again for its gradient.

    Args:
        step: see the protocol.
        params: of the network.
        hidden: what the network makes of the target's hidden states.
        tokens: token s is the one after position s.
        depths: how often.
    """
    size, made, past = hidden.shape[1], [], ()
    place = jnp.arange(size, dtype=jnp.int32)
    own, before = place[:, None] == place[None, :], place[:, None] >= place[None, :]
    for depth in range(depths):
        mask = jnp.concatenate([before, *[own] * depth], axis=1)[None, None]
        at = jax.lax.slice_in_dim(tokens, depth, depth + size, axis=1)
        hidden, past = jax.checkpoint(step)(params, hidden, at, place[None] + depth, mask, past)
        made.append(hidden)
    return jnp.stack(made, axis=2)
