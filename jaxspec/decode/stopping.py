"""Stop strings: only the host can see them, so rounds are run one by one and rows are cut between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import buffers
from jaxspec.base import DecodeState, RoundInfo
from jaxspec.decode import loop, text
from jaxspec.decode.request import Job


def run(job: Job, tokenizer: Any, stop: Sequence[str]) -> loop.Outcome:
    """`loop.run`, ending a row when its text holds a stop string."""
    state, infos = cut(loop.start(*job), None, tokenizer, stop)[0], []
    while not np.asarray(state.done).all():
        state, info = loop.advance(job.decoder, job.keys, job.weights, state)
        state, info = cut(state, info, tokenizer, stop)
        infos.append(info)
    new = buffers.window(state.tokens, state.start, job.max_new_tokens)
    trace = _trace(infos, len(state.length), job.decoder.gamma)
    return loop.Outcome(new, state.length - state.start, state.failed, state.stats, trace)


def cut(
    state: DecodeState, info: RoundInfo | None, tokenizer: Any, stop: Sequence[str]
) -> tuple[DecodeState, RoundInfo | None]:
    """Ends every row whose text holds a stop string at the token that completes it.

    Args:
        state: after prefill or a round.
        info: of that round; None after prefill.
        tokenizer: makes text of the rows.
        stop: the strings.

    Returns:
        The state and the info, in which the tokens behind the string were never committed, nor counted.
    """
    tokens, length, start = (np.asarray(x) for x in (state.tokens, state.length, state.start))
    stopped, over = np.zeros(length.shape, bool), np.zeros_like(length)
    for row in range(len(length)):
        new = tokens[row, start[row] : length[row]].tolist()
        if text.find_stop(text.decode(tokenizer, new), stop) is not None:
            over[row] = len(new) - text.tokens_needed(tokenizer, new, stop)
            stopped[row] = True
    stats = state.stats._replace(emitted=state.stats.emitted - over)
    if info is not None:
        kept = info.kept - over
        lost = jnp.minimum(info.num_accepted, info.kept) - jnp.minimum(info.num_accepted, kept)
        stats = stats._replace(accepted=stats.accepted - lost)
        info = info._replace(kept=kept)
    done = jnp.logical_or(state.done, stopped)  # stays on the state's devices
    return state._replace(length=state.length - over, done=done, stats=stats), info


def _trace(infos: Sequence[RoundInfo | None], batch: int, gamma: int) -> loop.Trace:
    """The rounds that were run one by one, as `loop.run` reports them."""
    if infos:
        return loop.Trace(*jax.tree.map(lambda *x: jnp.stack(x, axis=1), *infos))
    none = jnp.zeros((batch, 0), jnp.int32)
    return loop.Trace(jnp.zeros((batch, 0, gamma), jnp.int32), none, none, none)
