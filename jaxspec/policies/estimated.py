"""The gamma that Theorem 3.8 prefers, for the acceptance rate seen so far: online, per row."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.base import Draft, Policy, Prompt, Verdict
from jaxspec.policies.common import checked


class Values(NamedTuple):
    c: Any
    extra: Any
    alpha: Any
    weight: Any
    forget: Any
    pause: Any


class Memory(NamedTuple):
    """Guesses that were kept and guesses that had a trial, both discounted; rounds since the last guess."""

    kept: Float[Array, " B"]
    tried: Float[Array, " B"]
    idle: Int[Array, " B"]


def estimated(
    c: Any = 0.05,
    extra: Any = 0.06,
    *,
    alpha: Any = 0.6,
    weight: Any = 2.0,
    forget: Any = 0.02,
    pause: Any = 16,
) -> Policy:
    """The number of guesses n that maximises (1 - a^(n+1)) / (1 - a) / (n c + 1 + n extra), for an estimate a of alpha.

    That is Theorem 3.8 with the verify pass at its real cost. a is the share of kept guesses among those that had a
    trial (guesses behind a rejected one had none), where older rounds count less. Where even one guess does not pay,
    none is made for `pause` rounds, and then one, to see whether things have changed: a hopeless drafter costs a pass
    in `pause` rounds, and a drafter that costs nothing is used as soon as it is right.

    Args:
        c: cost of one guess, in passes of the target over one token (`jaxspec.analysis.cost.measure`; 0 for a look-up).
        extra: cost of each further token in the verify pass, in the same unit: (v - 1) / gamma.
        alpha, weight: what is believed at the start, and how many trials that is worth.
        forget: share of the evidence that a round loses.
        pause: rounds.

    Raises:
        ValueError: a negative cost, an alpha or a share outside [0, 1], a weight that is not positive.

    Example:
        >>> policy = estimated(c=0.05, extra=0.05, alpha=[0.9, 0.5, 0.05], weight=1e6)
        >>> memory = policy.init(policy.params, Prompt(jnp.zeros((3, 1), jnp.int32), jnp.array([1, 1, 1])))
        >>> policy.limit(policy.params, memory, 8).tolist()
        [8, 2, 0]

    Reference: section 3.5 of arXiv 2211.17192, with alpha estimated as generation goes on.
    """
    most = float("inf")
    values = Values(
        checked(c, "c", 0, most),
        checked(extra, "extra", 0, most),
        checked(alpha, "alpha", 0, 1),
        checked(weight, "weight", 1e-3, most),
        checked(forget, "forget", 0, 1),
        checked(pause, "pause", 0, most, int),
    )
    return _estimated()._replace(params=values)


@functools.cache
def _estimated() -> Policy:
    def init(params: Values, prompt: Prompt) -> Memory:
        rows = prompt.length.shape
        kept, tried = jnp.broadcast_to(params.alpha * params.weight, rows), jnp.broadcast_to(params.weight, rows)
        return Memory(kept, tried, jnp.zeros_like(prompt.length))

    def limit(params: Values, state: Memory, gamma: int) -> Int[Array, " B"]:
        best = best_length(state.kept / state.tried, params.c, params.extra, gamma)
        return jnp.where(jnp.logical_and(best == 0, state.idle >= params.pause), 1, best)

    def update(params: Values, state: Memory, draft: Draft, verdict: Verdict, kept: Int[Array, " B"]) -> Memory:
        del kept
        accepted, left = verdict.num_accepted.astype(jnp.float32), 1.0 - params.forget
        trials = accepted + (verdict.num_accepted < draft.length).astype(jnp.float32)
        # What is forgotten makes room for the first belief, so that the estimate never rests on nothing.
        return Memory(
            left * state.kept + params.forget * params.alpha * params.weight + accepted,
            left * state.tried + params.forget * params.weight + trials,
            jnp.where(draft.length > 0, 0, state.idle + 1),
        )

    return Policy(init, limit, update)


def best_length(
    alpha: Float[Array, " B"], c: Float[Array, " B"], extra: Float[Array, " B"], gamma: int
) -> Int[Array, " B"]:
    """The n of 0..gamma that yields most tokens per second; the smallest of equals.

    >>> best_length(jnp.array([1.0, 0.0]), jnp.full(2, 0.1), jnp.zeros(2), 4).tolist()
    [4, 0]
    """
    powers = jnp.cumprod(jnp.broadcast_to(alpha[:, None], (alpha.shape[0], gamma)), axis=1)
    tokens = 1.0 + jnp.pad(jnp.cumsum(powers, axis=1), ((0, 0), (1, 0)))
    guesses = jnp.arange(gamma + 1, dtype=jnp.float32)[None, :]
    cost = 1.0 + guesses * jnp.broadcast_to(c + extra, alpha.shape)[:, None]
    return jnp.argmax(tokens / cost, axis=1).astype(jnp.int32)
