"""What guessing and judging cost on this machine, for the policy that goes by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxspec.cli import named

if TYPE_CHECKING:
    from jaxspec.base import Drafter, Model, Policy, Prompt


def of_guess(drafter: Model | Drafter, name: str, dtype: str, target: Model, prompt: Prompt, **options: Any) -> float:
    """What a guess costs, in passes of the target: that of the model that drafts, where one does; 0 for look-ups.

    Args:
        drafter, name, dtype: of it.
        target, prompt: what it is measured beside.
        **options: of `analysis.cost.measure`.
    """
    from jaxspec.analysis import cost
    from jaxspec.base import Model

    if "+" in name:
        last = name.rpartition("+")[2]
        return of_guess(named.drafter(last, dtype), last, dtype, target, prompt, **options)
    if name.startswith(("argmax:", "abstaining")):  # the model inside
        drafter = named.drafter(name.rpartition(":")[2], dtype)
    if not isinstance(drafter, Model):
        return 0.0
    return cost.measure(target, drafter, prompt, gamma=1, **options).c


def policy(
    text: str,
    drafter: Model | Drafter,
    name: str,
    dtype: str,
    target: Model,
    prompt: Prompt,
    *,
    gamma: int,
    **options: Any,
) -> Policy:
    """The policy of this name (`named.policy`); `estimated` learns c and v here, unless its c is given.

    Args:
        text: the policy's name, or name=number.
        drafter, name, dtype: who guesses.
        target, prompt: who judges, and the batch that is measured.
        gamma: most guesses.
        **options: of `analysis.cost.measure`.
    """
    from jaxspec.analysis import cost

    if text.partition("=")[0] != "estimated":
        return named.policy(text)
    v = cost.verify_costs(target, prompt, gamma=gamma, **options)
    if "=" in text:
        return named.policy(text, v=v)
    return named.policy(text, v=v, c=of_guess(drafter, name, dtype, target, prompt, **options))
