"""Losses as functions of (params, batch) that return a sum over tokens and the number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import Prompt, token_rows
from jaxspec.nets import net_of
from jaxspec.training.data import TrainingBatch


class LossFunction(Protocol):
    def __call__(self, params: Any, batch: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the summed loss in nats, and the number of tokens."""
        ...


class NetworkRows(NamedTuple):
    """A batch as a network in training takes it."""

    inputs: tuple[Any, ...]  # arguments of the network's `__call__` and `streams`
    labels: Int[Array, "batch step"]  # the token to predict at each position
    real: Float[Array, "batch step"]  # 1 where there is one, 0 at padding


def module_of(config: Any) -> Any:
    """Returns the Linen module of a configuration (`nets.network.Network.teach`)."""
    teach = net_of(config).teach
    assert teach is not None, "recipes have n-gram tables counted"
    return teach(config)


def rows_of(config: Any, batch: TrainingBatch) -> NetworkRows:
    """Makes the rows of a batch: targets after their sources, or of a language model tokens after
    those before them.
    """
    target = jnp.asarray(batch.target)
    length = jnp.asarray(batch.target_length)
    first = net_of(config).language_model(config).limits.first_tokens
    if not first:
        return NetworkRows((target[:, :-1],), target[:, 1:], _real(target[:, 1:], length - 1))
    prompt = Prompt(jnp.asarray(batch.source), jnp.asarray(batch.source_length))
    rows = jnp.concatenate([token_rows.encoder_and_row(prompt, first)[1].tokens, target], axis=1)
    begins = len(first)
    # What a row begins with is given, not learnt.
    real = jnp.pad(_real(target, length), ((0, 0), (begins - 1, 0)))
    return NetworkRows((prompt, rows[:, :-1]), rows[:, 1:], real)


def logits_and_labels(config: Any) -> Callable[[Any, TrainingBatch], tuple[Array, Array, Array]]:
    """Returns (params, batch) -> logits [batch, step, vocab], labels [batch, step], real [batch,
    step].
    """

    def run(params: Any, batch: TrainingBatch) -> tuple[Array, Array, Array]:
        rows = rows_of(config, batch)
        logits = module_of(config).apply({"params": params}, *rows.inputs)
        return logits, rows.labels, rows.real

    return run


def with_fixed(loss: LossFunction, fixed: dict[str, Any]) -> LossFunction:
    """Returns a loss as a function of the other parameters, with `fixed` as they are."""
    return (lambda params, batch: loss(params | fixed, batch)) if fixed else loss


def cross_entropy(config: Any) -> LossFunction:
    """Returns the teacher-forced negative log likelihood of the targets, as a loss."""
    run = logits_and_labels(config)

    def loss(params, batch):
        logits, labels, real = run(params, batch)
        return over_real(negative_log_likelihood(logits, labels), real)

    return loss


def negative_log_likelihood(
    logits: Float[Array, "batch step vocab"], labels: Int[Array, "batch step"]
) -> Float[Array, "batch step"]:
    """Computes the negative log likelihood of each label, in nats."""
    # A comparison instead of a gather: its gradient is no scatter, and fuses with the softmax's.
    is_label = jnp.arange(logits.shape[-1])[None, None, :] == labels[..., None]
    picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def over_real(
    per_token: Float[Array, "batch step"], real: Float[Array, "batch step"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums over real tokens, and counts them."""
    return jnp.sum(per_token * real), jnp.sum(real)


def _real(labels: Array, length: Array) -> Float[Array, "batch step"]:
    return (jnp.arange(labels.shape[1])[None, :] < length[:, None]).astype(jnp.float32)
