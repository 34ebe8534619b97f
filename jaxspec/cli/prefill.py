"""Reads prompts apart from decoding: timed by itself, and watched where prompts are long."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import progress
from jaxspec.cli.console import Console
from jaxspec.core import State, chunks
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared

LONG = 4 * chunks.LONGEST  # tokens: longer prompts are watched
BY_ROW = ("read_tokens", "prefill_seconds")  # fields of a record


class WatchedPrefill:
    """Prefills a generation, as `loop.Begin`, and remembers the time.

    On a terminal the host reads long prompts chunk by chunk to show a bar, since a running program
    cannot report progress. If the models cannot read in chunks (an encoder; a drafter without
    `before`), it shows a status line.

    Attributes:
        is_watched: whether progress is shown.
        seconds: the time of the last prefill.
    """

    def __init__(self, prepared: Prepared, err: Console):
        self.is_watched = err.is_terminal and bool(jnp.max(prepared.prompt.length) > LONG)
        self.seconds = 0.0
        self._err = err
        self._in_chunks = self.is_watched and loop.goes_in_chunks(prepared)

    def __call__(self, prepared: Prepared) -> State:
        """Prefills and shows progress."""
        start = time.perf_counter()
        longest = int(jnp.max(prepared.prompt.length))
        if self._in_chunks:
            with progress.bar(transient=True, remaining=True) as bar:
                task = bar.add_task("reading the prompt, in tokens", total=longest)
                state = self.quietly(prepared, lambda tokens: bar.update(task, completed=tokens))
        elif self.is_watched:
            with self._err.status(f"reading {longest:,} tokens of the prompt"):
                state = self.quietly(prepared)
        else:
            state = self.quietly(prepared)
        self.seconds = time.perf_counter() - start
        return state

    def quietly(
        self, prepared: Prepared, report: Callable[[int], object] = lambda tokens: None
    ) -> State:
        """Prefills with the same programs and waits; shows no progress, keeps no time."""
        if self._in_chunks:
            state = loop.prefill_in_chunks(prepared, report=report)
        else:
            state = loop.prefill(prepared)
        return jax.block_until_ready(state)


def read_tokens(prepared: Prepared) -> np.ndarray:
    """Counts the tokens of each prompt that prefill reads: all but a shared prefix.

    >>> from jaxspec.testing import prepared_table
    >>> read_tokens(prepared_table()).tolist()
    [2, 1]
    """
    length = np.asarray(prepared.prompt.length)
    if prepared.before is None:
        return length
    return length - np.asarray(prepared.before.start)


def cut(prepared: Prepared) -> Prepared:
    """Keeps the first two chunks of each prompt: enough to compile the programs of the rest.

    Keeps an encoder's prompt whole, since its pass has the padded width of the prompt.
    """
    if prepared.target.lm.limits.start_token is not None:
        return prepared
    limit = 2 * chunks.LONGEST
    if prepared.before is not None:
        limit += int(jnp.max(prepared.before.start))
    prompt = prepared.prompt._replace(length=jnp.minimum(prepared.prompt.length, limit))
    return prepared._replace(prompt=prompt)
