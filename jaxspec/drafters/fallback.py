"""Several drafters in order of preference: each row takes its draft from the first that has one."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxspec.core import BoundDrafter, Caches, Draft, DraftContext, Drafter, Forward, Model, Prompt, Verdict, Weights
from jaxspec.drafters.common import as_drafter, confidence_of, log_probs_of, name_of


def fallback(*drafters: Drafter | BoundDrafter | Model) -> BoundDrafter:
    """The draft of the first drafter that proposes something; rows choose by themselves.

    Put those that cost nothing and may be empty in front: `fallback(prompt_lookup(), without_backoff(trigram),
    small_model)`. A drafter that is not needed by any row drafts no token and searches nothing; a model then reads what
    it has missed when it is needed again. Which drafter a row takes depends on what is committed, not on what was
    drawn, so the text stays exact.

    Args:
        drafters: at least one; a Model drafts as in `jaxspec.generate`.

    Raises:
        ValueError: no drafters, one after a drafter that always has a draft (it would never be asked), or one that
            drafts trees.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import prompt_lookup
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> options = dict(drafter=fallback(prompt_lookup(), draft), gamma=3, max_new_tokens=9)
        >>> both = jaxspec.generate(target, prompt, **options)
        >>> bool((both.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True
    """
    if not drafters:
        raise ValueError("fallback needs at least one drafter")
    made = [as_drafter(drafter) for drafter in drafters]
    for index, drafter in enumerate(made):
        if drafter.functions.tree is not None:
            raise ValueError(
                f"drafter {index} of {len(made)} drafts trees: fallback takes drafters of chains, such as "
                "drafters.model; several look-ups in one tree are drafters.prompt_lookup(candidates=...)"
            )
        if index < len(made) - 1 and not drafter.functions.may_be_empty:
            raise ValueError(
                f"drafter {index} of {len(made)} always has a draft, so those after it would never be asked: put it "
                "last (or drafters.without_backoff around it, if it is n-gram tables)"
            )
    models = tuple(found for drafter in made for found in drafter.models)
    targets = [drafter.target for drafter in made if drafter.target is not None]
    if any(target.lm != targets[0].lm for target in targets[1:]):
        raise ValueError("the drafters read the hidden states of different targets, or different taps: expected one")
    functions = _fallback(tuple(drafter.functions for drafter in made))
    params, target = tuple(drafter.params for drafter in made), targets[0] if targets else None
    return BoundDrafter(functions, params, models, target, "+".join(map(name_of, made)))


@functools.lru_cache
def _fallback(drafters: tuple[Drafter, ...]) -> Drafter:
    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> tuple[Any, ...]:
        return tuple(
            drafter.init(weights._replace(draft=params), prompt, headroom, prefilled)
            for drafter, params in zip(drafters, weights.draft, strict=True)
        )

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        best, target, states = None, caches.target, []
        for drafter, params, state in zip(drafters, weights.draft, caches.draft, strict=True):
            if best is None:  # every row needs the first, so only a policy can limit it
                mine = context
            else:
                needed = best.length == 0
                mine = context._replace(max_draft=jnp.where(needed, context.max_draft, 0), adaptive=True)
            own = Weights(weights.target, params), Caches(target, state)
            draft, (target, state) = drafter.propose(*own, mine)
            best = draft if best is None else _choose(needed, draft, best)
            states.append(state)
        assert best is not None
        return best, Caches(target, tuple(states))

    def commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
        target, states = caches.target, []
        for drafter, params, state in zip(drafters, weights.draft, caches.draft, strict=True):
            own = Weights(weights.target, params), Caches(target, state)
            target, state = drafter.commit(*own, row, verdict, forward)
            states.append(state)
        return Caches(target, tuple(states))

    def rollback(state: tuple[Any, ...], row: Prompt) -> tuple[Any, ...]:
        pairs = zip(drafters, state, strict=True)
        return tuple(own if drafter.rollback is None else drafter.rollback(own, row) for drafter, own in pairs)

    lms = [drafter.lm for drafter in drafters if drafter.lm is not None]
    shortest = min(lms, key=lambda lm: lm.max_positions or 1 << 30) if lms else None
    return Drafter(
        *(init, propose, commit, shortest),
        may_be_empty=all(drafter.may_be_empty for drafter in drafters),
        rollback=None if any(drafter.rollback is None for drafter in drafters) else rollback,
        nested=any(drafter.nested for drafter in drafters),
    )


def _choose(rows: Bool[Array, " B"], new: Draft, old: Draft) -> Draft:
    """The new draft for the rows that want it; a point mass becomes a distribution where the other one has these."""

    def pick(first: Array, second: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (first.ndim - 1)), first, second)

    chosen = Draft(pick(new.tokens, old.tokens), pick(new.length, old.length))
    known = new.log_probs if new.log_probs is not None else old.log_probs
    if known is not None:
        wide = (log_probs_of(draft, known.shape[-1]) for draft in (new, old))
        chosen = chosen._replace(log_probs=pick(*wide))
    if any("confidence" in (draft.aux or {}) for draft in (new, old)):
        chosen = chosen._replace(aux={"confidence": pick(confidence_of(new), confidence_of(old))})
    return chosen
