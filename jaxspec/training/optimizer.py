"""The optimizer of a recipe: Adam with relative steps, and a rate that warms up, stays, and decays
to zero.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import optax

from jaxspec.training.recipes import Train

# root mean square of a parameter; below it (biases begin at 0) steps are no smaller
SMALLEST_SCALE = 0.02


def schedule(train: Train) -> optax.Schedule:
    """Makes a schedule: linear warm-up, a plateau, and a linear decay to 0 over the last
    `train.decay` of the run.

    Up to the decay the rate does not depend on `train.steps`: a run that is interrupted may be
    resumed with another number of steps.
    """
    start = decay_start(train)
    decay = max(1, train.steps - start)
    warmup = max(1, min(train.warmup, start))
    peak = train.learning_rate
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        [warmup, max(start, warmup)],
    )


def decay_start(train: Train) -> int:
    """Returns the step from which on the rate decays."""
    return max(0, train.steps - max(1, round(train.steps * train.decay)))


def make(
    train: Train, rates: Mapping[str, float] = types.MappingProxyType({})
) -> optax.GradientTransformation:
    """Makes the optimizer: clipping by global norm, then Adam, each step scaled by the size of the
    parameter.

    Relative steps, as T5 was trained with (Adafactor's parameter scaling): T5's attention is not
    scaled, its queries are initialised small instead, and steps of one size that suits its
    embeddings destroy them.

    Args:
        rates: shares of the learning rate, by the first name of a parameter's path; others have all
            of it.
    """

    def scaled(updates: Any, _: Any) -> dict[str, Any]:
        return {name: optax.tree.scale(rates.get(name, 1.0), updates[name]) for name in updates}

    rule = optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.scale_by_adam(b1=0.9, b2=0.98),
        optax.scale_by_param_block_rms(SMALLEST_SCALE),
        optax.scale_by_learning_rate(schedule(train)),
    )
    if rates:
        return optax.chain(rule, optax.stateless(scaled))
    return rule
