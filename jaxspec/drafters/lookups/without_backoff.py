"""N-gram tables that draft nothing where they would have to back off, and leave the row to the next
drafter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from jaxtyping import Array, Bool

from jaxspec.core import BoundDrafter, Model
from jaxspec.drafters.lookups.ngram_model import NGramCache, Tables
from jaxspec.drafters.model import model


def without_backoff(tables: Model, min_context: int | None = None) -> BoundDrafter:
    """Drafts tokens from n-gram tables, but only after contexts of at least `min_context` tokens
    that were counted.

    Tables alone back off to shorter contexts, in the end to the most frequent token of all, and so
    have a draft token everywhere. These propose nothing after tokens that were never seen, and end
    a draft after its first token that leads to an unseen context: `fallback(prompt_lookup(),
    without_backoff(trigram), small_model)`.

    Exact: whether a draft token is made depends on the tokens before it, never on the draft token
    itself. A draft token that was made is always judged.

    Args:
        tables: a drafter of `drafters.ngram`, or a checkpoint of tables.
            `greedy(without_backoff(tables))` proposes their most frequent continuation, as a point
            mass.
        min_context: 1 or more tokens; by default the longest context that the tables hold, 2 for
            trigrams.

    Raises:
        ValueError: the model is not n-gram tables; the context is longer than all counted ones.

    Example:
        >>> import jax, jaxspec, jax.numpy as jnp
        >>> from jaxspec.drafters import ngram
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9)
        >>> drafter = without_backoff(ngram([[1, 2, 3, 4], [2, 3, 4]], target, order=3))
        >>> prompt = jaxspec.Prompt(jnp.array([[1, 2], [4, 2]]), jnp.array([2, 2]))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True
    """
    if not isinstance(tables.params, Tables):
        raise ValueError(
            f"{tables.name or 'the model'} is no n-gram tables: only what counts contexts can tell "
            "which it has seen; expected a model of drafters.ngram, or a checkpoint of one"
        )
    longest = len(tables.params.levels) - 1
    least = longest if min_context is None else min_context
    if not 1 <= least <= longest:
        raise ValueError(
            f"min_context is {least} and the longest context counted has {longest} tokens: "
            "expected 1 <= min_context <= that; count tables of a higher order"
        )
    return model(tables, can_continue=_deep_enough(least))


@functools.lru_cache
def _deep_enough(least: int) -> Callable[[NGramCache], Bool[Array, " B"]]:
    def can_continue(cache: NGramCache) -> Bool[Array, " B"]:
        return cache.context >= least

    return can_continue
