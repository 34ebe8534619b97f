"""Parts of drafters: models as drafters, searches that are skipped where no row may draft, drafts
as distributions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core.round import check_takes_trees
from jaxspec.drafters.model import model


def as_drafter(
    drafter: core.Drafter | core.BoundDrafter | core.Model, name: str = "a drafter"
) -> core.BoundDrafter:
    """Returns a model as the drafter that samples from it, functions alone with no values, a
    drafter as it is.
    """
    if isinstance(drafter, core.Model):
        return model(drafter)
    if isinstance(drafter, core.Drafter):
        return core.BoundDrafter(drafter)
    if isinstance(drafter, core.BoundDrafter):
        return drafter
    raise TypeError(
        f"{name} is {shown(drafter)}: expected a jaxspec.Model, or one of jaxspec.drafters"
    )


def steps_of(draft: core.BoundDrafter, depth: int) -> core.Steps:
    """Returns the functions that a tree of this depth is made of."""
    steps = draft.functions.steps
    check_takes_trees(draft.functions, name_of(draft), "a token tree is made of its drafts")
    assert steps is not None
    if steps.depth is not None and depth > steps.depth:
        raise ValueError(
            f"the tree has depth {depth}, and the drafter drafts {steps.depth} tokens ahead at most"
        )
    return steps


def with_trees(draft: core.BoundDrafter, functions: core.Drafter, name: str) -> core.BoundDrafter:
    """Returns the drafter with functions that draft trees, as `name` says in tables."""
    if functions.tree is None:
        nodes = 0
    else:
        nodes = functions.tree.nodes
    functions = functions._replace(lm=draft.functions.lm, resumes=draft.functions.resumes)
    return draft._replace(functions=functions, name=f"{name}({nodes} nodes, {name_of(draft)})")


def name_of(draft: core.Model | core.BoundDrafter) -> str:
    """Returns the name in tables of a model or a drafter that another drafter is made of."""
    return draft.name or ("a model" if isinstance(draft, core.Model) else "a drafter")


def check_model(value: Any, name: str) -> None:
    """Raises TypeError for anything but a model."""
    if not isinstance(value, core.Model):
        raise TypeError(
            f"{name} is {shown(value)}: expected a jaxspec.Model, as jaxspec.load gives"
        )


def shown(value: Any) -> str:
    """Describes a value of a wrong type, for an error; short.

    >>> shown("x"), shown(None), shown(shown), shown(core.BoundDrafter(None))
    ("'x'", 'None', 'shown, which was not called', 'of type BoundDrafter')
    """
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    if callable(value) and hasattr(value, "__name__"):
        return f"{value.__name__}, which was not called"
    return f"of type {type(value).__name__}"


def skip_if_idle(search: Callable[[], core.Draft], context: core.DraftContext) -> core.Draft:
    """Runs a search for a draft, and cuts a chain to the limits; where no row may draft, nothing is
    searched.

    >>> row, tokens = (
    ...     core.Prompt(jnp.zeros((2, 5), jnp.int32), jnp.array([2, 2])),
    ...     jnp.array([[7, 8, 9]] * 2),
    ... )
    >>> search = lambda: core.Draft(tokens, jnp.array([3, 2]))
    >>> contexts = [
    ...     core.DraftContext(None, row, jnp.array(limit), 3, True, None)
    ...     for limit in ([1, 3], [0, 0])
    ... ]
    >>> [skip_if_idle(search, context).length.tolist() for context in contexts]
    [[1, 2], [0, 0]]
    """
    if not context.adaptive:
        return search()
    # Only shapes are computed: the branch without a search returns zeros of the same structure.
    empty: core.Draft = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(search)
    )
    draft = jax.lax.cond(jnp.any(context.max_draft > 0), search, lambda: empty)
    if draft.parent is not None:
        return draft  # whose limit is one of depth
    return draft._replace(length=jnp.minimum(draft.length, context.max_draft))


def lookup_drafter(
    search: Callable[[core.Weights, Any, core.DraftContext], core.Draft],
    init: core.DraftInit,
    tree: core.TreeSize | None,
) -> core.Drafter:
    """Makes a drafter of a search for point masses, whose state does not change; rows may find
    nothing.
    """

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        return skip_if_idle(lambda: search(weights, caches.draft, context), context), caches

    return core.Drafter(init, propose, no_commit, may_be_empty=True, tree=tree, rollback=same_state)


def with_taps_of(target: core.Model, made_for: core.Model) -> core.Model:
    """Returns the target with the language model that a drafter was made for, which may give other
    taps.
    """
    if target.lm is made_for.lm or target.lm == made_for.lm:
        return target
    if target.config is None or target.config != made_for.config:
        names = [model.name or "a model without a name" for model in (made_for, target)]
        if names[0] == names[1]:
            details = _difference(made_for.config, target.config)
            names = [name + detail for name, detail in zip(names, details, strict=True)]
        raise ValueError(
            f"the drafter reads the hidden states of {names[0]} or uses its layers, and drafts for "
            f"{names[1]}: make it for that one"
        )
    return target._replace(lm=made_for.lm)


def _difference(first: Any, second: Any, name: str = "") -> tuple[str, str]:
    """Tells two models of one name from each other, by the first field of their configs that
    differs.

    >>> from jaxspec.nets.decoder import gpt_config
    >>> _difference(
    ...     *(gpt_config(32, dim=16, ff_dim=n, layers=n, heads=2, max_positions=48) for n in (2, 3))
    ... )
    (' (2 layers)', ' (3 layers)')
    >>> _difference(
    ...     *(gpt_config(32, dim=16, ff_dim=n, layers=1, heads=2, max_positions=48) for n in (2, 3))
    ... )
    (' (layers[0].ff.dim=2)', ' (layers[0].ff.dim=3)')
    """
    if type(first) is not type(second):
        return f" ({type(first).__name__})", f" ({type(second).__name__})"
    if isinstance(first, tuple) and len(first) != len(second):
        return f" ({len(first)} {name})", f" ({len(second)} {name})"
    # Goes down to the first field that differs, and names it by the way there.
    parts: list[tuple[str, Any, Any]] = []
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        parts = [(f"{name}.{x}".lstrip("."), getattr(first, x), getattr(second, x)) for x in names]
    elif isinstance(first, tuple):
        parts = [(f"{name}[{i}]", *pair) for i, pair in enumerate(zip(first, second, strict=True))]
    for path, first_value, second_value in parts:
        if first_value != second_value:
            return _difference(first_value, second_value, path)
    if name:
        return (f" ({name}={first})", f" ({name}={second})")
    return ("", " (another one)")


def no_state(start: core.DraftStart, nodes: int = 0) -> Any:
    """Makes the state of a drafter that has none."""
    return ()


def same_state(state: Any, row: core.Prompt) -> Any:
    """Takes tokens back for a drafter whose state holds nothing of the row's end."""
    return state


