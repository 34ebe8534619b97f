"""Several drafters in turn: each row takes its guesses from the first that has any."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.base import Budget, Draft, Drafter, Forward, Keys, Model, Params, Prompt, ToLaw, Verdict
from jaxspec.drafters.common import as_drafter


def first_of(*drafters: Drafter | Model) -> Drafter:
    """The draft of the first drafter that proposes something; rows choose by themselves.

    Put those that cost nothing and know when they know nothing in front: `first_of(lookup(), abstaining(trigram),
    small_model)`. A drafter that is not needed by any row makes no guess and searches nothing; a model then reads what
    it has missed when its turn comes. Which drafter a row takes depends on what is committed, not on what was drawn, so
    the text stays exact.

    Args:
        drafters: at least one; a Model drafts as in `jaxspec.generate`.

    Raises:
        ValueError: no drafters, or one behind a drafter that never abstains: it would never be asked.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.drafters import lookup
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> both = jaxspec.generate(target, prompt, drafter=first_of(lookup(), draft), gamma=3, max_new_tokens=9)
        >>> bool((both.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True
    """
    if not drafters:
        raise ValueError("first_of needs at least one drafter")
    made = [as_drafter(drafter) for drafter in drafters]
    for index, drafter in enumerate(made[:-1]):
        if not drafter.abstains:
            raise ValueError(
                f"drafter {index} of {len(made)} always has a guess, so those behind it would never be asked: put it "
                "last (or drafters.abstaining around it, if it is n-gram tables)"
            )
    bare = _first_of(tuple(drafter._replace(params=None, models=()) for drafter in made))
    models = tuple(found for drafter in made for found in drafter.models)
    return bare._replace(params=tuple(drafter.params for drafter in made), models=models)


@functools.cache
def _first_of(drafters: tuple[Drafter, ...]) -> Drafter:
    def init(params: Params, prompt: Prompt, room: int, forward: Forward) -> tuple[Any, ...]:
        return tuple(d.init(p, prompt, room, forward) for d, p in zip(drafters, params, strict=True))

    def propose(
        keys: Keys,
        params: Params,
        state: tuple[Any, ...],
        context: Prompt,
        gamma: int,
        to_law: ToLaw,
        budget: Budget | None = None,
    ) -> tuple[Draft, tuple[Any, ...]]:
        rows = context.length.shape[0]
        whole = Budget(jnp.full_like(context.length, gamma)) if budget is None else budget
        nothing = jnp.zeros_like(context.length)
        best, states = Draft(jnp.zeros((rows, gamma), jnp.int32), None, nothing), []
        for index, drafter in enumerate(drafters):
            needed = best.length == 0
            # The first has every row, so only a policy can stop it.
            mine = budget if index == 0 else whole._replace(limit=jnp.where(needed, whole.limit, 0))
            draft, new = drafter.propose(keys, params[index], state[index], context, gamma, to_law, mine)
            best = draft if index == 0 else _choose(needed, draft, best)
            states.append(new)
        return best, tuple(states)

    def commit(
        params: Params, state: tuple[Any, ...], context: Prompt, verdict: Verdict, forward: Forward
    ) -> tuple[Any, ...]:
        each = zip(drafters, params, state, strict=True)
        return tuple(d.commit(p, s, context, verdict, forward) for d, p, s in each)

    lms = [drafter.lm for drafter in drafters if drafter.lm is not None]
    shortest = min(lms, key=lambda lm: lm.max_positions or 1 << 30) if lms else None
    return Drafter(init, propose, commit, shortest, abstains=all(drafter.abstains for drafter in drafters))


def _choose(rows: Bool[Array, " B"], new: Draft, old: Draft) -> Draft:
    """The new draft for the rows that want it; a point mass becomes a law where the other one has laws."""

    def pick(first: Array, second: Array) -> Array:
        return jnp.where(rows.reshape(-1, *[1] * (first.ndim - 1)), first, second)

    laws = next((draft.log_probs for draft in (new, old) if draft.log_probs is not None), None)
    chosen = Draft(pick(new.tokens, old.tokens), None, pick(new.length, old.length))
    if laws is not None:
        chosen = chosen._replace(log_probs=pick(_laws(new, laws.shape[-1]), _laws(old, laws.shape[-1])))
    if new.signals is not None or old.signals is not None:
        # NaN where the drafter that was chosen has no laws to read.
        unread = jnp.full(new.tokens.shape, jnp.nan)
        signals = (unread if draft.signals is None else draft.signals for draft in (new, old))
        chosen = chosen._replace(signals=pick(*signals))
    return chosen


def _laws(draft: Draft, vocab: int) -> Float[Array, "B G V"]:
    if draft.log_probs is not None:
        return draft.log_probs
    certain = jnp.arange(vocab)[None, None, :] == draft.tokens[..., None]
    return jnp.where(certain, 0.0, -jnp.inf)
