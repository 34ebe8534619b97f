"""Several drafters of one tree, as in SpecInfer: each child of a node is drawn by one drafter.

Every drafter reads every node that has children, so that all of their caches follow the accepted
path, whoever drew it. Each draws from its distribution, and the draft holds them all
(`Draft.other_log_probs`). So rules judge each child by the distribution that it was drawn from.

Reference: Miao et al., SpecInfer, ASPLOS 2024, arXiv 2305.09781.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.drafters.common import as_drafter, name_of, side_by_side
from jaxspec.drafters.stepwise import drafter_of

DraftTogether = Callable[
    [Sequence[core.Reading], core.DraftContext], tuple[core.Draft, list[Any], Int[Array, "#B N"]]
]
"""(the readings of all drafters, context) -> a draft, the carry of each, and the slots of its
nodes, for all alike.
"""


def as_drafters(
    draft: core.Model | core.BoundDrafter | Sequence[core.Model | core.BoundDrafter],
) -> tuple[core.BoundDrafter, ...]:
    """Returns one drafter or several as a tuple of drafters; a model is the drafter that samples
    from it.

    >>> from jaxspec.testing import table_model
    >>> import jax
    >>> model = table_model(jax.random.key(1), vocab=5)
    >>> len(as_drafters(model)), len(as_drafters([model, model]))
    (1, 2)
    """
    members: Any = draft
    if not isinstance(members, list | tuple) or isinstance(
        members, core.Model | core.BoundDrafter | core.Drafter
    ):
        return (as_drafter(members, "draft"),)
    if not members:
        raise ValueError("draft is empty: expected a model or a drafter, or a list of these")
    return tuple(as_drafter(member, f"draft[{number}]") for number, member in enumerate(members))


def bound_together(
    drafters: tuple[core.BoundDrafter, ...], functions: core.Drafter, name: str
) -> core.BoundDrafter:
    """Binds the functions of several drafters to their parameters.

    Raises:
        ValueError: two drafters run the target's own layers, or were made for different targets.
    """
    own_passes = [
        name_of(drafter)
        for drafter in drafters
        if drafter.functions.complete_target_pass is not None
    ]
    if len(own_passes) > 1:
        raise ValueError(
            f"{' and '.join(own_passes)} do a part of the target's pass, each its own: expected "
            "one such drafter at most"
        )
    targets = [drafter.target for drafter in drafters if drafter.target is not None]
    if any(target.lm != targets[0].lm for target in targets[1:]):
        raise ValueError(
            "the drafters read the hidden states of different targets, or different taps: expected "
            "one"
        )
    models = tuple(model for drafter in drafters for model in drafter.models)
    params = tuple(drafter.params for drafter in drafters)
    if functions.tree is None:
        nodes = 0
    else:
        nodes = functions.tree.nodes
    name = f"{name}({nodes} nodes, {'+'.join(map(name_of, drafters))})"
    return core.BoundDrafter(functions, params, models, targets[0] if targets else None, name)


def together(
    drafters: tuple[core.Drafter, ...], draft: DraftTogether, fed: int, size: core.TreeSize
) -> core.Drafter:
    """Makes the drafter of a tree that several stepwise drafters draft together.

    Args:
        drafters: the drafters; all need `Drafter.steps`.
        draft: drafts the tree with the readings of all of them.
        fed: how many of its nodes are fed.
        size: the tree's size.
    """
    every_steps = [drafter.steps for drafter in drafters if drafter.steps is not None]

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        alone = list(zip(_each(weights), _each_state(caches), strict=True))
        pairs = zip(every_steps, alone, strict=True)
        readings = [steps.begin(*of_drafter, context, fed) for steps, of_drafter in pairs]
        drafted, carries, slots = draft(readings, context)
        target = caches.target
        states = []
        for steps, reading, carry, (_, before) in zip(
            every_steps, readings, carries, alone, strict=True
        ):
            if reading.end is None:
                after = before
            else:
                after = reading.end(carry, drafted, slots)
            states.append(after.draft)
            if steps.complete_target_pass is not None:  # others only look at the target's cache
                target = after.target
        return drafted, core.Caches(target, tuple(states))

    parts = tuple(_alone(drafter, fed, size.nodes) for drafter in drafters)
    return side_by_side(parts, propose)._replace(
        tree=size, complete_target_pass=_complete_target_pass(every_steps)
    )


def _each(weights: core.Weights) -> list[core.Weights]:
    return [core.Weights(weights.target, params) for params in weights.draft]


def _each_state(caches: core.Caches) -> list[core.Caches]:
    return [core.Caches(caches.target, state) for state in caches.draft]


def _alone(drafter: core.Drafter, fed: int, nodes: int) -> core.Drafter:
    """Makes the drafter of such a tree alone, for its state; it is not asked for drafts."""

    def never(reading: core.Reading, context: core.DraftContext) -> tuple[core.Draft, Any, None]:
        raise AssertionError("the drafters propose together")

    assert drafter.steps is not None
    functions = drafter_of(drafter.steps, never, fed, nodes)
    return functions._replace(lm=drafter.lm, resumes=drafter.resumes)


def _complete_target_pass(every_steps: Sequence[core.Steps]) -> core.CompleteTargetPass | None:
    """Completes the target's pass, for the one drafter that has done a part of it. None: no drafter
    has.
    """
    number = next(
        (i for i, steps in enumerate(every_steps) if steps.complete_target_pass is not None), None
    )
    if number is None:
        return None
    complete = every_steps[number].complete_target_pass
    assert complete is not None

    def complete_target_pass(
        weights: core.Weights,
        caches: core.Caches,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B T"] | None = None,
    ) -> tuple[core.Forward, core.Cache]:
        return complete(_each(weights)[number], _each_state(caches)[number], tokens, parent)

    return complete_target_pass
