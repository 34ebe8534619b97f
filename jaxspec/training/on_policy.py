"""A draft model learns on texts of its own: on-policy distillation (DistillSpec, arXiv 2310.08461).

When it drafts, a model reads its own tokens; so it is taught there, by its target's distributions. Its texts are
sampled in the training step itself and are gone after it. They depend on the parameters and the batch alone, so a
run that is resumed makes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.core import LanguageModel, Prompt, Request, Weights, noise, token_rows
from jaxspec.decode import autoregressive, loop
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.training.data import Batch
from jaxspec.training.losses import LossFunction


def on_policy(
    loss: LossFunction,
    student: LanguageModel,
    share: float,
    *,
    prompt: int = 16,
    eos: Sequence[int] = (),
    seed: int = 0,
) -> LossFunction:
    """Returns the same loss, on texts of which the student has written a share itself.

    The student's answer to a row's source replaces its text: one sample at temperature 1, at most as long as the
    batch's rows. A decoder-only student continues the row's first tokens. Gradients do not flow through samples.

    Args:
        loss: a function of parameters and a batch.
        student: the model whose parameters these are.
        share: the share of rows to replace: 1 is all, 0.5 a mixture.
        prompt: tokens of a row that a decoder-only student is given.
        eos: the tokens that end a text.
        seed: the seed of the draws.
    """

    def mixed(params: Any, batch: Batch) -> Batch:
        # The key differs from batch to batch, and depends on nothing else.
        key = jax.random.fold_in(jax.random.key(seed), jnp.sum(jnp.asarray(batch.target), dtype=jnp.int32))
        written = samples(student, params, batch, jax.random.fold_in(key, 0), prompt, eos)
        drawn = jax.random.uniform(jax.random.fold_in(key, 1), written.target_length.shape) < share
        drawn = jnp.logical_and(drawn, jnp.asarray(batch.target_length) > 0)
        target = jnp.where(drawn[:, None], written.target, jnp.asarray(batch.target))
        length = jnp.where(drawn, written.target_length, jnp.asarray(batch.target_length))
        return batch._replace(target=target, target_length=length)

    return lambda params, batch: loss(params, mixed(params, batch))


def samples(lm: LanguageModel, params: Any, batch: Batch, key: jax.Array, prompt: int, eos: Sequence[int]) -> Batch:
    """Returns a batch with texts that a model has written; arguments as of `on_policy`.

    Raises:
        ValueError: rows of a language model are no longer than the prompt.
    """
    target, length = jnp.asarray(batch.target), jnp.asarray(batch.target_length)
    rows, width = target.shape
    if lm.limits.start_token is not None:
        read, most = Prompt(jnp.asarray(batch.source), jnp.maximum(jnp.asarray(batch.source_length), 1)), width
    else:
        read, most = Prompt(target[:, :prompt], jnp.clip(length, 1, prompt)), width - prompt
    if most < 1:
        raise ValueError(f"texts have {width} tokens, and the model is given {prompt} of them: expected fewer")
    request = Request(
        keys=noise.row_keys(key, rows),
        sampling_params=SamplingParams(jnp.ones(rows)),
        max_new_tokens=jnp.full(rows, most, jnp.int32),
        eos=jnp.tile(jnp.array(eos or [-1], jnp.int32), (rows, 1)),
    )
    weights = Weights(jax.lax.stop_gradient(params))
    out = loop.generation(autoregressive(lm, at_temperature()), weights, read, request, most)
    if lm.limits.start_token is not None:
        return batch._replace(target=out.tokens, target_length=out.length)
    row = jnp.pad(read.tokens, ((0, 0), (0, most)))
    return batch._replace(
        target=token_rows.append(row, read.length, out.tokens), target_length=read.length + out.length
    )
