"""Stages that change some tokens' logits: bias and bans, and penalties for what has been said before.

F is the number of guesses of a pass; the other axis letters are those of `jaxspec.base`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.base import Prefix, Prompt
from jaxspec.warp.controls import Controls

Adjust = Callable[[Float[Array, "B T N"], Int[Array, "B T N"]], Float[Array, "B T N"]]


def logit_bias(controls: Controls, logits: Float[Array, "B T V"], prefix: Prefix | None) -> Float[Array, "B T V"]:
    """A stage: adds each row's bias; -inf bans a token.

    >>> controls = Controls(jnp.ones(1), jnp.ones(1, int), jnp.ones(1), bias=jnp.array([[0.0, 2.0, -jnp.inf]]))
    >>> logit_bias(controls, jnp.ones((1, 1, 3)), None).tolist()
    [[[1.0, 3.0, -inf]]]
    """
    del prefix
    assert controls.bias is not None
    return logits + controls.bias[:, None, :]


def repetition_penalty(
    controls: Controls, logits: Float[Array, "B T V"], prefix: Prefix | None
) -> Float[Array, "B T V"]:
    """A stage: makes every token that occurs in the row, prompt included, less likely.

    Its logit is divided by the penalty if positive and multiplied by it if negative. A decoder-only model's row begins
    with the prompt; an encoder-decoder's is what the decoder reads, start token included, as in transformers.

    >>> prefix = Prefix(Prompt(jnp.array([[0, 1]]), jnp.array([2])), jnp.array([2]))
    >>> controls = Controls(jnp.ones(1), jnp.ones(1, int), jnp.ones(1), repetition=jnp.array([2.0]))
    >>> repetition_penalty(controls, jnp.array([[[3.0, -3.0, 3.0]]]), prefix).tolist()
    [[[1.5, -6.0, 3.0]]]

    Reference: Keskar et al., CTRL, arXiv 1909.05858, section 4.1 (for positive logits).
    """
    assert controls.repetition is not None
    penalty = controls.repetition[:, None, None]

    def adjust(logits, count):
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(count > 0, penalised, logits)

    return _by_count(logits, prefix, generated=False, adjust=adjust)


def presence_and_frequency_penalties(
    controls: Controls, logits: Float[Array, "B T V"], prefix: Prefix | None
) -> Float[Array, "B T V"]:
    """A stage: logit - presence [count > 0] - frequency count, where count is how often the token was generated.

    The prompt does not count. These are the penalties of OpenAI's API; negative ones make repetition likelier.

    >>> prefix = Prefix(Prompt(jnp.array([[0, 1, 1]]), jnp.array([3])), jnp.array([1]))
    >>> half = jnp.array([0.5])
    >>> controls = Controls(jnp.ones(1), jnp.ones(1, int), jnp.ones(1), presence=half, frequency=half)
    >>> presence_and_frequency_penalties(controls, jnp.zeros((1, 1, 3)), prefix).tolist()
    [[[0.0, -1.5, 0.0]]]
    """
    assert controls.presence is not None and controls.frequency is not None
    presence, frequency = controls.presence[:, None, None], controls.frequency[:, None, None]

    def adjust(logits, count):
        return logits - jnp.where(count > 0, presence, 0.0) - frequency * count.astype(jnp.float32)

    return _by_count(logits, prefix, generated=True, adjust=adjust)


def count_tokens(row: Prompt, start: Int[Array, " B"], vocab: int) -> Int[Array, "B V"]:
    """How often each token occurs in each row from `start` on; padding does not count.

    >>> count_tokens(Prompt(jnp.array([[0, 2, 2, 1]]), jnp.array([3])), jnp.array([1]), 3).tolist()
    [[0, 0, 2]]
    """
    batch, capacity = row.tokens.shape
    slot = jnp.arange(capacity, dtype=row.length.dtype)[None, :]
    real = jnp.logical_and(slot >= start[:, None], slot < row.length[:, None])
    counts = jnp.zeros((batch, vocab), jnp.int32)
    return counts.at[jnp.arange(batch)[:, None], row.tokens].add(real.astype(jnp.int32), mode="drop")


def _by_count(
    logits: Float[Array, "B T V"], prefix: Prefix | None, generated: bool, adjust: Adjust
) -> Float[Array, "B T V"]:
    """Logits adjusted by how often each token precedes each position: in the whole row, or among the new tokens.

    The committed row is counted once for all positions. What a position sees beyond it differs at no more than F
    tokens, the guesses, whose logits are written over: there is no [B, T, V] array of counts.
    """
    if prefix is None:
        raise ValueError("a penalty needs to know what precedes each position: call the warp with a prefix")
    start = prefix.start if generated else jnp.zeros_like(prefix.start)
    counts = count_tokens(prefix.row, start, logits.shape[-1])
    adjusted = adjust(logits, counts[:, None, :])
    guesses, seen = prefix.guesses, prefix.seen
    if guesses is None or seen is None:
        return adjusted
    same = guesses[:, :, None] == guesses[:, None, :]
    again = jnp.sum(jnp.logical_and(seen[None, :, :, None], same[:, None, :, :]), axis=2).astype(jnp.int32)  # B T F
    index = jnp.broadcast_to(guesses[:, None, :], again.shape)
    count = jnp.take_along_axis(counts, guesses, axis=1)[:, None, :] + again
    patch = adjust(jnp.take_along_axis(logits, index, axis=-1), count)
    return jnp.put_along_axis(adjusted, index, patch, axis=-1, inplace=False)
