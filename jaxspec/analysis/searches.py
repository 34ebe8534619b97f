"""Searches of a drafter without a model as passes of one, so that `analysis.cost` can price them.

Shapes: B batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import buffers
from jaxspec.base import Cache, Drafter, Forward, LanguageModel, Model, Params, Prompt, Tree, Verdict
from jaxspec.decode import rounds


def as_model(drafter: Drafter, target: Model, gamma: int) -> Model:
    """A model whose c (`analysis.cost.measure`) is what the guesses of a round cost together.

    A pass puts the token that it is fed in the place of the row's last one, has the drafter propose, tells it that all
    was kept, and answers with the first guess.

    Args:
        drafter: one that draws nothing: a look-up, or several.
        target: for whom it guesses.
        gamma: guesses a round.

    Returns:
        A model that is good for being measured alone.

    Example:
        >>> from jaxspec.analysis import cost
        >>> from jaxspec.drafters import lookup
        >>> from jaxspec.testing import table_model
        >>> target, prompt = table_model(jax.random.key(1), vocab=5), Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> found = cost.measure(target, as_model(lookup(), target, 4), prompt, gamma=4, repeats=2, inner=3)
        >>> found.c > 0
        True
    """
    lm = _language_model(drafter._replace(params=None, models=()), target.lm, gamma)
    return Model(lm, drafter.params, target.tokenizer)


@functools.cache
def _language_model(drafter: Drafter, target: LanguageModel, gamma: int) -> LanguageModel:
    nothing: Any = None  # keys and laws are for drafters that draw

    def prefill(params: Params, prompt: Prompt, capacity: int) -> tuple[Forward, Cache]:
        row = rounds.first_row(target, prompt)
        batch, width = row.tokens.shape
        said = Forward(jnp.zeros((batch, 1, target.vocab_size)), jnp.zeros((batch, 1, 1)))
        state = drafter.init(params, prompt, capacity - width, said)
        return said, (state, row._replace(tokens=jnp.pad(row.tokens, ((0, 0), (0, capacity - width)))))

    def extend(
        params: Params, cache: Cache, tokens: Int[Array, "B 1"], tree: Tree | None = None
    ) -> tuple[Forward, Cache]:
        del tree
        state, row = cache
        row = row._replace(tokens=buffers.append(row.tokens, row.length - 1, tokens))
        draft, state = drafter.propose(nothing, params, state, row, gamma, nothing)
        logits = jax.nn.one_hot(draft.tokens[:, :1], target.vocab_size)
        said = jnp.repeat(logits, gamma + 1, axis=1)
        verdict = Verdict(draft.length, draft.tokens[:, 0])
        state = drafter.commit(params, state, row, verdict, Forward(said, said[..., :1]))
        return Forward(logits, logits[..., :1]), (state, row)

    def rewind(cache: Cache, length: Int[Array, " B"], path: Int[Array, "B keep"] | None = None) -> Cache:
        del length, path
        return cache

    return LanguageModel(prefill, extend, rewind, target.vocab_size, target.start_token)
