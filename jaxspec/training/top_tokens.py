"""A model's distributions at the tokens of generated texts, in little memory: of the most probable
tokens alone.

What is stored of a position's logits is K numbers (`decode.teacher_forcing` makes them a few
positions at a time).

Shapes: B rows, P tokens of a prompt, T new tokens, t of them at once, K most probable tokens, V
vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import LanguageModel, Params, Prompt
from jaxspec.decode.teacher_forcing import at_new_tokens
from jaxspec.training.divergences import SMALLEST

LEAST = -100.0  # a log probability that stands for 0


def most_probable(
    lm: LanguageModel, params: Params, prompt: Prompt, tokens: Int[Array, "B T"], count: int
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """Finds the K most probable tokens of a model at each new token, and their log
    probabilities.
    """

    def read(carried: None, logits: Float[Array, "B t V"]) -> tuple[None, Any]:
        log_p, top = jax.lax.top_k(jax.nn.log_softmax(logits), count)
        return carried, (top.astype(jnp.int32), jnp.maximum(log_p, LEAST))

    return at_new_tokens(lm, params, prompt, tokens, read)


def log_probs_of(
    lm: LanguageModel,
    params: Params,
    prompt: Prompt,
    tokens: Int[Array, "B T"],
    top: Int[Array, "B T K"],
) -> Float[Array, "B T K"]:
    """Computes a model's log probabilities of K tokens at each new token; next to none of tokens
    that it lacks.
    """

    def read(
        carried: None, logits: Float[Array, "B t V"], top: Int[Array, "B t K"]
    ) -> tuple[None, Any]:
        log_q = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_q, jnp.minimum(top, log_q.shape[-1] - 1), axis=-1)
        return carried, jnp.maximum(jnp.where(top < log_q.shape[-1], picked, LEAST), LEAST)

    return at_new_tokens(lm, params, prompt, tokens, read, beside=(top,))


def with_the_rest(log_probs: Float[Array, "B T K"]) -> Float[Array, "B T K+1"]:
    """Appends the log probability of all other tokens, as one outcome.

    >>> jnp.exp(with_the_rest(jnp.log(jnp.array([0.5, 0.25])))).tolist()
    [0.5, 0.25, 0.25]
    """
    remaining = 1.0 - jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
    return jnp.concatenate([log_probs, jnp.log(jnp.maximum(remaining, SMALLEST))], axis=-1)
