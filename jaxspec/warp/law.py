"""Warps: what turns logits into the law that is sampled from; `jaxspec.warp` has the order of their stages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec import noise
from jaxspec.base import Law, Prefix, Stage, Warp
from jaxspec.warp.controls import Controls
from jaxspec.warp.truncate import cool, keep_min_p, keep_top_k, keep_top_p


@functools.cache
def greedy(soft: bool = False) -> Warp:
    """The law at temperature 0: a point mass on the largest logit, without a softmax.

    Args:
        soft: whether the law also hands on the logits (`Law.soft`); `accept.lenient` reads them.

    >>> greedy()(None, jnp.array([[[1.0, 3.0, 3.0]]])).tokens.tolist()
    [[1]]
    """

    def warp(controls, logits: Float[Array, "B T V"], prefix: Prefix | None = None) -> Law:
        del controls, prefix
        best = jnp.where(jnp.max(logits, axis=-1) > -jnp.inf, noise.first_largest(logits), -1)
        return Law(tokens=best, soft=logits.astype(jnp.float32) if soft else None)

    return warp


@functools.cache
def sampling(top_k: int | None = None, top_p: bool = False, min_p: bool = False, soft: bool = False) -> Warp:
    """The law at any temperature, 0 included: temperature, then top-k, then top-p, then min-p.

    Args:
        top_k: an upper bound of every row's top_k, or None for a program without that stage.
        top_p, min_p: whether the program has these stages.
        soft: whether the law also hands on the logits of rows at temperature 0 (`Law.soft`), and says which rows
            these are (`Law.greedy`); `accept.lenient` reads both.

    >>> one = Controls(jnp.ones(1), jnp.array([2]), jnp.ones(1))
    >>> law = sampling(top_k=2)(one, jnp.log(jnp.array([[[0.3, 0.6, 0.1]]])))
    >>> [round(p, 2) for p in jnp.exp(law.log_probs[0, 0]).tolist()]
    [0.33, 0.67, 0.0]
    """

    def warp(controls: Controls, logits: Float[Array, "B T V"], prefix: Prefix | None = None) -> Law:
        del prefix
        before = logits.astype(jnp.float32)
        logits = cool(before, controls.temperature)
        bound = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
        if top_k is not None or top_p:
            largest = jax.lax.top_k(logits, bound)[0]
        if top_k is not None:
            logits = keep_top_k(logits, largest, controls.top_k)
        if top_p:
            logits = keep_top_p(logits, largest, controls.top_p)
        if min_p:
            assert controls.min_p is not None
            logits = keep_min_p(logits, controls.min_p)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        if not soft:
            return Law(log_probs)
        cold = controls.temperature <= 0
        return Law(log_probs, soft=jnp.where(cold[:, None, None], before, log_probs), greedy=cold)

    return warp


@functools.cache
def chain(*stages: Stage, to: Warp) -> Warp:
    """The warp that puts logits through each stage in turn, and then through `to`.

    A stage is any function (controls, logits, prefix) -> logits; see `base.Stage`. What `jaxspec.generate` uses is
    `chain(logit_bias, repetition_penalty, presence_and_frequency_penalties, to=sampling(...))`, without the stages that
    nobody asked for. Chains of the same functions are the same warp, and share programs: define a stage once.

    >>> def shout(controls, logits, prefix):
    ...     return 2 * logits
    >>> one = Controls(jnp.ones(1), jnp.array([2]), jnp.ones(1))
    >>> law = chain(shout, to=sampling())(one, jnp.log(jnp.array([[[0.25, 0.75]]])))
    >>> [round(p, 2) for p in jnp.exp(law.log_probs[0, 0]).tolist()]
    [0.1, 0.9]
    """
    if not stages:
        return to

    def warp(controls, logits: Float[Array, "B T V"], prefix: Prefix | None = None) -> Law:
        logits = logits.astype(jnp.float32)
        for stage in stages:
            logits = stage(controls, logits, prefix)
        return to(controls, logits, prefix)

    return warp


@functools.cache
def only(inner: Warp, ids: int) -> Warp:
    """`inner` with every id at or past `ids` removed first: the rows that pad a vocabulary to a round number.

    >>> only(greedy(), 2)(None, jnp.array([[[1.0, 2.0, 9.0]]])).tokens.tolist()
    [[1]]
    """

    def remove(controls, logits: Float[Array, "B T V"], prefix: Prefix | None) -> Float[Array, "B T V"]:
        del controls, prefix
        return jnp.where(jnp.arange(logits.shape[-1])[None, None, :] < ids, logits, -jnp.inf)

    return chain(remove, to=inner)


def fit(logits: Float[Array, "B T W"], vocab: int) -> Float[Array, "B T V"]:
    """Logits of another model over a vocabulary of `vocab` ids: -inf for ids it lacks, none for ids it has too many.

    >>> fit(jnp.zeros((1, 1, 2)), 3).tolist(), fit(jnp.zeros((1, 1, 3)), 2).tolist()
    ([[[0.0, 0.0, -inf]]], [[[0.0, 0.0]]])
    """
    missing = vocab - logits.shape[-1]
    if missing > 0:
        return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits[..., :vocab]
