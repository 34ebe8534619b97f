"""What guessing and judging cost on this machine, for the policy that goes by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxspec.cli import named

if TYPE_CHECKING:
    from jaxspec.base import Drafter, Model, Prompt


def of_guess(drafter: Model | Drafter, name: str, dtype: str, target: Model, prompt: Prompt, **options: Any) -> float:
    """What a guess costs, in passes of the target: that of the model that drafts, where one does; 0 for look-ups.

    Args:
        drafter, name, dtype: of it.
        target, prompt: what it is measured beside.
        **options: of `analysis.cost.measure`.
    """
    from jaxspec.analysis import cost

    model = guesser(drafter, name, dtype)
    return 0.0 if model is None else cost.measure(target, model, prompt, gamma=1, **options).c


def of_policy(
    drafter: Model | Drafter, name: str, dtype: str, target: Model, prompt: Prompt, *, gamma: int, **options: Any
) -> dict[str, Any]:
    """c and v of `policies.estimated`; what a look-up's search costs is part of v, from one guess on.

    Args:
        drafter, name, dtype: who guesses.
        target, prompt: who judges, and the batch that is measured.
        gamma: most guesses, at least 1.
        **options: of `analysis.cost.measure`.
    """
    from jaxspec.analysis import cost

    model = guesser(drafter, name, dtype)
    found = cost.measure_all(target, model or target, prompt, gammas=cost.judged(gamma), **options)
    v = cost.stepped(gamma, {one.gamma: one.v for one in found})
    v[1:] += of_search(drafter, target, prompt, gamma=gamma, **options)
    return {"c": found[0].c if model else 0.0, "v": v}


def of_search(drafter: Model | Drafter, target: Model, prompt: Prompt, *, gamma: int, **options: Any) -> float:
    """What a round's guesses cost together that are looked up, in passes of the target; 0 where a model makes some.

    Args:
        drafter: who guesses.
        target, prompt, gamma, **options: as in `of_policy`.
    """
    from jaxspec.analysis import cost, searches
    from jaxspec.base import Model

    if isinstance(drafter, Model) or drafter.lm is not None:
        return 0.0
    greedy = options | {"sampled": False}  # a look-up draws nothing
    return cost.measure(target, searches.as_model(drafter, target, gamma), prompt, gamma=gamma, **greedy).c


def guesser(drafter: Model | Drafter, name: str, dtype: str) -> Model | None:
    """The model whose passes guesses cost; None where they are looked up. Of several drafters it is the last."""
    from jaxspec.base import Model

    *_, last = named.parts(name)
    if last != name:
        return guesser(named.drafter(last, dtype), last, dtype)
    if name.startswith(("argmax:", "abstaining")):  # the model inside
        drafter = named.drafter(name.rpartition(":")[2], dtype)
    return drafter if isinstance(drafter, Model) else None
