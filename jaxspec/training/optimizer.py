"""The optimizer of a recipe: Adam or Muon with relative steps, and a rate that warms up, stays, and decays to zero."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax import contrib

from jaxspec.training.recipes import Train

SMALLEST_SCALE = 0.02  # root mean square of a parameter; below it (biases begin at 0) steps are no smaller


def schedule(train: Train) -> optax.Schedule:
    """Makes a schedule: linear warm-up, a plateau, and a linear decay to 0 over the last `train.decay` of the run.

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


def _direction(train: Train) -> optax.GradientTransformation:
    """Makes what turns gradients into steps of about one size: Adam, or Muon for the layers' matrices.

    Muon's steps are orthogonal matrices, scaled to the root mean square that Adam's steps have (0.2, arXiv 2502.16982);
    embeddings, output heads, norms and biases keep Adam.
    """
    adam = optax.scale_by_adam(b1=0.9, b2=0.98)
    if train.optimizer == "adam":
        return adam

    def is_layer_matrix(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim == 2 and not {"head", "embedding", "position"} & {getattr(key, "key", None) for key in path}

    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(lambda *at: "muon" if is_layer_matrix(*at) else "adam", params)

    matrix = contrib.MuonDimensionNumbers()

    def matrices(params: Any) -> Any:  # called with the other leaves masked out
        return jax.tree.map(lambda leaf: matrix, params)

    muon = optax.chain(
        contrib.scale_by_muon(weight_dimension_numbers=matrices),
        optax.stateless(lambda updates, _: jax.tree.map(lambda step: 0.2 * max(step.shape) ** 0.5 * step, updates)),
    )
    return optax.partition({"muon": muon, "adam": adam}, labels)


def make(train: Train) -> optax.GradientTransformation:
    """Makes the optimizer: clipping by global norm, then Adam or Muon, each step scaled by the size of the parameter.

    Relative steps, as T5 was trained with (Adafactor's parameter scaling): T5's attention is not scaled, its
    queries are initialised small instead, and steps of one size that suits its embeddings destroy them.
    """
    return optax.chain(
        optax.clip_by_global_norm(train.clip),
        _direction(train),
        optax.scale_by_param_block_rms(SMALLEST_SCALE),
        optax.scale_by_learning_rate(schedule(train)),
    )
