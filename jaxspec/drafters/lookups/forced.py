"""Drafts the text that a pattern prescribes: names, quotes and brackets of structured output,
without a model.

SGLang calls it jump-forward decoding (Zheng et al., arXiv 2312.07104, section 4). There the
prescribed text is put in and tokenised anew. Here it is a draft: the target's own choice of tokens
stands, and the text keeps its distribution.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp

from jaxspec import core
from jaxspec.drafters.common import lookup_drafter


def forced() -> core.BoundDrafter:
    """Proposes what `choices`, `regex` or `json_schema` prescribe, where the text does not branch.

    Prescribed text is proposed in the tokens that the tokenizer would write it with. Where the text
    may branch it proposes nothing. It costs a few look-ups of integers for each token. Other
    drafters of point masses, such as `prompt_lookup`, go on in the same way where they have nothing
    themselves.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model, word_tokenizer
        >>> tokenizer = word_tokenizer(["<unk>", "</s>", "the", "old", "dog"])
        >>> model = table_model(jax.random.key(2), vocab=5)._replace(tokenizer=tokenizer)
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
        return core.Draft(
            jnp.zeros((len(length), context.gamma), jnp.int32), jnp.zeros_like(length)
        )

    return lookup_drafter(search, lambda start: (), None)
