"""Drafts where only one token is allowed: over the names, quotes and brackets of structured output, without a model.

SGLang calls it jump-forward decoding (Zheng et al., arXiv 2312.07104, section 4). There the text is tokenised anew after
each jump; here the tokens are those that the automaton allows, so that the text keeps the target's distribution.
"""

from __future__ import annotations

import functools


import jax.numpy as jnp

from jaxspec import core
from jaxspec.drafters.common import lookup_drafter


def forced() -> core.BoundDrafter:
    """Proposes the tokens that are certain, since `choices`, `regex` or `json_schema` allow no other.

    Every drafter of chains of point masses does so; this one does nothing else. Where several tokens are allowed it
    proposes none. It costs a few look-ups of integers for each token.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model, word_tokenizer
        >>> tokenizer = word_tokenizer(["<unk>", "</s>", "the", "old", "dog"])
        >>> model = table_model(jax.random.key(6), vocab=5)._replace(tokenizer=tokenizer)
        >>> options = dict(choices=["the old old dog", "dog"], max_new_tokens=5)
        >>> out = jaxspec.generate(model, "the", drafter=forced(), gamma=4, **options)
        >>> out.texts, out.stats.rounds.tolist()
        (['the old old dog'], [1])
    """
    return core.BoundDrafter(_forced(), name="forced")


@functools.lru_cache
def _forced() -> core.Drafter:
    def search(weights: core.Weights, state: tuple[()], context: core.DraftContext) -> core.Draft:
        length = context.row.length
        return core.Draft(jnp.zeros((len(length), context.gamma), jnp.int32), jnp.zeros_like(length))

    return lookup_drafter(search, lambda start: (), None)
