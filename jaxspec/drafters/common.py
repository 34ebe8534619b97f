"""What drafters share: models as drafters, searches that are skipped where no row may draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.base import Bound, Caches, Draft, DraftContext, Drafter, Forward, Model, Prompt, Verdict, Weights
from jaxspec.drafters.model import model


def as_drafter(drafter: Drafter | Bound[Drafter] | Model) -> Bound[Drafter]:
    """A model as the drafter that samples from it; functions alone with no values; a drafter as it is."""
    if isinstance(drafter, Model):
        return model(drafter)
    return Bound(drafter) if isinstance(drafter, Drafter) else drafter


def searched(search: Callable[[], Draft], context: DraftContext) -> Draft:
    """What a search finds, a chain cut to the limits; where no row may draft, nothing is searched.

    >>> row, found = Prompt(jnp.zeros((2, 5), jnp.int32), jnp.array([2, 2])), jnp.array([[7, 8, 9]] * 2)
    >>> search = lambda: Draft(found, jnp.array([3, 2]))
    >>> contexts = [DraftContext(None, row, jnp.array(limit), 3, True, None) for limit in ([1, 3], [0, 0])]
    >>> [searched(search, context).length.tolist() for context in contexts]
    [[1, 2], [0, 0]]
    """
    if not context.adaptive:
        return search()
    empty: Draft = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(search))
    draft = jax.lax.cond(jnp.any(context.limit > 0), search, lambda: empty)
    if draft.parent is not None:
        return draft  # whose limit is one of depth
    return draft._replace(length=jnp.minimum(draft.length, context.limit))


def no_state(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> Any:
    """The state of a drafter that has none."""
    return ()


def same_state(state: Any, row: Prompt) -> Any:
    """The rollback of a drafter whose state holds nothing of the row's end."""
    return state


def no_commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
    """For a drafter whose state no verdict changes."""
    return caches
