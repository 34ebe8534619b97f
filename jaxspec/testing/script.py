"""A compiled call of a decoder whose draws are scripted, and recorded.

Axis letters as in `jaxspec.core`; E is the most draws that a row can write down, which is the size
of a script, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxspec.core import Decoder, Keys, token_rows
from jaxspec.testing.tape import Record, Script, Tape, Wider


class ScriptedCall:
    """A call of a decoder on rows of a batch, compiled.

    Attributes:
        sites: the places in the code that draw, in words.
        capacity: E; `run` doubles it, with an OverflowError, where it does not suffice.

    `vocab` is an estimate, too: it is enlarged where a distribution is wider.
    """

    def __init__(self, call: Callable[[Keys, Any, Any], Any], capacity: int, vocab: int):
        self.capacity = capacity
        self.sites = list[str]()
        self._vocab = vocab
        self._compiled = jax.jit(
            functools.partial(_played, call, self.sites), static_argnames="vocab"
        )

    def run(
        self, which: Int[np.ndarray, " B"], shared: Any, rows: Any, script: Script
    ) -> tuple[Any, Record]:
        """Runs a call on rows with shared arguments; returns the state without keys, and the draws.

        `which` numbers the rows' keys (`row_keys`). An OverflowError says that a row has drawn more
        than E times: the capacity is larger now, and the call is to be tried again.
        """
        while True:
            try:
                state, record = self._compiled(which, shared, rows, script, vocab=self._vocab)
                break
            except Wider as error:
                self._vocab = error.args[0]
        if int(np.max(np.asarray(record.count))) > script.key.shape[1]:
            self.capacity = 2 * script.key.shape[1]
            raise OverflowError(f"a row draws more than {script.key.shape[1]} times in one call")
        return state, record


@functools.lru_cache
def init_program(decoder: Decoder, headroom: int, vocab: int) -> ScriptedCall:
    """Makes the program of `decoder.init`, on rows of (prompt, request without keys).

    `shared`: the weights and caches, followed by other values that rows share.
    """

    def call(keys: Keys, shared: Any, rows: Any) -> Any:
        (weights, before), tables = shared
        prompt, request = token_rows.put_in_shared(rows, tables)
        state = decoder.init(weights, prompt, request._replace(keys=keys), headroom, before)
        return token_rows.take_out_shared(state)[0]

    return ScriptedCall(call, 8, vocab)


@functools.lru_cache
def step_program(decoder: Decoder, vocab: int) -> ScriptedCall:
    """Makes the program of `decoder.step`, on rows of State without keys; `shared`: weights, and
    what rows share.
    """

    def call(keys: Keys, shared: Any, rows: Any) -> Any:
        weights, tables = shared
        state = token_rows.put_in_shared(rows, tables)
        state = decoder.step(weights, state._replace(request=state.request._replace(keys=keys)))[0]
        return token_rows.take_out_shared(state)[0]

    return ScriptedCall(call, 3 * decoder.nodes + 4, vocab)


def row_keys(which: Int[Array, " B"]) -> Keys:
    """Makes the keys of rows from their numbers."""
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0, impl="threefry2x32")))(
        which
    )


def _played(
    call: Callable,
    sites: list[str],
    which: Int[Array, " B"],
    shared: Any,
    rows: Any,
    script: Script,
    *,
    vocab: int,
) -> tuple[Any, Record]:
    tape = Tape(script, vocab, sites)
    with tape.playing():
        state = call(row_keys(which), shared, rows)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    if any(shape[:1] != which.shape for shape in shapes):
        raise ValueError(
            f"not every array of a state has the batch ({len(which)}) first: got {sorted(shapes)}"
        )
    return state._replace(request=state.request._replace(keys=None)), tape.record()
