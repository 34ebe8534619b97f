"""Timing calls and whole generations, interleaved: what else the machine does falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from jaxspec.analysis.statistics import Spread
from jaxspec.core import RoundInfo
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared


def interleave(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Seconds of each call [calls, repeats], interleaved: a, b, c, a, b, c, ...; each waits for its result."""
    seconds = np.zeros((len(calls), repeats))
    for repeat in range(repeats):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[index, repeat] = time.perf_counter() - start
    return seconds


def run_all(generations: Iterable[Prepared]) -> None:
    """Whole generations, one after the other, left on the device: what is timed."""
    for prepared in generations:
        loop.run(prepared).tokens.block_until_ready()


def start_all(generations: Iterable[Prepared]) -> None:
    """Of each, prefill and the first token, left on the device."""
    for prepared in generations:
        next(loop.iterate_rounds(prepared))[0].tokens.block_until_ready()


def latency(variants: Sequence[Sequence[Prepared]], repeats: int) -> list[tuple[Spread, Spread] | None]:
    """Milliseconds per token to a reader of the stream: each round's time over the tokens it brought.

    Args:
        variants: each of whole generations, as many as the others have; interleaved, one by one.
        repeats: of all of them.

    Returns:
        For each variant the 50th and 95th percentile over all of its tokens, over the repeats; None if no row goes
        beyond its first token.
    """
    taken: list[list[list[float]]] = [[[] for _ in range(repeats)] for _ in variants]
    for some in variants:
        token_ms(some[0])  # compiles
    for repeat in range(repeats):
        for group in zip(*variants, strict=True):
            for index, prepared in enumerate(group):
                taken[index][repeat] += token_ms(prepared)
    shares = [np.array([np.percentile(each, (50, 95)) for each in some]).T if some[0] else None for some in taken]
    return [None if found is None else (Spread.of(found[0]), Spread.of(found[1])) for found in shares]


def token_ms(prepared: Prepared) -> list[float]:
    """Milliseconds of every token of a generation but each row's first, which is prefill's."""
    counts = [
        (took, np.asarray(info.num_committed).tolist()) for took, info in timed_rounds(prepared) if info is not None
    ]
    return [took / n for took, committed in counts for n in committed for _ in range(n)]


def timed_rounds(prepared: Prepared) -> Iterator[tuple[float, RoundInfo | None]]:
    """Milliseconds of prefill (with None) and of each round, and what happened in it."""
    began = time.perf_counter()
    for state, info in loop.iterate_rounds(prepared):
        jax.block_until_ready((state, info))
        yield 1e3 * (time.perf_counter() - began), info
        began = time.perf_counter()
