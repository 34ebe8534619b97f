"""The training of a model that drafts several tokens in one pass, each at a mask token
(`drafters.parallel`).

PARD (An et al., arXiv 2504.18583) fine-tunes a small model so. The model reads a text and, after
some of its places, a branch of mask tokens, all in one pass over a token tree. A mask reads the
text up to its place and the masks before it, as in decoding. Each place of the text learns its next
token, and each mask the token that it stands before. Spec-Drafter (Xia et al., arXiv 2203.16487)
learns the same with a separate vector for each draft token in place of one mask token; here the
positions tell masks apart.

Shapes: B batch, T places of a text that have a next token, A places with masks, K draft tokens, V
vocabulary. N nodes: T of the text, and A (K - 1) masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core import Model, Prompt, token_rows
from jaxspec.nets import net_of
from jaxspec.training.data import TrainingBatch
from jaxspec.training.divergences import Divergence
from jaxspec.training.losses import (
    LossFunction,
    logits_and_labels,
    negative_log_likelihood,
    over_real,
    rows_of,
)
from jaxspec.training.recipes import Masks


class MaskedTree(NamedTuple):
    """Texts with branches of masks, as a token tree."""

    nodes: Int[Array, "B N"]
    parent: Int[Array, " N"]  # the node before each node; -1: what the cache holds
    place: Int[Array, " N"]  # the place whose next token a node learns; T or more: it has none
    depth: Int[np.ndarray, " N"]  # the number of the draft token that a node makes, from 0


def tree(tokens: Int[Array, "B T"], options: Masks) -> MaskedTree:
    """Puts masks after every `stride`-th token; the first of these differs from batch to batch.

    >>> masked = tree(jnp.array([[5, 6, 7]]), Masks(token=1, draft=3, stride=3))
    >>> masked.nodes.tolist(), masked.parent.tolist(), masked.place.tolist()
    ([[5, 6, 7, 1, 1]], [-1, 0, 1, 0, 3], [0, 1, 2, 1, 2])
    """
    rows, size = tokens.shape
    stride = min(options.stride, size)
    masks = options.draft - 1
    # It depends on the batch alone, so that a run resumes exactly.
    offset = jnp.sum(tokens, dtype=jnp.int32) % stride
    begins = offset + stride * jnp.arange(size // stride, dtype=jnp.int32)
    masks_at = size + jnp.arange(begins.shape[0] * masks, dtype=jnp.int32).reshape(-1, masks)
    # The first mask of a branch follows the token at its place, each other the mask before it.
    before = jnp.concatenate([begins[:, None], masks_at], axis=1)[:, :-1]
    predicted = begins[:, None] + 1 + jnp.arange(masks, dtype=jnp.int32)[None, :]
    text = jnp.arange(size, dtype=jnp.int32)
    filled = jnp.full((rows, masks_at.size), options.token, tokens.dtype)
    return MaskedTree(
        jnp.concatenate([tokens, filled], axis=1),
        jnp.concatenate([text - 1, before.reshape(-1)]),
        jnp.concatenate([text, predicted.reshape(-1)]),
        np.concatenate([np.zeros(size, int), np.tile(1 + np.arange(masks), begins.shape[0])]),
    )


def loss(
    config: Any, options: Masks, teacher: Model | None, weight: float, divergence: Divergence
) -> LossFunction:
    """Returns a loss: of every place's next token, and of the tokens that masks stand before, by
    `masks.decay`.

    Args:
        config: the configuration of the network that learns.
        teacher: the model whose distributions are learnt, with this weight; the rest is the
            likelihood of the texts.
    """
    lm = net_of(config).language_model(config)
    # tokens that a row begins with; the tree follows these
    first = max(1, len(lm.limits.first_tokens))

    def student_logits(
        params: Any, batch: TrainingBatch, masked: MaskedTree
    ) -> Float[Array, "B N V"]:
        rows = masked.nodes.shape[0]
        begin = Prompt(jnp.asarray(batch.target)[:, :1], jnp.ones(rows, jnp.int32))
        if lm.limits.start_token is not None:
            begin = Prompt(
                jnp.asarray(batch.source), jnp.maximum(jnp.asarray(batch.source_length), 1)
            )
        count = masked.nodes.shape[1]
        _, cache = lm.prefill(params, begin, token_rows.room(lm, begin, count, count))
        parent = jnp.broadcast_to(masked.parent, masked.nodes.shape)
        return lm.extend(params, cache, masked.nodes, parent)[0].logits

    def run(params: Any, batch: TrainingBatch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        rows = rows_of(config, batch)
        tokens = rows.inputs[-1][:, first:]
        labels = rows.labels[:, first:]
        real = rows.real[:, first:]
        masked = tree(tokens, options)
        logits = student_logits(params, batch, masked)
        size = tokens.shape[1]
        learnt_at = jnp.minimum(masked.place, size - 1)
        decay = jnp.asarray(options.decay**masked.depth, jnp.float32)
        counted = jnp.where(masked.place[None, :] < size, real[:, learnt_at], 0.0) * decay[None, :]
        per_token = (1 - weight) * negative_log_likelihood(logits, labels[:, learnt_at])
        if teacher is not None and weight:
            p_logits, _, _ = logits_and_labels(teacher.config)(teacher.params, batch)
            log_p = jax.nn.log_softmax(jax.lax.stop_gradient(p_logits))[:, first:][:, learnt_at]
            per_token += weight * divergence(log_p, jax.nn.log_softmax(logits), counted)
        return over_real(per_token, counted)

    return run
