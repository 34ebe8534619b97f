"""Jobs as they run: whole, and round by round; what they say, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxspec.decode.loop import Outcome
    from jaxspec.decode.request import Job


def run(job: Job) -> Outcome:
    """One whole generation, on the host."""
    import jax

    from jaxspec.decode import loop

    return jax.tree.map(np.asarray, loop.run(*job))


def tokens(outcomes: Sequence[Outcome]) -> list[list[int]]:
    """The new tokens of every row of some generations, without their padding."""
    rows = [(t, n) for o in outcomes for t, n in zip(np.asarray(o.tokens), np.asarray(o.length), strict=True)]
    return [row[:length].tolist() for row, length in rows]


def latency(job: Job) -> dict[str, float] | None:
    """Milliseconds per token to a reader of the stream: each round's time over the tokens it brought.

    Returns:
        The 50th and 95th percentile over tokens; None if no row goes beyond its first token.
    """
    from jaxspec.decode import loop

    def step(state):
        return loop.advance(job.decoder, job.keys, job.weights, state)

    step(loop.start(*job))  # compiles
    state, taken = loop.start(*job), []
    while not np.asarray(state.done).all():
        began = time.perf_counter()
        state, info = step(state)
        kept = np.asarray(info.kept)
        took = 1e3 * (time.perf_counter() - began)
        taken += [took / n for n in kept.tolist() for _ in range(n)]
    if not taken:
        return None
    return {"p50": float(np.percentile(taken, 50)), "p95": float(np.percentile(taken, 95))}
