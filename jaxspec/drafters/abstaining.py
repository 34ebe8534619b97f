"""N-gram tables that say nothing where they would only back off, and leave the row to the next drafter."""

from __future__ import annotations

import functools

from jaxtyping import Array, Bool

from jaxspec.base import Drafter, Forward, LanguageModel, Model
from jaxspec.drafters.model import model
from jaxspec.drafters.tables import NGramConfig


def abstaining(tables: Model, least_context: int | None = None) -> Drafter:
    """Guesses from n-gram tables, but only behind contexts of at least `least_context` tokens that were counted.

    Tables alone back off to shorter contexts, in the end to the most frequent token of all, and so have a guess
    everywhere. These propose nothing where the row's last tokens were never seen, and end a draft behind the first
    guess that leads out of what was seen: `first_of(lookup(), abstaining(trigram), small_model)`.

    Exact: whether a guess is made depends on the tokens before it, never on the guess, which is drawn from the same law
    as ever. A guess that was made is always judged.

    Args:
        tables: of `drafters.ngram`, or a checkpoint of such tables. `argmax(abstaining(tables))` proposes their most
            frequent continuation, with certainty.
        least_context: 1 or more tokens; by default the longest context that the tables hold, 2 for trigrams.

    Raises:
        ValueError: a model that is no n-gram tables; a context that is longer than all that were counted.

    Example:
        >>> import jax, jaxspec, jax.numpy as jnp
        >>> from jaxspec.base import Law
        >>> from jaxspec.drafters import ngram
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9)
        >>> drafter = abstaining(ngram([[1, 2, 3, 4], [2, 3, 4]], target, order=3))
        >>> prompt = jaxspec.Prompt(jnp.array([[1, 2], [4, 2]]), jnp.array([2, 2]))
        >>> state = drafter.init(drafter.params, prompt, 4, None)
        >>> draft, _ = drafter.propose(jax.random.split(jax.random.key(0), 2), drafter.params, state,
        ...                            jaxspec.Prompt(jnp.pad(prompt.tokens, ((0, 0), (0, 4))), prompt.length), 3,
        ...                            lambda logits, *_: Law(log_probs=logits))
        >>> draft.tokens[0, :2].tolist(), draft.length.tolist()  # 1 2 | 3 4, and 3 4 ends a text; 4 2 was never seen
        ([3, 4], [2, 0])
    """
    config = tables.config
    if not isinstance(config, NGramConfig):
        raise ValueError(
            f"{tables.name or 'the model'} is no n-gram tables: only what counts contexts can tell which it has seen; "
            "expected a model of drafters.ngram, or a checkpoint of one"
        )
    longest = len(config.contexts)
    least = longest if least_context is None else least_context
    if not 1 <= least <= longest:
        raise ValueError(
            f"least_context is {least} and the longest context counted has {longest} tokens: expected 1 <= "
            "least_context <= that; count tables of a higher order"
        )
    return _abstaining(tables.lm, least)._replace(params=tables.params, models=(tables,))


@functools.cache
def _abstaining(lm: LanguageModel, least: int) -> Drafter:
    def knows(forward: Forward) -> Bool[Array, "B T"]:
        return forward.features[..., 0] >= least

    return model(lm, knows=knows)
