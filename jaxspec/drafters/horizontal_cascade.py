"""A better drafter for the first draft tokens, a cheaper one for those after them (CS Drafting's horizontal cascade).

Axis letters as in `jaxspec.core`; F first draft tokens, L later ones, G = F + L.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import (
    BoundDrafter,
    Caches,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    Model,
    Prompt,
    Verdict,
    Weights,
    noise,
    token_rows,
)
from jaxspec.core.checks import integer
from jaxspec.drafters.common import after, as_drafter, confidence_of, log_probs_of, name_of, put

Continues = Callable[[int | Int[Array, ""], Float[Array, "B L"]], Bool[Array, " B"]]


def horizontal_cascade(
    first: Drafter | BoundDrafter | Model, then: Drafter | BoundDrafter | Model, tokens: int = 2
) -> BoundDrafter:
    """Drafts `tokens` tokens with one drafter and the others of gamma with another, which reads those of the first.

    A draft token counts only if all before it are accepted, so the first ones are worth a better drafter, and the later
    ones no more than a cheap one: a small model and then n-gram tables, n-gram tables and then `uniform`. `then` may be
    such a cascade again. Where `first` has nothing, `then` drafts at once.

    Args:
        first: of chains; a drafter on hidden states or the target's own layers may be one.
        then: of chains; one that can begin after tokens that the target has not read.
        tokens: that `first` drafts; with a gamma up to that there are no others.

    Raises:
        TypeError: first or then is no drafter.
        ValueError: drafters of trees, `then` on hidden states or the target's own layers, or tokens < 1.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import prompt_lookup
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> drafter = horizontal_cascade(draft, prompt_lookup(), tokens=2)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=4, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen et al., Cascade Speculative Drafting, NeurIPS 2024, arXiv 2312.11462.
    """
    tokens = integer(tokens, "tokens", "an integer, the draft tokens of the first drafter")
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: expected at least 1 for the first drafter")
    both = as_drafter(first, "first"), as_drafter(then, "then")
    for name, made in zip(("first", "then"), both, strict=True):
        if made.functions.tree is not None:
            raise ValueError(f"{name} drafts trees: expected a drafter of chains")
    if both[1].target is not None:
        raise ValueError(
            "then reads hidden states or uses the layers of the target, which has not read the first draft tokens: "
            "expected a model, a look-up or n-gram tables"
        )
    functions = _horizontal_cascade(both[0].functions, both[1].functions, tokens)
    params, models = tuple(made.params for made in both), both[0].models + both[1].models
    name = f"horizontal_cascade({tokens}, {name_of(both[0])}, {name_of(both[1])})"
    return BoundDrafter(functions, params, models, both[0].target, name)


@functools.lru_cache
def _horizontal_cascade(first: Drafter, then: Drafter, tokens: int) -> Drafter:
    def parts(weights: Weights, caches: Caches) -> list[tuple[Weights, Caches]]:
        pairs = zip(weights.draft, caches.draft, strict=True)
        return [(Weights(weights.target, params), Caches(caches.target, state)) for params, state in pairs]

    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> tuple[Any, Any]:
        pairs = zip((first, then), weights.draft, strict=True)
        made = [drafter.init(Weights(weights.target, own), prompt, headroom, prefilled) for drafter, own in pairs]
        return made[0], made[1]

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        (first_weights, first_caches), (then_weights, then_caches) = parts(weights, caches)
        gamma, row = context.gamma, context.row
        count = min(tokens, gamma)
        own = context._replace(gamma=count, max_draft=jnp.minimum(context.max_draft, count))
        draft, first_caches = first.propose(first_weights, first_caches, own)
        length = jnp.minimum(draft.length, own.max_draft)
        if count == gamma:
            return draft, Caches(first_caches.target, (first_caches.draft, then_caches.draft))
        left = context.max_draft - length
        if context.should_continue is not None and draft.aux is not None and "confidence" in draft.aux:
            # The policy may have ended the draft before its last token, or with it.
            read = jnp.pad(draft.aux["confidence"], ((0, 0), (0, gamma - count)))
            goes_on = jnp.logical_and(length == own.max_draft, context.should_continue(count - 1, read))
            left = jnp.where(goes_on, left, 0)
        # Its positions are those of later rounds: the noise is another.
        later = context._replace(
            keys=noise.at(context.keys, row.length, noise.Purpose.LATER),
            row=Prompt(token_rows.append(row.tokens, row.length, draft.tokens), row.length + length),
            max_draft=jnp.clip(left, 0, gamma - count),
            gamma=gamma - count,
            adaptive=True,
            to_distribution=after(context.to_distribution, draft.tokens, length),
            should_continue=_later(context, confidence_of(draft)),
        )
        more, then_caches = then.propose(then_weights, then_caches._replace(target=first_caches.target), later)
        joined = _joined(draft._replace(length=length), more._replace(length=jnp.minimum(more.length, later.max_draft)))
        return joined, Caches(then_caches.target, (first_caches.draft, then_caches.draft))

    def commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
        target, states = caches.target, []
        for drafter, (own, mine) in zip((first, then), parts(weights, caches), strict=True):
            target, state = drafter.commit(own, mine._replace(target=target), row, verdict, forward)
            states.append(state)
        return Caches(target, tuple(states))

    def rollback(state: tuple[Any, Any], row: Prompt) -> tuple[Any, Any]:
        assert first.rollback is not None and then.rollback is not None
        return first.rollback(state[0], row), then.rollback(state[1], row)

    lms = [drafter.lm for drafter in (first, then) if drafter.lm is not None]
    shortest = min(lms, key=lambda lm: lm.max_positions or 1 << 30) if lms else None
    can_go_back = first.rollback is not None and then.rollback is not None
    empty = first.may_be_empty and then.may_be_empty
    back = rollback if can_go_back else None
    return Drafter(init, propose, commit, shortest, may_be_empty=empty, rollback=back, nested=True)


def _later(context: DraftContext, first: Float[Array, "B F"]) -> Continues | None:
    """The policy's word on a draft whose first tokens had these confidences."""
    ask = context.should_continue
    if ask is None:
        return None

    def should_continue(index: int | Int[Array, ""], confidences: Float[Array, "B L"]) -> Bool[Array, " B"]:
        return ask(index + first.shape[1], jnp.concatenate([first, confidences], axis=1))

    return should_continue


def _joined(first: Draft, then: Draft) -> Draft:
    """One draft after the other: x y . and a b give x y a b . ."""
    width = then.tokens.shape[1]

    def join(one: Array, other: Array) -> Array:
        wide = jnp.pad(one, [(0, 0), (0, width)] + [(0, 0)] * (one.ndim - 2))
        return put(wide, first.length, other)

    joined = Draft(join(first.tokens, then.tokens), first.length + then.length)
    known = first.log_probs if first.log_probs is not None else then.log_probs
    if known is not None:
        joined = joined._replace(log_probs=join(*(log_probs_of(draft, known.shape[-1]) for draft in (first, then))))
    if any("confidence" in (draft.aux or {}) for draft in (first, then)):
        joined = joined._replace(aux={"confidence": join(confidence_of(first), confidence_of(then))})
    return joined
