"""Reads prompts apart from decoding: timed by itself, and watched where prompts are long."""

from __future__ import annotations

import functools
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
BY_ROW = ("read_tokens", "prefill_seconds")  # of a record


class WatchedPrefill:
    """Makes the beginning of a generation, as `loop.Begin`, and remembers what it took.

    On a terminal the host reads long prompts chunk by chunk, so that a bar says how far it is: a
    program could not tell while it runs. Where the models cannot be so read (an encoder; a drafter
    without `before`), a line says what is being done.

    Attributes:
        is_watched: whether progress is shown.
        seconds: the time of the last beginning.
    """

    def __init__(self, prepared: Prepared, err: Console):
        self.is_watched = err.is_terminal and bool(jnp.max(prepared.prompt.length) > LONG)
        self.seconds = 0.0
        self._err = err
        self._in_chunks = self.is_watched and loop.goes_in_chunks(prepared)

    def __call__(self, prepared: Prepared) -> State:
        """Makes the beginning, and shows progress."""
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
        """Makes the beginning by the same programs, and waits for it; shows and remembers
        nothing.
        """
        if self._in_chunks:
            begin = functools.partial(loop.prefill_in_chunks, report=report)
        else:
            begin = loop.prefill
        return jax.block_until_ready(begin(prepared))


def read_tokens(prepared: Prepared) -> np.ndarray:
    """Counts the tokens of each prompt that prefill reads: all but those that were read before,
    with a prefix.

    >>> from jaxspec.testing import prepared_table
    >>> read_tokens(prepared_table()).tolist()
    [2, 1]
    """
    length = np.asarray(prepared.prompt.length)
    if prepared.before is None:
        return length
    return length - np.asarray(prepared.before.start)


def cut(prepared: Prepared) -> Prepared:
    """Returns the same with the first two chunks of each prompt: it compiles what the whole prompts
    need.

    Of an encoder's prompt all is kept: its passes are as wide as the prompt is padded, whatever its
    length.
    """
    if prepared.target.lm.limits.start_token is not None:
        return prepared
    longest = 2 * chunks.LONGEST + (
        0 if prepared.before is None else int(jnp.max(prepared.before.start))
    )
    prompt = prepared.prompt._replace(length=jnp.minimum(prepared.prompt.length, longest))
    return prepared._replace(prompt=prompt)