def no_commit(end: core.RoundEnd) -> core.Caches:
    """Commits for a drafter whose state no verdict changes."""
    return end.caches


def side_by_side(drafters: tuple[core.Drafter, ...], propose: core.Propose) -> core.Drafter:
    """Joins several drafters of chains into one: each keeps its state, and they propose together.

    `Weights.draft` and the state are tuples, with an entry for each of the drafters.
    """

    def init(start: core.DraftStart) -> tuple[Any, ...]:
        parts = []
        for index, (drafter, params) in enumerate(zip(drafters, start.weights.draft, strict=True)):
            if start.before is None:
                before = None
            else:
                before = start.before.of(start.before.state[index])
            parts.append(
                drafter.init(
                    start._replace(
                        weights=core.Weights(start.weights.target, params), before=before
                    )
                )
            )
        return tuple(parts)

    def commit(end: core.RoundEnd) -> core.Caches:
        target = end.caches.target
        states = []
        for drafter, params, state in zip(
            drafters, end.weights.draft, end.caches.draft, strict=True
        ):
            weights = core.Weights(end.weights.target, params)
            caches = core.Caches(target, state)
            target, state = drafter.commit(end._replace(weights=weights, caches=caches))
            states.append(state)
        return core.Caches(target, tuple(states))

    def rollback(state: tuple[Any, ...], row: core.Prompt) -> tuple[Any, ...]:
        return tuple(function(entry, row) for function, entry in zip(rollbacks, state, strict=True))

    # Tokens are taken back of all drafters or of none; the model with the fewest positions bounds
    # the rows.
    rollbacks = [drafter.rollback for drafter in drafters if drafter.rollback is not None]
    lms = [drafter.lm for drafter in drafters if drafter.lm is not None]
    return core.Drafter(
        init,
        propose,
        commit,
        lm=min(lms, key=lambda lm: lm.limits.max_positions or 1 << 30, default=None),
        may_be_empty=all(drafter.may_be_empty for drafter in drafters),
        rollback=rollback if len(rollbacks) == len(drafters) else None,
        spare=max(drafter.spare for drafter in drafters),
        resumes=all(drafter.resumes for drafter in drafters),
    )


