"""A model's distributions at the tokens of generated texts, in little memory: of the most probable tokens alone.

Logits are the largest arrays by far: they are made a few positions at a time, and what is stored of them is K numbers a
position.

Shapes: B rows, P tokens of a prompt, T new tokens, t of them at once, K most probable tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import LanguageModel, Params, Prompt, token_rows
from jaxspec.drafters.model import known
from jaxspec.training.divergences import SMALLEST

CHUNK = 256  # positions of a batch, about, whose logits are in memory at once
LEAST = -100.0  # a log probability that stands for 0


def most_probable(
    lm: LanguageModel, params: Params, prompt: Prompt, tokens: Int[Array, "B T"], count: int
) -> tuple[Int[Array, "B T K"], Float[Array, "B T K"]]:
    """Finds the K most probable tokens of a model at each new token, and their log probabilities."""

    def read(logits: Float[Array, "B t V"]) -> tuple[Int[Array, "B t K"], Float[Array, "B t K"]]:
        log_p, top = jax.lax.top_k(jax.nn.log_softmax(logits), count)
        return top.astype(jnp.int32), jnp.maximum(log_p, LEAST)

    return at_new_tokens(lm, params, prompt, tokens, read)


def log_probs_of(
    lm: LanguageModel, params: Params, prompt: Prompt, tokens: Int[Array, "B T"], top: Int[Array, "B T K"]
) -> Float[Array, "B T K"]:
    """Computes a model's log probabilities of K tokens at each new token; next to none of tokens that it lacks."""

    def read(logits: Float[Array, "B t V"], top: Int[Array, "B t K"]) -> Float[Array, "B t K"]:
        log_q = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_q, jnp.minimum(top, log_q.shape[-1] - 1), axis=-1)
        return jnp.maximum(jnp.where(top < log_q.shape[-1], picked, LEAST), LEAST)

    return at_new_tokens(lm, params, prompt, tokens, read, top)


def at_new_tokens(
    lm: LanguageModel,
    params: Params,
    prompt: Prompt,
    tokens: Int[Array, "B T"],
    read: Callable[..., Any],
    *beside: Array,
) -> Any:
    """Calls `read(logits, *beside)` with the logits that each new token was drawn from.

    Args:
        lm, params: the model whose logits are taken.
        prompt, tokens: the prompt, and the tokens generated after it.
        read: a function of arrays [B, t, ..] that returns arrays of this shape. A network of jaxspec's makes the logits
            of a few positions at a time, and makes them again for the gradient.
        beside: further arrays [B, T, ..] that it reads.
    """
    first, cache = lm.prefill(params, prompt, token_rows.reading_room(lm, prompt, tokens.shape[1]))
    after, _ = lm.extend(params, cache, known(lm, tokens))
    if (inside := lm.inside) is None:
        return read(jnp.concatenate([first.logits, after.logits[:, :-1]], axis=1), *beside)

    @jax.checkpoint
    def read_position(position: tuple[Array, ...]) -> Any:
        features, *more = (rows[:, None] for rows in position)
        return jax.tree.map(lambda rows: rows[:, 0], read(inside.head(params, features), *more))

    later = tuple(jnp.moveaxis(x, 1, 0) for x in (after.features[:, :-1], *(x[:, 1:] for x in beside)))
    rest_read = jax.lax.map(read_position, later, batch_size=max(1, CHUNK // tokens.shape[0]))
    first_read = read(first.logits, *(x[:, :1] for x in beside))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, jnp.moveaxis(y, 0, 1)], axis=1), first_read, rest_read)


def with_the_rest(log_probs: Float[Array, "B T K"]) -> Float[Array, "B T K+1"]:
    """Appends the log probability of all other tokens, as one outcome.

    >>> jnp.exp(with_the_rest(jnp.log(jnp.array([0.5, 0.25])))).tolist()
    [0.5, 0.25, 0.25]
    """
    remaining = 1.0 - jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
    return jnp.concatenate([log_probs, jnp.log(jnp.maximum(remaining, SMALLEST))], axis=-1)
