"""The optimizer of a recipe: AdamW, with a rate that warms up, stays, and decays to zero."""

from __future__ import annotations

import optax

from jaxspec.recipes import Train


def schedule(train: Train) -> optax.Schedule:
    """Linear warm-up, a plateau, and a linear decay to 0 over the last `train.decay` of the run.

    Up to the decay the rate does not depend on `train.steps`: a run that is interrupted may be resumed with another
    number of steps.
    """
    decay = max(1, round(train.steps * train.decay))
    start = max(0, train.steps - decay)
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


def make(train: Train) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW."""
    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(schedule(train), b1=0.9, b2=0.98, weight_decay=train.weight_decay),
    )
