"""What drafters share: models as drafters, searches that are skipped where no row may draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import (
    BoundDrafter,
    Caches,
    Distribution,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    Model,
    Prompt,
    ToDistribution,
    Verdict,
    Weights,
)
from jaxspec.drafters.model import model


def as_drafter(drafter: Drafter | BoundDrafter | Model, name: str = "a drafter") -> BoundDrafter:
    """A model as the drafter that samples from it; functions alone with no values; a drafter as it is.

    Raises:
        TypeError: none of these; `name` is what the caller calls it.
    """
    if isinstance(drafter, Model):
        return model(drafter)
    if isinstance(drafter, Drafter):
        return BoundDrafter(drafter)
    if isinstance(drafter, BoundDrafter):
        return drafter
    raise TypeError(f"{name} is {shown(drafter)}: expected a jaxspec.Model, or one of jaxspec.drafters")


def name_of(draft: Model | BoundDrafter) -> str:
    """What tables call a model or a drafter that another drafter is made of."""
    return draft.name or ("a model" if isinstance(draft, Model) else "a drafter")


def check_model(given: Any, name: str) -> None:
    """Refuses what is no model.

    Raises:
        TypeError: what was given is no model.
    """
    if not isinstance(given, Model):
        raise TypeError(f"{name} is {shown(given)}: expected a jaxspec.Model, as jaxspec.load gives")


def shown(given: Any) -> str:
    """What was given in place of something else, for an error; short.

    >>> shown("x"), shown(None), shown(shown), shown(BoundDrafter(None))
    ("'x'", 'None', 'shown, which was not called', 'of type BoundDrafter')
    """
    if given is None or isinstance(given, str | int | float):
        return repr(given)
    if callable(given) and hasattr(given, "__name__"):
        return f"{given.__name__}, which was not called"
    return f"of type {type(given).__name__}"


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
    draft = jax.lax.cond(jnp.any(context.max_draft > 0), search, lambda: empty)
    if draft.parent is not None:
        return draft  # whose limit is one of depth
    return draft._replace(length=jnp.minimum(draft.length, context.max_draft))


def with_taps_of(target: Model, made_for: Model) -> Model:
    """The target with the language model that a drafter was made for, which may give taps that its own does not.

    Raises:
        ValueError: it was made for another model.
    """
    if target.lm is made_for.lm or target.lm == made_for.lm:
        return target
    if target.config is None or target.config != made_for.config:
        names = [model.name or "a model without a name" for model in (made_for, target)]
        if names[0] == names[1]:
            names = [name + how for name, how in zip(names, _differing(made_for.config, target.config), strict=True)]
        raise ValueError(
            f"the drafter reads the hidden states of {names[0]} or uses its layers, and drafts for {names[1]}: make it "
            "for that one"
        )
    return target._replace(lm=made_for.lm)


def _differing(one: Any, other: Any) -> tuple[str, str]:
    """What tells two models of one name from each other: the first field of their configs that differs.

    >>> from jaxspec.nets.gpt import GPTConfig
    >>> _differing(*(GPTConfig(32, dim=16, ff_dim=32, layers=n, heads=2, max_positions=48) for n in (2, 3)))
    (' (layers=2)', ' (layers=3)')
    """
    if type(one) is not type(other):
        return f" ({type(one).__name__})", f" ({type(other).__name__})"
    for field in dataclasses.fields(one) if dataclasses.is_dataclass(one) else ():
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if mine != theirs:
            return f" ({field.name}={mine})", f" ({field.name}={theirs})"
    return "", " (another one)"


def no_state(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> Any:
    """The state of a drafter that has none."""
    return ()


def same_state(state: Any, row: Prompt) -> Any:
    """The rollback of a drafter whose state holds nothing of the row's end."""
    return state


def no_commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
    """For a drafter whose state no verdict changes."""
    return caches


def log_probs_of(draft: Draft, vocab: int) -> Float[Array, "B G V"]:
    """The distributions that a chain's tokens were drawn from; of one that was not drawn, a point mass."""
    if draft.log_probs is not None:
        return draft.log_probs
    certain = jnp.arange(vocab)[None, None, :] == draft.tokens[..., None]
    return jnp.where(certain, 0.0, -jnp.inf)


def confidence_of(draft: Draft) -> Float[Array, "B G"]:
    """`Draft.aux`'s confidences; NaN where the drafter has no distributions to read."""
    found = (draft.aux or {}).get("confidence")
    return jnp.full(draft.tokens.shape, jnp.nan) if found is None else found


def after(to_distribution: ToDistribution, tokens: Int[Array, "B M"], length: Int[Array, " B"]) -> ToDistribution:
    """The distributions of a drafter that begins after draft tokens of another one.

    Args:
        to_distribution: the decoder's, which knows what is committed.
        tokens: draft tokens after that.
        length: how many of them are real.
    """

    def distribution_after(
        logits: Float[Array, "B T V"],
        draft_tokens: Int[Array, "B N"] | None = None,
        seen: Bool[Array, "#B T N"] | None = None,
    ) -> Distribution:
        shape = logits.shape[:2]
        real = (jnp.arange(tokens.shape[1], dtype=length.dtype)[None] < length[:, None])[:, None]
        real = jnp.broadcast_to(real, (*shape, tokens.shape[1]))
        if draft_tokens is None or seen is None:
            return to_distribution(logits, tokens, real)
        both = jnp.concatenate([real, jnp.broadcast_to(seen, (*shape, seen.shape[2]))], axis=2)
        return to_distribution(logits, jnp.concatenate([tokens, draft_tokens], axis=1), both)

    return distribution_after


def put(rows: Array, at: Int[Array, " B"], new: Array) -> Array:
    """Writes the entries `new` of each row from its own place `at` on.

    >>> put(jnp.zeros((2, 4)), jnp.array([0, 2]), jnp.ones((2, 2))).tolist()
    [[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """

    def one(row: Array, at: Int[Array, ""], new: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new.astype(row.dtype), at, axis=0)

    return jax.vmap(one)(rows, at, new)
