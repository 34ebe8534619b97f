"""Logits processors that change some tokens' logits: bias and bans, and penalties for tokens that
were generated before. Their counts of tokens are carried from round to round.

F is the number of draft tokens of a pass; other axis letters as in `jaxspec.core`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import Preceding, Processor, Prompt
from jaxspec.sampling.samplers import SamplingParams

Adjust = Callable[[Float[Array, "B T N"], Int[Array, "B T N"]], Float[Array, "B T N"]]


def logit_bias(
    sampling_params: SamplingParams, logits: Float[Array, "B T V"], preceding: Preceding | None
) -> Float[Array, "B T V"]:
    """Adds each row's bias; -inf bans a token.

    >>> sampling_params = SamplingParams(jnp.ones(1), bias=jnp.array([[0.0, 2.0, -jnp.inf]]))
    >>> logit_bias(sampling_params, jnp.ones((1, 1, 3)), None).tolist()
    [[[1.0, 3.0, -inf]]]
    """
    assert sampling_params.bias is not None
    return logits + sampling_params.bias[:, None, :]


def _penalise_repetition(
    sampling_params: SamplingParams, logits: Float[Array, "B T V"], preceding: Preceding | None
) -> Float[Array, "B T V"]:
    assert sampling_params.repetition is not None
    penalty = sampling_params.repetition[:, None, None]

    def adjust(logits, count):
        penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(count > 0, penalised, logits)

    return _by_count(logits, preceding, adjust)


def _penalise_presence_and_frequency(
    sampling_params: SamplingParams, logits: Float[Array, "B T V"], preceding: Preceding | None
) -> Float[Array, "B T V"]:
    presence = sampling_params.presence
    frequency = sampling_params.frequency

    def adjust(logits, count):
        if presence is not None:
            logits = logits - jnp.where(count > 0, presence[:, None, None], 0.0)
        if frequency is None:
            return logits
        return logits - frequency[:, None, None] * count.astype(jnp.float32)

    return _by_count(logits, preceding, adjust)


def count_tokens(row: Prompt, start: Int[Array, " B"], vocab: int) -> Int[Array, "B V"]:
    """Counts how often each token occurs in each row from `start` on; padding does not count.

    >>> count_tokens(Prompt(jnp.array([[0, 2, 2, 1]]), jnp.array([3])), jnp.array([1]), 3).tolist()
    [[0, 0, 2]]
    """
    batch, capacity = row.tokens.shape
    slot = jnp.arange(capacity, dtype=row.length.dtype)[None, :]
    real = (slot >= start[:, None]) & (slot < row.length[:, None])
    counts = jnp.zeros((batch, vocab), jnp.int32)
    return counts.at[jnp.arange(batch)[:, None], row.tokens].add(
        real.astype(jnp.int32), mode="drop"
    )


def _count_row(values: Any, row: Prompt, start: Int[Array, " B"], vocab: int) -> Int[Array, "B V"]:
    return count_tokens(row, jnp.zeros_like(start), vocab)


def _count_new(values: Any, row: Prompt, start: Int[Array, " B"], vocab: int) -> Int[Array, "B V"]:
    return count_tokens(row, start, vocab)


def _count_one_more(
    values: Any, counts: Int[Array, "B V"], token: Int[Array, " B"]
) -> Int[Array, "B V"]:
    """Counts a token of each row; -1 is skipped.

    >>> _count_one_more(None, jnp.zeros((2, 3), jnp.int32), jnp.array([2, -1])).tolist()
    [[0, 0, 1], [0, 0, 0]]
    """
    rows = jnp.arange(counts.shape[0])
    return counts.at[rows, jnp.maximum(token, 0)].add(
        (token >= 0).astype(counts.dtype), mode="drop"
    )


def _by_count(
    logits: Float[Array, "B T V"], preceding: Preceding | None, adjust: Adjust
) -> Float[Array, "B T V"]:
    """Logits adjusted by how often each token precedes each position.

    The counts of the committed row are the same for all positions. A position's own counts differ
    from them only at the F draft tokens, whose logits are overwritten. So no [B, T, V] array of
    counts is made.
    """
    assert preceding is not None
    counts = preceding.memory
    adjusted = adjust(logits, counts[:, None, :])
    draft_tokens = preceding.draft_tokens
    seen = preceding.seen
    if draft_tokens is None or seen is None:
        return adjusted
    same = draft_tokens[:, :, None] == draft_tokens[:, None, :]
    repeats = jnp.sum(seen[:, :, :, None] & same[:, None, :, :], axis=2).astype(jnp.int32)  # B T F
    index = jnp.broadcast_to(draft_tokens[:, None, :], repeats.shape)
    count = jnp.take_along_axis(counts, draft_tokens, axis=1)[:, None, :] + repeats
    patch = adjust(jnp.take_along_axis(logits, index, axis=-1), count)
    return jnp.put_along_axis(adjusted, index, patch, axis=-1, inplace=False)


repetition_penalty = Processor(_penalise_repetition, _count_row, _count_one_more, wide=True)
"""Makes every token that occurs in the row, prompt included, less likely.

Its logit is divided by the penalty if positive and multiplied by it if negative. A decoder-only
model's row begins with the prompt; an encoder-decoder's is what the decoder reads, start token
included, as in transformers.

Reference: Keskar et al., CTRL, arXiv 1909.05858, section 4.1 (for positive logits).
"""

presence_and_frequency_penalties = Processor(
    _penalise_presence_and_frequency, _count_new, _count_one_more, wide=True
)
"""logit - presence [count > 0] - frequency count, where count is how often the token was generated.

The prompt does not count. These are the penalties of OpenAI's API; negative ones make repetition
likelier.
"""

__test__ = {
    "repetition_penalty": """
    >>> preceding = Preceding(Prompt(jnp.array([[0, 1]]), jnp.array([2])), jnp.array([2]))
    >>> sampling_params = SamplingParams(jnp.ones(1), repetition=jnp.array([2.0]))
    >>> repetition_penalty(sampling_params, jnp.array([[[3.0, -3.0, 3.0]]]), preceding).tolist()
    [[[1.5, -6.0, 3.0]]]
    """,
    "presence_and_frequency_penalties": """
    >>> preceding = Preceding(Prompt(jnp.array([[0, 1, 1]]), jnp.array([3])), jnp.array([1]))
    >>> half = jnp.array([0.5])
    >>> sampling_params = SamplingParams(jnp.ones(1), presence=half, frequency=half)
    >>> presence_and_frequency_penalties(sampling_params, jnp.zeros((1, 1, 3)), preceding).tolist()
    [[[0.0, -1.5, 0.0]]]
    """,
}
