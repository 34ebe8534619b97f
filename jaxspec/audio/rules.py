"""The rules of Whisper's text, as a logits processor: suppressed tokens, timestamps."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Preceding, Processor, Prompt, token_rows
from jaxspec.nets.whisper import Speech


class TextState(NamedTuple):
    """The memory of a row."""

    count: Int[Array, " *rows"]  # number of its new tokens
    # these two: whether the last new token is a timestamp, and the token before it; True if none
    last: Bool[Array, " *rows"]
    before: Bool[Array, " *rows"]
    latest: Int[Array, " *rows"]  # its last timestamp, or the id below all timestamps


@functools.lru_cache
def text_rules(speech: Speech, end: int, timestamps: bool) -> Processor:
    """Makes the processor of a model's text.

    With timestamps a text begins with one. They come in pairs, an end and a beginning, or one alone
    before the end of the text, and never go back. If all timestamps together are more probable than
    any other token, a timestamp is generated. The rules match transformers'
    `WhisperTimeStampLogitsProcessor`.

    Args:
        speech: the model's tokens.
        end: the token that ends a text: ids below it are words.
        timestamps: whether the text has timestamps.

    >>> rules = text_rules(Speech(no_timestamps=5, suppressed=(0,)), end=3, timestamps=True)
    >>> preceding = Preceding(Prompt(jnp.array([[4, 6]]), jnp.array([2])), start=jnp.array([1]))
    >>> rules(
    ...     None, jnp.arange(9.0)[None, None], preceding
    ... ).tolist()  # after a timestamp comes no second one
    [[[-inf, 1.0, 2.0, 3.0, 4.0, -inf, -inf, -inf, -inf]]]
    """
    first = None
    if timestamps and speech.no_timestamps is not None:
        first = speech.no_timestamps + 1

    def banned(ids: tuple[int, ...], vocab: int) -> Bool[Array, "1 1 V"]:
        mask = jnp.zeros((vocab,), bool)
        if ids:
            mask = mask.at[jnp.array(ids)].set(True)
        return mask[None, None, :]

    def init(values: Any, row: Prompt, start: Int[Array, " B"], vocab: int) -> TextState:
        count = row.length - start
        empty = jnp.zeros_like(count, bool)
        state = TextState(
            count=jnp.zeros_like(count),
            last=empty,
            before=~empty,
            latest=jnp.full_like(count, (first or 0) - 1),
        )

        def step(index: Int[Array, ""], state: TextState) -> TextState:
            token = token_rows.tokens_at(row.tokens, start + index)
            moved = advance(values, state, token)
            return jax.tree.map(lambda new, old: jnp.where(index < count, new, old), moved, state)

        # At the beginning of a generation no row has new tokens, and the loop takes no step.
        return jax.lax.fori_loop(0, jnp.max(count), step, state)

    def advance(values: Any, state: TextState, token: Int[Array, " *rows"]) -> TextState:
        if first is None:
            is_stamp = jnp.zeros_like(state.last)
        else:
            is_stamp = token >= first
        latest = jnp.where(is_stamp, token, state.latest).astype(state.latest.dtype)
        return TextState(
            count=state.count + 1,
            last=is_stamp,
            before=jnp.where(state.count == 0, True, state.last),
            latest=latest,
        )

    def apply(
        values: Any, logits: Float[Array, "B T V"], preceding: Preceding | None
    ) -> Float[Array, "B T V"]:
        assert preceding is not None
        state = preceding.memory
        ids = jnp.arange(logits.shape[-1])[None, None, :]
        count, last, before, latest = (x[:, :, None] for x in state)  # [B, T, 1]
        out = banned(speech.suppressed, logits.shape[-1])
        out = out | ((count == 0) & banned(speech.suppressed_first, logits.shape[-1]))
        if first is None:
            return jnp.where(out, -jnp.inf, logits)
        stamps = ids >= first
        out = out | (ids == first - 1)
        # After one timestamp comes its pair or the end of the text, after two a word.
        out = out | (last & jnp.where(before, stamps, ids < end))
        # A pair's second timestamp may repeat its first; others are later.
        out = out | (stamps & (ids < latest + jnp.where(last & ~before, 0, 1)))
        # A text begins with a timestamp, at most `latest_start`.
        latest_start = ids.shape[-1]
        if speech.latest_start is not None:
            latest_start = first + speech.latest_start
        out = out | ((count == 0) & (~stamps | (ids > latest_start)))
        logits = jnp.where(out, -jnp.inf, logits)
        # All timestamps together against the most probable other token, [B, T, 1] each.
        together = jax.nn.logsumexp(jnp.where(stamps, logits, -jnp.inf), axis=-1, keepdims=True)
        word = jnp.max(jnp.where(stamps, -jnp.inf, logits), axis=-1, keepdims=True)
        return jnp.where((together > word) & ~stamps, -jnp.inf, logits)

    return Processor(apply, init, advance)
