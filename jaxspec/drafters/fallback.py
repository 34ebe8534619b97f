"""Several drafters in order of preference: each row takes its draft from the first that has one."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxspec.core import (
    BoundDrafter,
    Caches,
    Draft,
    DraftContext,
    Drafter,
    Model,
    Weights,
    token_rows,
)
from jaxspec.drafters.common import as_drafter, combine, name_of, side_by_side


def fallback(*drafters: Drafter | BoundDrafter | Model) -> BoundDrafter:
    """Drafts with the first drafter that proposes something; rows choose by themselves.

    Put those that cost nothing and may be empty in front: `fallback(prompt_lookup(),
    without_backoff(trigram), small_model)`. A drafter that is not needed by any row drafts no token
    and searches nothing; a model then reads the tokens it missed when it is needed again. A row's
    drafter depends on committed tokens only, not on drawn ones, so the text stays exact.

    Args:
        drafters: at least one; a Model drafts as in `jaxspec.generate`.

    Raises:
        ValueError: no drafters, one after a drafter that always has a draft (it would never be
            asked), or one that drafts trees.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import prompt_lookup
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> options = dict(drafter=fallback(prompt_lookup(), draft), gamma=3, max_new_tokens=9)
        >>> both = jaxspec.generate(target, prompt, **options)
        >>> bool((both.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True
    """
    if not drafters:
        raise ValueError("fallback needs at least one drafter")
    bound = [as_drafter(drafter) for drafter in drafters]
    for index, drafter in enumerate(bound):
        if drafter.functions.tree is not None:
            raise ValueError(
                f"drafter {index} of {len(bound)} drafts trees: fallback takes drafters of chains; "
                "several look-ups in one tree are drafters.prompt_lookup(candidates=...)"
            )
        if index < len(bound) - 1 and not drafter.functions.may_be_empty:
            raise ValueError(
                f"drafter {index} of {len(bound)} always has a draft, so those after it would "
                "never be asked: put it last (or drafters.without_backoff around it, if it is "
                "n-gram tables)"
            )
    models = tuple(model for drafter in bound for model in drafter.models)
    targets = [drafter.target for drafter in bound if drafter.target is not None]
    if any(target.lm != targets[0].lm for target in targets[1:]):
        raise ValueError(
            "the drafters read the hidden states of different targets, or different taps: expected "
            "one"
        )
    functions = _fallback(tuple(drafter.functions for drafter in bound))
    params = tuple(drafter.params for drafter in bound)
    target = targets[0] if targets else None
    return BoundDrafter(functions, params, models, target, "+".join(map(name_of, bound)))


@functools.lru_cache
def _fallback(drafters: tuple[Drafter, ...]) -> Drafter:
    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        best = None
        target = caches.target
        states = []
        limited = context
        for drafter, params, state in zip(drafters, weights.draft, caches.draft, strict=True):
            draft, (target, state) = drafter.propose(
                Weights(weights.target, params), Caches(target, state), limited
            )
            states.append(state)
            if best is None:
                best = draft
            else:
                best = _choose(best.length == 0, draft, best)
            # Only rows that have nothing yet need a further draft. The first one they all need:
            # there only a policy may limit rows, so `adaptive` is as the decoder says.
            limited = context._replace(
                max_draft=jnp.where(best.length == 0, context.max_draft, 0), adaptive=True
            )
        assert best is not None
        return best, Caches(target, tuple(states))

    return side_by_side(drafters, propose)


def _choose(rows: Bool[Array, " B"], new: Draft, old: Draft) -> Draft:
    """Returns the new draft for the rows that want it, the old one for the others."""
    pick = functools.partial(token_rows.where, rows)
    return combine(new, old, pick(new.length, old.length), pick)
