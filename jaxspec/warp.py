"""Logits to distributions, in one order everywhere: temperature, then top-k, then top-p.

Temperature, top_k and top_p are traced and per row, so changing them recompiles nothing. What is static is which of
them a program contains: a greedy program has no softmax, and a program sorts the vocabulary only if top-k or top-p is
in use. Temperature 0 is the limit: all mass on the largest logit, ties to the lowest id.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.base import Law, Warp


class Controls(NamedTuple):
    """The traced values of a warp, one entry per row.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens (all that tie with the k-th); a value >= the vocabulary keeps all.
        top_p: keep the fewest tokens, most probable first, whose mass reaches this; 1 keeps all.
    """

    temperature: Float[Array, " batch"]
    top_k: Int[Array, " batch"]
    top_p: Float[Array, " batch"]


@functools.cache
def greedy(soft: bool = False) -> Warp:
    """The law at temperature 0: a point mass on the largest logit, without a softmax.

    Args:
        soft: whether the law also says what the probabilities are at temperature 1 (`Law.soft`), which costs a
            softmax; `accept.lenient` reads them.

    >>> greedy()(None, jnp.array([[[1.0, 3.0, 3.0]]])).tokens.tolist()
    [[1]]
    """

    def warp(controls, logits: Float[Array, "B T V"]) -> Law:
        del controls
        before = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1) if soft else None
        return Law(tokens=jnp.argmax(logits, axis=-1).astype(jnp.int32), soft=before)

    return warp


@functools.cache
def sampling(top_k: int | None = None, top_p: bool = False) -> Warp:
    """The law at any temperature, 0 included.

    Args:
        top_k: an upper bound of every row's top_k, or None for a program without that stage.
        top_p: whether the program has a top-p stage.

    >>> one = Controls(jnp.ones(1), jnp.array([2]), jnp.ones(1))
    >>> law = sampling(top_k=2)(one, jnp.log(jnp.array([[[0.3, 0.6, 0.1]]])))
    >>> [round(p, 2) for p in jnp.exp(law.log_probs[0, 0]).tolist()]
    [0.33, 0.67, 0.0]
    """

    def warp(controls: Controls, logits: Float[Array, "B T V"]) -> Law:
        logits = cool(logits.astype(jnp.float32), controls.temperature)
        bound = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
        if top_k is not None or top_p:
            largest = jax.lax.top_k(logits, bound)[0]
        if top_k is not None:
            logits = keep_top_k(logits, largest, controls.top_k)
        if top_p:
            logits = keep_top_p(logits, largest, controls.top_p)
        return Law(log_probs=jax.nn.log_softmax(logits, axis=-1))

    return warp


@functools.cache
def only(inner: Warp, ids: int) -> Warp:
    """`inner` with every id at or past `ids` removed first: the rows that pad a vocabulary to a round number.

    >>> only(greedy(), 2)(None, jnp.array([[[1.0, 2.0, 9.0]]])).tokens.tolist()
    [[1]]
    """

    def warp(controls, logits: Float[Array, "B T V"]) -> Law:
        real = jnp.arange(logits.shape[-1])[None, None, :] < ids
        return inner(controls, jnp.where(real, logits, -jnp.inf))

    return warp


def fit(logits: Float[Array, "B T W"], vocab: int) -> Float[Array, "B T V"]:
    """Logits of another model over a vocabulary of `vocab` ids: -inf for ids it lacks, none for ids it has too many.

    >>> fit(jnp.zeros((1, 1, 2)), 3).tolist(), fit(jnp.zeros((1, 1, 3)), 2).tolist()
    ([[[0.0, 0.0, -inf]]], [[[0.0, 0.0]]])
    """
    missing = vocab - logits.shape[-1]
    if missing > 0:
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits[..., :vocab]


def cool(logits: Float[Array, "B T V"], temperature: Float[Array, " B"]) -> Float[Array, "B T V"]:
    """Divides by the temperature; at 0, leaves only the largest logit (the lowest id among equals)."""
    temperature = temperature[:, None, None]
    positive = temperature > 0
    best = jnp.argmax(logits, axis=-1, keepdims=True)
    point = jnp.where(jnp.arange(logits.shape[-1])[None, None, :] == best, 0.0, -jnp.inf)
    return jnp.where(positive, logits / jnp.where(positive, temperature, 1.0), point)


def keep_top_k(
    logits: Float[Array, "B T V"], largest: Float[Array, "B T bound"], top_k: Int[Array, " B"]
) -> Float[Array, "B T V"]:
    """Sets all but the k largest logits, and what ties with the k-th, to -inf; a k past the bound keeps all.

    `largest` holds the largest logits in descending order.
    """
    bound = largest.shape[-1]
    index = jnp.broadcast_to(jnp.clip(top_k - 1, 0, bound - 1)[:, None, None], (*logits.shape[:2], 1))
    kth = jnp.take_along_axis(largest, index, axis=-1)
    return jnp.where(jnp.logical_or(logits >= kth, (top_k > bound)[:, None, None]), logits, -jnp.inf)


def keep_top_p(
    logits: Float[Array, "B T V"], largest: Float[Array, "B T bound"], top_p: Float[Array, " B"]
) -> Float[Array, "B T V"]:
    """Sets to -inf every logit that is not needed to reach a mass of `top_p`; what ties with the last is kept.

    `largest` holds, in descending order, at least all logits that are not -inf.

    >>> logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    >>> jnp.isfinite(keep_top_p(logits, logits, jnp.array([0.6]))).tolist()
    [[[True, True, False]]]
    """
    probs = jnp.exp(largest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    before = jnp.cumsum(probs, axis=-1) - probs  # mass of the more probable ones
    top_p = top_p[:, None, None]
    last = jnp.maximum(jnp.sum(before < top_p, axis=-1, keepdims=True) - 1, 0)
    enough = logits >= jnp.take_along_axis(largest, last, axis=-1)
    return jnp.where(jnp.logical_or(enough, top_p >= 1.0), logits, -jnp.inf)
