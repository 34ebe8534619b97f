"""The training of a target whose first layers can draft: layer dropout and a loss at every exit.

LayerSkip (Elhoushi et al., arXiv 2404.16710). Rows skip layers at random, later layers more often,
so that the model relies less on these. All exits share the final norm and the head, which also
learn to predict the next token from the output of early layers. The result is an ordinary model,
but `drafters.early_exit` works better with it.

Shapes: L layers, B batch, T step, M model dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.nets import decoder_layers
from jaxspec.training.data import TrainingBatch
from jaxspec.training.losses import (
    LossFunction,
    module_of,
    negative_log_likelihood,
    over_real,
    rows_of,
)
from jaxspec.training.recipes import EarlyExit, Train


class Numbered(NamedTuple):
    """A batch and its step, which alone decides which layers are dropped and which exits learn."""

    batch: TrainingBatch
    step: Int[np.ndarray, ""]


def numbered(batch: TrainingBatch, step: int) -> Numbered:
    """Returns a batch with its step, for `loss`. Exact resume needs nothing else."""
    return Numbered(batch, np.asarray(step, np.int32))


def dropout(
    options: EarlyExit, train: Train, layers: int, step: Int[Array, ""]
) -> Float[Array, " L"]:
    """Computes how probably a row skips each layer: 0 for the first, growing exponentially to
    `dropout` for the last.

    From random parameters it begins at 0 and grows over the run in the same way.

    >>> train = Train(steps=100, batch_tokens=1, learning_rate=1.0, start="a checkpoint")
    >>> [f"{share:.3f}" for share in dropout(EarlyExit(dropout=0.2), train, 3, jnp.array(0))]
    ['0.000', '0.083', '0.200']
    """
    by_layer = jnp.exp2(jnp.arange(layers, dtype=jnp.float32) / (layers - 1)) - 1
    done = jnp.asarray(1.0 if train.start else step / max(1, train.steps - 1), jnp.float32)
    return options.dropout * by_layer * (jnp.exp2(done) - 1)


def weights(
    options: EarlyExit, train: Train, layers: int, step: Int[Array, ""]
) -> Float[Array, " L"]:
    """Computes the share of the loss after each layer, in a step; the last has most of it, the
    first none.

    >>> train = Train(steps=8, batch_tokens=1, learning_rate=1.0)
    >>> shares = weights(
    ...     EarlyExit(scale=1.0, every=2), train, 4, jnp.array(1)
    ... )  # of 0, 1, 3 and 3 + 3; 1 and 3 learn
    >>> [f"{share:.3f}" for share in shares]
    ['0.000', '0.143', '0.000', '0.857']
    """
    number = jnp.arange(layers, dtype=jnp.int32)
    early = options.scale * (number * (number + 1) / 2)
    if options.curriculum == "rotating":
        learns = number % options.every == step % options.every
    else:  # from the last exit to the first, all of them after half of the run
        learns = layers - 1 - number <= step * 2 * layers // train.steps
    early = jnp.where(learns, early, 0.0)
    last = layers - 1 + options.scale * (layers - 2) * (layers - 1) / 2
    by_layer = jnp.where(number == layers - 1, last, early)
    return by_layer / jnp.sum(by_layer)


def loss(config: Any, options: EarlyExit, train: Train) -> LossFunction:
    """Returns the negative log likelihood of the targets, a weighted mean over exits, with layer
    dropout, as a loss.

    Its batches are `Numbered`. Logits are computed of one exit after the other, and of none whose
    weight is 0.
    """
    module = module_of(config)
    layers = decoder_layers(config)

    def run(params: Any, batch: Numbered) -> tuple[Float[Array, ""], Float[Array, ""]]:
        rows = rows_of(config, batch.batch)
        step = jnp.asarray(batch.step)
        key = jax.random.fold_in(jax.random.key(train.seed), step)
        drawn = jax.random.uniform(key, (layers, rows.labels.shape[0]), jnp.float32)
        runs = drawn >= dropout(options, train, layers, step)[:, None]
        streams = module.apply({"params": params}, *rows.inputs, runs, method="streams")

        def of_exit(stream: Float[Array, "B T M"]) -> Float[Array, ""]:
            read = nn.apply(lambda net: net.logits(net.features(stream), training=True), module)
            return over_real(
                negative_log_likelihood(read({"params": params}), rows.labels), rows.real
            )[0]

        @jax.checkpoint
        def add(
            total: Float[Array, ""], exit: tuple[Array, Array]
        ) -> tuple[Float[Array, ""], None]:
            weight, stream = exit
            return total + weight * jax.lax.cond(
                weight > 0, of_exit, lambda _: jnp.zeros((), jnp.float32), stream
            ), None

        exits = weights(options, train, layers, step), jnp.stack(streams)
        return jax.lax.scan(add, jnp.zeros((), jnp.float32), exits)[0], jnp.sum(rows.real)

    return run