def combine(
    first: core.Draft,
    second: core.Draft,
    length: Int[Array, " B"],
    merge: Callable[[Array, Array], Array],
) -> core.Draft:
    """Combines two chains of a length, array by array, with a function of two arrays.

    Where one has distributions and the other none, its are point masses.
    """
    drafts = first, second
    combined = core.Draft(merge(first.tokens, second.tokens), length)
    # If one chain was drawn, both need distributions [B, G, V]: rules judge a draft as a whole.
    vocab = next(
        (draft.log_probs.shape[-1] for draft in drafts if draft.log_probs is not None), None
    )
    if vocab is not None:
        combined = combined._replace(
            log_probs=merge(*(_log_probs(draft, vocab) for draft in drafts))
        )
    aux = {
        name: merge(*(_of_tokens(draft, name) for draft in drafts))
        for name in ("confidence", "entropy", "layers")
        if any(name in (draft.aux or {}) for draft in drafts)
    }
    return combined._replace(aux=aux or None)


def _log_probs(draft: core.Draft, vocab: int) -> Float[Array, "B G V"]:
    if draft.log_probs is not None:
        return draft.log_probs
    is_token = jnp.arange(vocab)[None, None, :] == draft.tokens[..., None]
    return jnp.where(is_token, 0.0, -jnp.inf).astype(jnp.float32)


def confidence_of(draft: core.Draft) -> Float[Array, "B G"]:
    """Returns `Draft.aux`'s confidences; NaN where the drafter has no distributions to read."""
    return _of_tokens(draft, "confidence")


def _of_tokens(draft: core.Draft, name: str) -> Float[Array, "B G"]:
    """Returns a number of `Draft.aux` for each draft token; NaN where the drafter gives none."""
    numbers = (draft.aux or {}).get(name)
    if numbers is None:
        return jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
    return numbers


def after(
    to_distribution: core.ToDistribution, tokens: Int[Array, "B M"], length: Int[Array, " B"]
) -> core.ToDistribution:
    """Makes the distributions of a drafter that begins after `length` draft tokens of another
    one.
    """

    def distribution_after(
        logits: Float[Array, "B T V"],
        draft_tokens: Int[Array, "B N"] | None = None,
        seen: Bool[Array, "#B T N"] | None = None,
    ) -> core.Distribution:
        shape = logits.shape[:2]
        # [B, T, M]: at every position all of the first drafter's real tokens precede; then [B, T, M
        # + N].
        real = (jnp.arange(tokens.shape[1], dtype=length.dtype)[None] < length[:, None])[:, None]
        real = jnp.broadcast_to(real, (*shape, tokens.shape[1]))
        if draft_tokens is None or seen is None:
            return to_distribution(logits, tokens, real)
        both = jnp.concatenate([real, jnp.broadcast_to(seen, (*shape, seen.shape[2]))], axis=2)
        return to_distribution(logits, jnp.concatenate([tokens, draft_tokens], axis=1), both)

    return distribution_after
