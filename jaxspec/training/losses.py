"""Losses as functions of (params, batch) that return a sum over tokens and the number of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.base import Prompt
from jaxspec.nets.decoder import Decoder, DecoderConfig
from jaxspec.nets.gpt import GPT, GPTConfig
from jaxspec.nets.t5 import T5, T5Config
from jaxspec.training.data import Batch


class LossFunction(Protocol):
    def __call__(self, params: Any, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """The summed loss in nats, and over how many tokens."""
        ...


Config = T5Config | GPTConfig | DecoderConfig


def logits_and_labels(config: Config) -> Callable[[Any, Batch], tuple[Array, Array, Array]]:
    """For a family, (params, batch) -> logits [batch, step, vocab], labels [batch, step], real [batch, step]."""

    if isinstance(config, T5Config):
        return functools.partial(_t5, config)
    return functools.partial(_decoder, config)


def _t5(config: T5Config, params: Any, batch: Batch) -> tuple[Array, Array, Array]:
    labels = jnp.asarray(batch.target)
    inputs = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=config.start_token)
    prompt = Prompt(jnp.asarray(batch.source), jnp.asarray(batch.source_length))
    logits: Any = T5(config).apply({"params": params}, prompt, inputs)
    return logits, labels, _real(labels, jnp.asarray(batch.target_length))


def _decoder(config: GPTConfig | DecoderConfig, params: Any, batch: Batch) -> tuple[Array, Array, Array]:
    rows = jnp.asarray(batch.target)
    module = GPT(config) if isinstance(config, GPTConfig) else Decoder(config)
    logits: Any = module.apply({"params": params}, rows[:, :-1])
    return logits, rows[:, 1:], _real(rows[:, 1:], jnp.asarray(batch.target_length) - 1)


def cross_entropy(config: Config) -> LossFunction:
    """Teacher-forced negative log likelihood of the targets."""
    run = logits_and_labels(config)

    def loss(params, batch):
        logits, labels, real = run(params, batch)
        # A comparison instead of a gather: its gradient is no scatter, and fuses with the softmax's.
        is_label = jnp.arange(logits.shape[-1])[None, None, :] == labels[..., None]
        picked = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1)
        return over_real(jax.nn.logsumexp(logits, axis=-1) - picked, real)

    return loss


def over_real(
    per_token: Float[Array, "batch step"], real: Float[Array, "batch step"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum over real tokens, and how many they are."""
    return jnp.sum(per_token * real), jnp.sum(real)


def _real(labels: Array, length: Array) -> Float[Array, "batch step"]:
    return (jnp.arange(labels.shape[1])[None, :] < length[:, None]).astype(jnp.float32)
