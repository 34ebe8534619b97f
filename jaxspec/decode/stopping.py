"""Stop strings and text that grows: only the host can see them, so rows are cut between rounds.

Text is given out in whole words and whole characters only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.base import RoundInfo, State
from jaxspec.decode import loop
from jaxspec.decode.request import Job

REPLACEMENT = "\ufffd"  # what a tokenizer decodes half of a multi-byte character to


def run(job: Job, stop: Sequence[str]) -> loop.Outcome:
    """`loop.run`, ending a row when its text holds a stop string."""
    infos = []
    for state, info in loop.rounds(job, edit(job.target.tokenizer, stop)):
        if info is not None:
            infos.append(info)
        last = state
    return loop.outcome(last, _trace(infos, len(job.request.limit), job.decoder.nodes), job.max_new_tokens)


def edit(tokenizer: Any, stop: Sequence[str]) -> loop.Edit:
    """For `loop.rounds`: ends every row whose text holds a stop string at the token that completes it.

    The tokens after the string were then never committed, nor counted.
    """
    return functools.partial(_cut, tokenizer, stop)


def _cut(tokenizer: Any, stop: Sequence[str], state: State, info: RoundInfo | None) -> tuple[State, RoundInfo | None]:
    tokens, length, start = (np.asarray(x) for x in (state.tokens, state.length, state.start))
    stopped, over = np.zeros(length.shape, bool), np.zeros_like(length)
    for row in range(len(length)):
        new = tokens[row, start[row] : length[row]].tolist()
        if find_stop(decode(tokenizer, new), stop) is not None:
            over[row] = len(new) - tokens_needed(tokenizer, new, stop)
            stopped[row] = True
    stats = state.stats._replace(emitted=state.stats.emitted - over)
    if info is not None:
        committed = info.num_committed - over
        lost = jnp.minimum(info.num_accepted, info.num_committed) - jnp.minimum(info.num_accepted, committed)
        stats = stats._replace(accepted=stats.accepted - lost)
        info = info._replace(num_committed=committed)
    done = jnp.logical_or(state.done, stopped)  # stays on the state's devices
    return state._replace(length=state.length - over, done=done, stats=stats), info


def _trace(infos: Sequence[RoundInfo], batch: int, nodes: int) -> loop.Trace:
    """The rounds that were run one by one, as `loop.run` reports them."""
    if infos:
        # on the host: on a device it would be a program, and a compilation, for each number of rounds
        return loop.Trace(*jax.tree.map(lambda *x: np.stack(x, axis=1), *jax.device_get(infos)))
    none = jnp.zeros((batch, 0), jnp.int32)
    return loop.Trace(jnp.zeros((batch, 0, nodes), jnp.int32), none, none, none, none)


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of token ids, without special tokens."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins, None if none occurs.

    >>> find_stop("one. two", [".", "two"])
    3
    """
    found = [at for at in (text.find(s) for s in stop) if at >= 0]
    return min(found) if found else None


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop strings.

    >>> truncate_at_stop("one. two", ["."]), truncate_at_stop("one", [])
    ('one', 'one')
    """
    return text[: find_stop(text, stop)]


def stable_prefix(text: str, stop: Sequence[str] = ()) -> str:
    """The part of a growing text that later tokens can no longer change, nor turn into a stop string.

    A word is held back until a space or line break follows it (its next piece may still come, and some tokenizers
    change what stands before a piece); ideographs count as words of their own. Half a character is held back too.

    >>> stable_prefix("ein Beisp"), stable_prefix("ein Beispiel "), stable_prefix("a st", stop=["a stop"])
    ('ein ', 'ein Beispiel ', '')
    """
    text = text.rstrip(REPLACEMENT)
    end = len(text)
    while end > 0 and not (text[end - 1].isspace() or _ideograph(text[end - 1])):
        end -= 1
    for string in stop:
        for size in range(min(len(string) - 1, len(text)), 0, -1):
            if text.endswith(string[:size]):
                end = min(end, len(text) - size)
                break
    return text[:end]


def tokens_needed(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str]) -> int:
    """How many of the tokens it takes until their text holds a stop string."""
    low, high = 0, len(tokens)
    while low < high:  # the text of a prefix grows with the prefix
        middle = (low + high) // 2
        if find_stop(decode(tokenizer, tokens[:middle]), stop) is None:
            low = middle + 1
        else:
            high = middle
    return low


def _ideograph(character: str) -> bool:
    """Scripts written without spaces: kana, CJK ideographs, Hangul and full-width forms."""
    code = ord(character)
    return 0x3040 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7A3 or 0xF900 <= code <= 0xFAFF or code >= 0x20000
