"""Where speculative and plain greedy text part, and how near a tie it was.

A pass over several tokens rounds otherwise than several passes over one, so greedy texts can part where the two best
tokens are (nearly) equally likely. That is no error of the method; parting anywhere else is. In float32 it should not
happen; in bfloat16 it does, and the margin says whether it was a near tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import buffers
from jaxspec.base import Model, Prompt
from jaxspec.decode import Generation, generate


class Divergence(NamedTuple):
    """The first new token at which the texts of one prompt differ.

    Attributes:
        row: the prompt.
        position: the new token, counted from 0.
        plain, speculative: what each says there.
        margin: the logit of plain decoding's token minus that of the other, in plain decoding's own pass (nats).
        top_two_margin: by how much the largest logit there exceeds the second largest (nats): the same, unless the
            other token is not even the second best.
    """

    row: int
    position: int
    plain: int
    speculative: int
    margin: float
    top_two_margin: float


def divergences(
    target: Model, drafter: Model, prompts: Sequence[str] | Prompt, *, gamma: int = 4, max_new_tokens: int = 64
) -> list[Divergence]:
    """Decodes greedily both ways and compares; an empty list means identical texts.

    Args:
        target, drafter: a pair.
        prompts: texts, or token ids; decoded as one batch.
        gamma: guesses per round.
        max_new_tokens: per prompt.

    Example:
        >>> import jax
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> divergences(target, draft, Prompt(jnp.array([[3, 1]]), jnp.array([2])), max_new_tokens=12)
        []
    """
    plain = generate(target, prompts, max_new_tokens=max_new_tokens)
    fast = generate(target, prompts, drafter=drafter, gamma=gamma, max_new_tokens=max_new_tokens)
    prompt = prompts if isinstance(prompts, Prompt) else buffers.pad(target.tokenizer(list(prompts))["input_ids"])
    found = []
    for row in range(len(plain.lengths)):
        ours, theirs = (_row(side, row) for side in (plain, fast))
        at = _first_difference(ours, theirs)
        if at is not None:
            a, b = ours[at], theirs[at]
            found.append(Divergence(row, at, a, b, *_margins(target, prompt, row, ours[:at], a, b)))
    return found


def first(found: Sequence[Divergence]) -> Divergence | None:
    """The earliest in its text, of the first prompt if there are several; None of none.

    >>> first([Divergence(0, 9, 1, 2, 0.1, 0.1), Divergence(1, 4, 1, 2, 0.1, 0.1)]).row
    1
    """
    return min(found, key=lambda parting: (parting.position, parting.row), default=None)


def _row(generation: Generation, row: int) -> list[int]:
    return generation.tokens[row, : generation.lengths[row]].tolist()


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Where two texts part; the shorter one has its end token there, so they part within both.

    >>> _first_difference([1, 2, 3], [1, 4]), _first_difference([1], [1])
    (1, None)
    """
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)


def _margins(
    target: Model, prompt: Prompt, row: int, before: Sequence[int], plain: int, other: int
) -> tuple[float, float]:
    """The difference of two logits behind `before`, fed one token at a time, as plain decoding does; of the top two."""
    one = Prompt(prompt.tokens[row : row + 1], prompt.length[row : row + 1])
    prefill, extend = jax.jit(target.lm.prefill, static_argnums=2), jax.jit(target.lm.extend)
    width = buffers.row_width(target.lm, one) + buffers.bucket(len(before) + 1)
    forward, cache = prefill(target.params, one, width)
    for token in before:
        forward, cache = extend(target.params, cache, jnp.full((1, 1), token, jnp.int32))
    logits = np.asarray(forward.logits[0, -1])
    second, largest = np.partition(logits, -2)[-2:]
    return float(logits[plain] - logits[other]), float(largest - second)
