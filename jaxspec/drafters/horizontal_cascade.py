"""A better drafter for the first draft tokens, a cheaper one for those after them (CS Drafting's
horizontal cascade).

Axis letters as in `jaxspec.core`; F first draft tokens, L later ones, G = F + L.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core import noise, token_rows
from jaxspec.core.checks import integers
from jaxspec.drafters.common import after, as_drafter, combine, confidence_of, name_of, side_by_side

Continues = Callable[[int | Int[Array, ""], Float[Array, "B L"]], Bool[Array, " B"]]


def horizontal_cascade(
    first: core.Drafter | core.BoundDrafter | core.Model,
    then: core.Drafter | core.BoundDrafter | core.Model,
    tokens: int = 2,
) -> core.BoundDrafter:
    """Drafts `tokens` tokens with one drafter and the rest of gamma with another, which reads the
    first one's.

    A draft token counts only if all before it are accepted, so the first ones are worth a better
    drafter, and the later ones no more than a cheap one: a small model and then n-gram tables, for
    example. `then` may be such a cascade again. If `first` drafts nothing, `then` drafts at once.

    Args:
        first: a drafter of chains, which may read hidden states or run the target's own layers.
        then: a drafter of chains that can begin after tokens which the target has not read.
        tokens: the number of tokens that `first` drafts; with gamma up to this, `then` drafts none.

    Raises:
        TypeError: first or then is not a drafter.
        ValueError: drafters of trees, `then` on hidden states or the target's own layers, or tokens
            < 1.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import prompt_lookup
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = horizontal_cascade(draft, prompt_lookup(), tokens=2)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=4, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen et al., Cascade Speculative Drafting, NeurIPS 2024, arXiv 2312.11462.
    """
    (tokens,) = integers(1, tokens=tokens)
    drafters = as_drafter(first, "first"), as_drafter(then, "then")
    for name, drafter in zip(("first", "then"), drafters, strict=True):
        if drafter.functions.tree is not None:
            raise ValueError(f"{name} drafts trees: expected a drafter of chains")
    if drafters[1].target is not None:
        raise ValueError(
            "then reads hidden states or uses the layers of the target, which has not read the "
            "first draft tokens: expected a model, a look-up or n-gram tables"
        )
    functions = _horizontal_cascade(drafters[0].functions, drafters[1].functions, tokens)
    params = tuple(drafter.params for drafter in drafters)
    models = drafters[0].models + drafters[1].models
    name = f"horizontal_cascade({tokens}, {name_of(drafters[0])}, {name_of(drafters[1])})"
    return core.BoundDrafter(functions, params, models, drafters[0].target, name)


@functools.lru_cache
def _horizontal_cascade(first: core.Drafter, then: core.Drafter, tokens: int) -> core.Drafter:
    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        first_weights, then_weights = (
            core.Weights(weights.target, params) for params in weights.draft
        )
        first_state, then_state = caches.draft
        gamma = context.gamma
        row = context.row
        count = min(tokens, gamma)
        # A round may commit more tokens than `first` drafts, which a model then has to catch up
        # with.
        adaptive = context.adaptive or count < gamma
        limit = jnp.minimum(context.max_draft, count)
        early = context._replace(gamma=count, max_draft=limit, adaptive=adaptive)
        draft, (target, first_state) = first.propose(
            first_weights, core.Caches(caches.target, first_state), early
        )
        length = jnp.minimum(draft.length, early.max_draft)
        if count == gamma:
            return draft, core.Caches(target, (first_state, then_state))
        remaining = context.max_draft - length
        if (
            context.should_continue is not None
            and draft.aux is not None
            and "confidence" in draft.aux
        ):
            # The policy may have ended the draft before its last token, or with it.
            confidence = jnp.pad(draft.aux["confidence"], ((0, 0), (0, gamma - count)))
            goes_on = (length == early.max_draft) & context.should_continue(count - 1, confidence)
            remaining = jnp.where(goes_on, remaining, 0)
        # Its positions are those of later rounds: the noise is another.
        later = context._replace(
            keys=noise.at(context.keys, row.length, noise.Purpose.LATER),
            row=core.Prompt(
                token_rows.append(row.tokens, row.length, draft.tokens), row.length + length
            ),
            max_draft=jnp.clip(remaining, 0, gamma - count),
            gamma=gamma - count,
            adaptive=True,
            to_distribution=after(context.to_distribution, draft.tokens, length),
            should_continue=_later(context, confidence_of(draft)),
        )
        second, (target, then_state) = then.propose(
            then_weights, core.Caches(target, then_state), later
        )
        second = second._replace(length=jnp.minimum(second.length, later.max_draft))
        return _joined(draft._replace(length=length), second), core.Caches(
            target, (first_state, then_state)
        )

    return side_by_side((first, then), propose)


def _later(context: core.DraftContext, first: Float[Array, "B F"]) -> Continues | None:
    """Makes the policy's `should_continue` for a draft whose first tokens had these confidences."""
    policy = context.should_continue
    if policy is None:
        return None

    def should_continue(
        index: int | Int[Array, ""], confidences: Float[Array, "B L"]
    ) -> Bool[Array, " B"]:
        return policy(index + first.shape[1], jnp.concatenate([first, confidences], axis=1))

    return should_continue


def _joined(first: core.Draft, then: core.Draft) -> core.Draft:
    """Joins two drafts, the second after the real tokens of the first: x y . and a b give x y a b .
    .
    """

    def join(early: Array, later: Array) -> Array:
        padded = jnp.pad(early, [(0, 0), (0, later.shape[1])] + [(0, 0)] * (early.ndim - 2))
        return token_rows.append(padded, first.length, later.astype(early.dtype))

    return combine(first, then, first.length + then.length, join)
