"""Times calls and whole generations, interleaved, so that other load falls on all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.analysis.statistics import Spread
from jaxspec.core import RoundInfo
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared


def interleave(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Times calls in turn (a, b, c, a, b, c, ...), in seconds [calls, repeats]; each waits for its result."""
    seconds = np.zeros((len(calls), repeats))
    for repeat in range(repeats):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[index, repeat] = time.perf_counter() - start
    return seconds


def run_all(generations: Iterable[Prepared]) -> None:
    """Runs whole generations, one after the other, and leaves their texts on the device."""
    for prepared in generations:
        loop.run(prepared).tokens.block_until_ready()


def start_all(generations: Iterable[Prepared]) -> None:
    """Runs the prefill of each generation, and leaves its first token on the device."""
    for prepared in generations:
        next(loop.iterate_rounds(prepared))[0].tokens.block_until_ready()


def only_first(prepared: Prepared) -> Prepared:
    """Ends a generation with the token that prefill yields; the program stays the same."""
    return prepared._replace(
        request=prepared.request._replace(max_new_tokens=jnp.ones_like(prepared.request.max_new_tokens))
    )


def latency(variants: Sequence[Sequence[Prepared]], repeats: int) -> list[tuple[Spread, Spread] | None]:
    """Times tokens as a reader of the stream gets them: each round's milliseconds over the tokens it brought.

    Args:
        variants: each of whole generations, as many as the others have; interleaved, one by one.
        repeats: how often all variants are run.

    Returns:
        For each variant the 50th and 95th percentile over all of its tokens, over the repeats; None if no row goes
        beyond its first token.
    """
    times: list[list[list[float]]] = [[[] for _ in range(repeats)] for _ in variants]  # by variant and repeat
    for generations in variants:
        token_ms(generations[0])  # compiles
    for repeat in range(repeats):
        for group in zip(*variants, strict=True):
            for index, prepared in enumerate(group):
                times[index][repeat] += token_ms(prepared)
    percentiles = [np.array([np.percentile(ms, (50, 95)) for ms in runs]).T if runs[0] else None for runs in times]
    return [None if ends is None else (Spread.of(ends[0]), Spread.of(ends[1])) for ends in percentiles]


def token_ms(prepared: Prepared) -> list[float]:
    """Times every token of a generation but each row's first, which is prefill's, in milliseconds."""
    counts = [
        (took, np.asarray(info.num_committed).tolist()) for took, info in timed_rounds(prepared) if info is not None
    ]
    return [took / n for took, committed in counts for n in committed for _ in range(n)]


def timed_rounds(prepared: Prepared) -> Iterator[tuple[float, RoundInfo | None]]:
    """Yields the milliseconds of prefill (with None) and of each round, with its `RoundInfo`."""
    began = time.perf_counter()
    for state, info in loop.iterate_rounds(prepared):
        jax.block_until_ready((state, info))
        yield 1e3 * (time.perf_counter() - began), info
        began = time.perf_counter()
