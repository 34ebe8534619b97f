"""Jobs as they run: whole, and round by round; what they say, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.analysis.estimate import spread

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


def latency(ways: Sequence[Sequence[Job]], repeats: int) -> list[dict[str, dict[str, float]] | None]:
    """Milliseconds per token to a reader of the stream: each round's time over the tokens it brought.

    Args:
        ways: to decode, each of whole generations, as many as the others have; they take turns, one by one.
        repeats: of all of them.

    Returns:
        For each way the 50th and 95th percentile ("p50", "p95") over all of its tokens, as a spread over the repeats;
        None if no row goes beyond its first token.
    """
    taken: list[list[list[float]]] = [[[] for _ in range(repeats)] for _ in ways]
    for jobs in ways:
        token_ms(jobs[0])  # compiles
    for repeat in range(repeats):
        for group in zip(*ways, strict=True):
            for way, job in enumerate(group):
                taken[way][repeat] += token_ms(job)
    return [_percentiles(some) if some[0] else None for some in taken]


def token_ms(job: Job) -> list[float]:
    """Milliseconds of every token of a generation but each row's first, which is prefill's."""
    from jaxspec.decode import loop

    state, taken = loop.start(*job), []
    while not np.asarray(state.done).all():
        began = time.perf_counter()
        state, info = loop.advance(job.decoder, job.keys, job.weights, state)
        kept = np.asarray(info.kept)
        took = 1e3 * (time.perf_counter() - began)
        taken += [took / n for n in kept.tolist() for _ in range(n)]
    return taken


def _percentiles(repeats: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    return {f"p{share}": spread(np.array([np.percentile(each, share) for each in repeats])) for share in (50, 95)}
