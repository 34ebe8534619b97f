"""What drafters share: models as drafters, searches that a budget may save."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxspec.base import Budget, Draft, Drafter, Model, Prompt
from jaxspec.drafters.model import model


def as_drafter(drafter: Drafter | Model) -> Drafter:
    """A model as the drafter that samples from it; a drafter as it is."""
    if isinstance(drafter, Model):
        return model(drafter.lm)._replace(params=drafter.params, models=(drafter,))
    return drafter


def searched(search: Callable[[], Draft], context: Prompt, gamma: int, budget: Budget | None) -> Draft:
    """What a search finds, as far as the budget goes; where no row may guess, nothing is searched.

    The search must draw nothing: `jaxspec.testing` cannot see into a `cond`.

    >>> row, found = Prompt(jnp.zeros((2, 5), jnp.int32), jnp.array([2, 2])), jnp.array([[7, 8, 9]] * 2)
    >>> search = lambda: Draft(found, None, jnp.array([3, 2]))
    >>> [searched(search, row, 3, Budget(jnp.array(limit))).length.tolist() for limit in ([1, 3], [0, 0])]
    [[1, 2], [0, 0]]
    """
    if budget is None:
        return search()
    nothing = Draft(jnp.zeros((context.length.shape[0], gamma), jnp.int32), None, jnp.zeros_like(context.length))
    draft = jax.lax.cond(jnp.any(budget.limit > 0), search, lambda: nothing)
    return draft._replace(length=jnp.minimum(draft.length, budget.limit))
