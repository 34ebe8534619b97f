"""The same number of draft tokens in every round, as a traced value."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Array, Int

from jaxspec.core import BoundPolicy, Params, Policy
from jaxspec.policies.common import checked, no_update, stateless_init


def constant(draft_tokens: Any) -> BoundPolicy:
    """`draft_tokens` tokens a round: what `gamma` alone does, but another number compiles nothing,
    and rows may differ.

    A program for one gamma alone is a little faster: it needs no passes of several widths.

    Args:
        draft_tokens: 0 (plain decoding) or more; gamma is the most.

    Raises:
        ValueError: a negative number.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1], [3, 1]]), jax.numpy.array([2, 2]))
        >>> options = dict(drafter=target, gamma=3, max_new_tokens=9)
        >>> jaxspec.generate(
        ...     target, prompt, policy=constant([1, 3]), **options
        ... ).stats.rounds.tolist()
        [4, 2]
    """
    limit = checked(draft_tokens, "draft_tokens", 0, float("inf"), int)
    return BoundPolicy(_constant(), limit, name="constant")


@functools.lru_cache
def _constant() -> Policy:
    def max_draft(
        params: Int[Array, " B"], state: Params, gamma: int, remaining: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        return params

    return Policy(stateless_init, max_draft, no_update)
