"""What a drafter that reads hidden states drafts at every position of a text at once: one function for each kind.

A draft that begins after token s + 1 has read the target's hidden states up to position s. Its draft token number k
(from 0) is to have the target's distribution after token s + 1 + k; the text's tokens stand for the draft tokens before
it.

Shapes: B batch, S positions of a row, A places where drafts begin, K draft tokens, D hidden states, N drafts,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import published
from jaxspec.base import BlockHead, Forward, ParallelHeads, Params, Shared
from jaxspec.draft_heads import KINDS, kind_of
from jaxspec.nets import block, lookahead_embeddings
from jaxspec.nets.block import BlockConfig
from jaxspec.nets.heads import HeadsConfig
from jaxspec.nets.lookahead_embeddings import LookAheadConfig


def longest(config: Any) -> int | None:
    """Most draft tokens of a drafter; None: it goes on as long as it is asked to."""
    if isinstance(config, HeadsConfig):
        return config.heads
    if isinstance(config, LookAheadConfig):
        return config.vectors + 1
    return config.count if isinstance(config, BlockConfig) else None


def hidden_states(
    config: Any,
    params: Params,
    shared: Shared,
    forward: Forward,
    tokens: Int[Array, "B S+K-1"],
    place: Int[Array, " A"],
    depths: int,
    read: Callable[..., Forward],
) -> Float[Array, "B A _ D"]:
    """What logits are made of, of each draft token that begins at a place; one vector for all where they share it.

    Args:
        config, params, shared: of the drafter, and what it takes of its target.
        forward: of the target, at positions 0 to S - 1.
        tokens: token s is the one after position s.
        place: last positions whose hidden states drafts have read.
        depths: K.
        read: the target's pass over a tree, as `nets.lookahead_embeddings.features` takes it.
    """
    if isinstance(config, HeadsConfig):
        return forward.features[:, place][:, :, None]
    if isinstance(config, BlockConfig):
        made = block.blocks(config, params, shared, forward, tokens[:, place], place + 1)
        return made[:, :, : config.lead + depths]
    if isinstance(config, LookAheadConfig):
        size = forward.features.shape[1]
        return lookahead_embeddings.features(config, params, read, tokens[:, :size], place, depths)
    if type(config) in {kind.config for kind in KINDS}:
        return kind_of(config).training.hidden_states(config, params, shared, forward, tokens, place, depths, read)
    return published.net_of(config).unroll_of(config)(params, shared, forward, tokens, depths)[:, place]


def logits(
    config: Any,
    params: Params,
    shared: Shared,
    hidden: Float[Array, "N _ D"],
    ahead: Int[Array, "N K"],
    depth: int,
    memory: Float[Array, "N R"] | None,
) -> tuple[Float[Array, "N V"], Float[Array, "N R"] | None]:
    """Logits of the draft tokens number `depth`, in the target's vocabulary, and the memory for the next ones.

    Args:
        config, params, shared: as of `hidden_states`.
        hidden: what that gave.
        ahead: the token that each draft begins after, and those after it.
        depth: which draft tokens.
        memory: what this returned for the ones before them; None for the first.
    """
    head = published.net_of(config).head(config)
    if isinstance(head, ParallelHeads):
        return head.logits(params, shared, depth, hidden[:, 0], ahead[:, : depth + 1]), None
    lead = config.lead if isinstance(config, BlockConfig) else 0
    own = head.logits(params, shared, hidden[:, lead + depth : lead + depth + 1])[:, 0]
    if not isinstance(head, BlockHead) or head.correct is None:
        return own, None
    if memory is None:
        memory = jnp.zeros((hidden.shape[0], head.memory), hidden.dtype)
        for i in range(lead):
            _, memory = head.correct(params, ahead[:, 0], hidden[:, i], memory)
    added, memory = head.correct(params, ahead[:, depth], hidden[:, lead + depth], memory)
    return own + added, memory
