"""Boost-tuning: n-gram tables that learn what the drafters before them miss, for several drafters
of one tree.

The second child of a node is judged only if the first was rejected, and then by the rest of p:
max(p - q, 0). So the best second drafter models that residual, and not p again. A token x of a text
that the target wrote stands for p(x). Counted with the weight max(p(x) - q(x), 0) / p(x), it stands
for the rest.

SpecInfer leaves out the samples that earlier drafters get right. Here every token counts as much as
they miss of it.

Reference: Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781, section 3.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core import LanguageModel, Model, Prompt
from jaxspec.core.checks import at_least, number
from jaxspec.decode import teacher_forcing
from jaxspec.drafters.lookups.ngram import ngram
from jaxspec.sampling.samplers import match_vocab

ROWS = 8  # rows whose distributions are in memory at once
PARTS = 100  # a weight of 1, in the whole numbers that tables count


def boosted_ngrams(
    rows: Sequence[Sequence[int] | np.ndarray],
    target: Model,
    *,
    order: int,
    count: int = 1,
    after: Sequence[Model] = (),
    temperature: float = 1.0,
    **options: Any,
) -> list[Model]:
    """Counts n-gram tables one after the other, each with weights: the share of a token that those
    before it miss.

    Args:
        rows: texts of the target, as token ids: sampled from it at `temperature`, with their
            prompts.
        target: the model to draft for.
        order: 1 for unigrams, 2 for bigrams, ...
        count: how many tables.
        after: drafters that come first, such as a small model.
        temperature: the temperature of the generations that the drafters will serve.
        options: other arguments of `drafters.lookups.ngram.count`.

    Returns:
        The tables, for `drafters.tree([*after, *tables])`.

    Raises:
        ValueError: an encoder-decoder, a temperature below 0, or no text is left to learn: the
            drafters miss nothing.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=3)
        >>> rows = [[0, 1, 1, 0, 2, 1, 1, 2, 0], [2, 1, 0, 1, 0]]
        >>> [table.name for table in boosted_ngrams(rows, target, order=2, count=2)]
        ['2-gram', '2-gram']
    """
    at_least(1, count=count)
    drafters: list[Model] = list(after)
    tables: list[Model] = []
    for _ in range(count):
        weighed = weights(rows, target, drafters, temperature) if drafters else None
        tables.append(ngram(rows, target, order=order, weights=weighed, **options))
        drafters.append(tables[-1])
    return tables


def weights(
    rows: Sequence[Sequence[int] | np.ndarray],
    target: Model,
    drafters: Sequence[Model],
    temperature: float = 1.0,
) -> list[Int[np.ndarray, " T"]]:
    """Computes what `missed` does, as the whole numbers that `drafters.lookups.ngram.count` takes.

    Raises:
        ValueError: the drafters miss nothing.

    >>> from jaxspec.testing import table_model_from
    >>> target, draft = (
    ...     table_model_from(jnp.log(jnp.array(x))) for x in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    ... )
    >>> weights([[2, 0, 1, 2, 0]], target, [draft])[0].tolist()
    [0, 60, 0, 0, 60]
    """
    weighed = [
        np.rint(PARTS * row).astype(np.int64) for row in missed(rows, target, drafters, temperature)
    ]
    if not any(row.any() for row in weighed):
        raise ValueError(
            f"{len(drafters)} drafters miss nothing of the texts: leave the next one out"
        )
    return weighed


def missed(
    rows: Sequence[Sequence[int] | np.ndarray],
    target: Model,
    drafters: Sequence[Model],
    temperature: float = 1.0,
) -> list[Float[np.ndarray, " T"]]:
    """Computes for each token of some texts the share of its probability that no drafter is
    accepted with.

    The drafters draw a child each, in this order, and rejection judges them. Its weight is 0 for
    the first token of a row, which nothing precedes, and for tokens past a model's last position.

    Args:
        rows, target, temperature: the arguments of `boosted_ngrams`.
        drafters: language models over the target's vocabulary.

    >>> from jaxspec.testing import table_model_from
    >>> target, draft = (
    ...     table_model_from(jnp.log(jnp.array(x))) for x in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5])
    ... )
    >>> missed([[2, 0, 1, 2, 0]], target, [draft])[0].round(
    ...     3
    ... ).tolist()  # (0.5 - 0.2) / 0.5 of token 0
    [0.0, 0.6, 0.0, 0.0, 0.6]
    """
    if number(temperature, "temperature", "0 or more") < 0:
        raise ValueError(f"temperature is {temperature}: expected 0 or more")
    models = [target, *drafters]
    if any(model.lm.limits.start_token is not None for model in models):
        raise ValueError(
            "the target or a drafter is an encoder-decoder: expected language models without an "
            "encoder"
        )
    limits = [model.lm.limits.max_positions for model in models]
    vocab = target.lm.vocab_size
    width = min([max(map(len, rows)), *(limit for limit in limits if limit is not None)])

    @jax.jit
    def shares(params: list[Any], tokens: Int[Array, "B T"]) -> Float[Array, "B T-1"]:
        logits = [
            _logits(model.lm, values, tokens) for model, values in zip(models, params, strict=True)
        ]
        log_p, *every_log_q = (_log_probs(match_vocab(rows, vocab), temperature) for rows in logits)
        both = jnp.exp(log_p), remaining(log_p, every_log_q)
        p, missed_p = (jnp.take_along_axis(x, tokens[:, 1:, None], axis=-1)[..., 0] for x in both)
        return jnp.where(p > 0, missed_p / jnp.where(p > 0, p, 1.0), 0.0)

    shares_of_rows = []
    for first in range(0, len(rows), ROWS):
        batch = rows[first : first + ROWS]
        tokens = np.zeros((ROWS, max(width, 2)), np.int32)
        for i, row in enumerate(batch):
            tokens[i, : len(row)] = row[:width]
        following = np.asarray(shares([model.params for model in models], jnp.asarray(tokens)))
        for i, row in enumerate(batch):
            share = np.zeros(len(row))
            read = min(len(row), width)
            share[1:read] = following[i, : read - 1]
            shares_of_rows.append(share)
    return shares_of_rows


def remaining(
    log_p: Float[Array, "*shape V"], every_log_q: Sequence[Float[Array, "*shape V"]]
) -> Float[Array, "*shape V"]:
    """Computes the residual of p after a rejected token of each q; its sum is the probability of
    that.

    >>> log_p, *both = jnp.log(
    ...     jnp.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.4, 0.3], [0.2, 0.6, 0.1, 0.1]])
    ... )
    >>> round(float(remaining(log_p, both).sum()), 3)
    0.22
    """
    mass = jnp.exp(log_p)
    for log_q in every_log_q:
        mass = jnp.maximum(mass - jnp.sum(mass, axis=-1, keepdims=True) * jnp.exp(log_q), 0.0)
    return mass


def _log_probs(logits: Float[Array, "*shape V"], temperature: float) -> Float[Array, "*shape V"]:
    """Computes log probabilities at a temperature; at 0 the most probable token has all of the
    mass.
    """
    if temperature:
        return jax.nn.log_softmax(logits / temperature, axis=-1)
    return jnp.log(jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]))


def _logits(lm: LanguageModel, params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T-1 W"]:
    """Computes the logits after each token but the last."""
    first = Prompt(tokens[:, :1], jnp.ones(len(tokens), jnp.int32))
    return teacher_forcing.at_new_tokens(
        lm, params, first, tokens[:, 1:], lambda carried, logits: (carried, logits)
    )
