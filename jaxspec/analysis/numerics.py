"""The places where speculative and plain greedy text differ, and how near a tie it was.

A pass over several tokens rounds in another way than several passes over one token, so greedy texts
can differ where the two best tokens are (nearly) equally likely. A difference anywhere else is an
error. float32 texts should not differ. bfloat16 texts do, and the margin tells whether it was a
near tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import token_rows
from jaxspec.decode import batches
from jaxspec.decode.generate import complete
from jaxspec.decode.request import Prepared


class Mismatch(NamedTuple):
    """The first new token that differs between two texts of a prompt."""

    row: int  # the prompt
    position: int  # the new token, counted from 0
    # these two: the token that each has there
    plain: int
    speculative: int
    # the logit of plain decoding's token minus that of the other, in plain decoding's own pass
    # (nats)
    margin: float
    # by how much the largest logit there exceeds the second largest (nats): the same, unless the
    # other token is not even the second best
    top_two_margin: float


class Summary(NamedTuple):
    """The greedy texts of some prompts beside plain decoding's."""

    # these two: how many there are, and how many texts are the same
    prompts: int
    same: int
    # the mismatch that is earliest in its text, of the first prompt if there are several
    first: Mismatch | None
    largest_top_two_margin: float | None  # nats; None if all texts are the same
    mismatches: tuple[Mismatch, ...]  # one for each other text


def mismatches(prepared: Prepared) -> list[Mismatch]:
    """Decodes with and without the drafter and compares; an empty list means identical texts.

    Args:
        prepared: greedy, with a drafter; its prompts are decoded as one batch.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> mismatches(prepared_table(max_new_tokens=12))
        []
    """
    outs = [complete(prepared.plain()), complete(prepared)]
    texts = (
        [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)] for out in outs
    )
    differences = []
    for row, (plain, speculative) in enumerate(zip(*texts, strict=True)):
        index = first_difference(plain, speculative)
        if index is not None and index < min(len(plain), len(speculative)):
            tokens = plain[index], speculative[index]
            margins = _margins(batches.take(prepared, [row]), plain[:index], *tokens)
            differences.append(Mismatch(row, index, *tokens, *margins))
    return differences


def summary(prepared: Prepared) -> Summary:
    """Decodes with and without the drafter as `mismatches` does, and sums up."""
    differences = mismatches(prepared)
    prompts = len(prepared.prompt.length)
    first = min(differences, key=lambda mismatch: (mismatch.position, mismatch.row), default=None)
    largest = max((mismatch.top_two_margin for mismatch in differences), default=None)
    return Summary(prompts, prompts - len(differences), first, largest, tuple(differences))


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Finds where two texts differ: at the shorter one's end if it is the beginning of the other;
    None if nowhere.

    >>> (
    ...     first_difference([1, 2, 3], [1, 4]),
    ...     first_difference([1], [1, 2]),
    ...     first_difference([1], [1]),
    ... )
    (1, 1, None)
    """
    if list(first) == list(second):
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _margins(
    prepared: Prepared, before: Sequence[int], plain: int, differing: int
) -> tuple[float, float]:
    """Computes how far two logits after `before` lie apart, and the top two; fed one by one, as
    plain decoding does.
    """
    target = prepared.target
    prompt = prepared.prompt
    prefill = jax.jit(target.lm.prefill)
    extend = jax.jit(target.lm.extend)
    room = token_rows.room(target.lm, prompt, token_rows.bucket(len(before) + 1), nodes=0)
    forward, cache = prefill(target.params, prompt, room)
    for token in before:
        forward, cache = extend(target.params, cache, jnp.full((1, 1), token, jnp.int32))
    logits = np.asarray(forward.logits[0, -1])
    second, largest = np.partition(logits, -2)[-2:]
    return float(logits[plain] - logits[differing]), float(largest - second)
