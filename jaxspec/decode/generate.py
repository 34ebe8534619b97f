"""The front door: `generate` and `stream`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import buffers
from jaxspec.base import AcceptRule, Drafter, Model, Prompt, RoundInfo, Stats
from jaxspec.decode import loop, text
from jaxspec.decode.request import Job, prepare


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    Attributes:
        texts: one per prompt, without the prompt, cut before a stop string; empty if the target has no tokenizer.
        tokens: the new tokens [batch, longest], padded with 0.
        lengths: how many of them are real [batch].
        stats: counts per row; see `base.Stats`.
        trace: what each round drafted and kept; see `loop.Trace`.
    """

    texts: list[str]
    tokens: np.ndarray
    lengths: np.ndarray
    stats: Stats
    trace: loop.Trace


@dataclasses.dataclass(frozen=True)
class Piece:
    """What `stream` yields: text that will not change any more, and the round it came from.

    Attributes:
        text: new text, whole words and characters only; may be empty.
        tokens: the tokens that the round committed.
        draft: the guesses of the round (empty for the first piece, which comes from prefill).
        num_accepted: how many of them were accepted.
        stats: counts so far.
        done: whether this was the last piece.
    """

    text: str
    tokens: list[int]
    draft: list[int]
    num_accepted: int
    stats: Stats
    done: bool


def generate(
    target: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    drafter: Model | Drafter | None = None,
    gamma: int = 5,
    accept: AcceptRule | None = None,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    max_new_tokens: Any = 128,
    key: Any = None,
    eos_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
) -> Generation:
    """Generates from `target`, faster with a `drafter`, with the same law of the output.

    The whole generation is one jitted program, from prefill to the last token of the longest row; every row accepts
    its own number of guesses per round. Calls whose prompts and limits fall into the same buckets (`buffers.bucket`)
    share a program, whatever their temperature, top_k, top_p, key and text. With stop strings, which only the host
    can see, rounds are run one by one.

    Args:
        target: the model whose law the output has.
        prompts: text, or a `jaxspec.Prompt` of right-padded token ids [batch, prompt].
        drafter: a smaller Model with the same tokenizer, any Drafter, or None for plain decoding.
        gamma: guesses per round.
        accept: the acceptance rule; `jaxspec.accept.rejection()` by default.
        temperature, top_k, top_p: a number for all rows, or one per row. Temperature 0 is greedy.
        max_new_tokens: most new tokens; a number, or one per row.
        key: a `jax.random.key`, or one per row; required unless temperature is 0.
        eos_ids: tokens that end a row (kept in the output); by default the tokenizer's.
        stop: strings that end a row (cut from its text).

    Raises:
        ValueError: input that cannot be decoded from; the message says what was got and what was expected.
        FloatingPointError: the target's logits were not finite.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1], [2, 0]]), jax.numpy.array([2, 1]))
        >>> out = jaxspec.generate(target, prompt, drafter=draft, gamma=3, max_new_tokens=8)
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=8)
        >>> bool((out.tokens == plain.tokens).all()), out.lengths.tolist()
        (True, [8, 8])

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192.
    """
    job = prepare(
        target,
        prompts,
        drafter=drafter,
        gamma=gamma,
        accept=accept,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        key=key,
        eos_ids=eos_ids,
    )
    outcome = _run_until(job, target, _stop_strings(stop, target)) if stop else loop.run(*job)
    outcome = jax.tree.map(np.asarray, outcome)
    if outcome.failed.any():
        rows = np.flatnonzero(outcome.failed).tolist()
        raise FloatingPointError(
            f"the target's logits were not finite for prompts {rows}: check its parameters (a bfloat16 overflow, a "
            "damaged checkpoint) with jaxspec.generate(target, prompts, max_new_tokens=1)"
        )
    width = int(outcome.length.max())
    real = np.arange(width)[None, :] < outcome.length[:, None]
    tokens = np.where(real, outcome.tokens[:, :width], 0)
    texts = _texts(target, tokens, outcome.length, stop)
    return Generation(texts, tokens, outcome.length, outcome.stats, outcome.trace)


def stream(target: Model, prompt: str | Prompt, *, stop: Sequence[str] = (), **options: Any) -> Iterator[Piece]:
    """Generates from one prompt and yields text as rounds finish; the arguments are `generate`'s.

    The pieces' texts joined are the text that `generate` returns. No character or word is ever cut in half: a word
    is yielded when what follows it shows that it is complete.

    Raises:
        ValueError, FloatingPointError: as `generate`; also for more than one prompt.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> [len(piece.tokens) for piece in jaxspec.stream(model, prompt, drafter=model, gamma=3, max_new_tokens=9)]
        [1, 4, 4]
    """
    job = prepare(target, prompt, **options)
    if job.prompt.tokens.shape[0] != 1:
        raise ValueError(f"stream takes one prompt, got {job.prompt.tokens.shape[0]}: use generate for a batch")
    stop = _stop_strings(stop, target)
    return _pieces(job, target, stop)


def _pieces(job: Job, target: Model, stop: Sequence[str]) -> Iterator[Piece]:
    state = loop.start(*job)
    committed: list[int] = []
    shown, info = "", None
    while True:
        seen = jax.tree.map(
            np.asarray, (state.tokens, state.length, state.start, state.done, state.failed, state.stats)
        )
        tokens, length, start, done, failed, stats = seen
        if failed[0]:
            raise FloatingPointError("the target's logits are not finite: check its parameters")
        new = tokens[0, start[0] + len(committed) : length[0]].tolist()
        committed += new
        ended = bool(done[0])
        whole, hit = "", None
        if target.tokenizer is not None:
            whole = text.decode(target.tokenizer, committed)
            hit = text.find_stop(whole, stop)
        ended = ended or hit is not None
        visible = whole[:hit] if ended else text.settled(whole, stop)
        fresh = visible[len(shown) :] if visible.startswith(shown) else ""
        shown += fresh
        yield _piece(fresh, new, info, stats, ended)
        if ended:
            return
        state, info = loop.advance(job.decoder, job.keys, job.weights, state)


def _piece(fresh: str, new: list[int], info: RoundInfo | None, stats: Stats, ended: bool) -> Piece:
    if info is None:
        return Piece(fresh, new, [], 0, stats, ended)
    drafted = np.asarray(info.draft)[0, : int(info.draft_length[0])].tolist()
    return Piece(fresh, new, drafted, int(info.num_accepted[0]), stats, ended)


def _run_until(job: Job, target: Model, stop: Sequence[str]) -> loop.Outcome:
    """`loop.run`, round by round from the host, ending a row when its text holds a stop string."""
    state, infos = loop.start(*job), []
    while True:
        tokens, length, start = (np.asarray(x) for x in (state.tokens, state.length, state.start))
        done, over = np.asarray(state.done).copy(), np.zeros_like(length)
        for row in range(len(length)):
            new = tokens[row, start[row] : length[row]].tolist()
            if text.find_stop(text.decode(target.tokenizer, new), stop) is not None:
                over[row] = len(new) - text.tokens_needed(target.tokenizer, new, stop)
                done[row] = True
        stats = state.stats._replace(emitted=state.stats.emitted - jnp.asarray(over))
        state = state._replace(length=state.length - jnp.asarray(over), done=jnp.asarray(done), stats=stats)
        if done.all():
            break
        state, info = loop.advance(job.decoder, job.keys, job.weights, state)
        infos.append(info)
    new = buffers.window(state.tokens, state.start, job.max_new_tokens)
    return loop.Outcome(new, state.length - state.start, state.failed, state.stats, _trace(infos, job, len(length)))


def _trace(infos: Sequence[RoundInfo], job: Job, batch: int) -> loop.Trace:
    """The rounds that were run one by one, as `loop.run` reports them."""
    if infos:
        return loop.Trace(*jax.tree.map(lambda *x: jnp.stack(x, axis=1), *infos))
    none = jnp.zeros((batch, 0), jnp.int32)
    return loop.Trace(jnp.zeros((batch, 0, job.decoder.gamma), jnp.int32), none, none, none)


def _stop_strings(stop: Sequence[str], target: Model) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if strings and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, which this model lacks: use eos_ids")
    if any(not string for string in strings):
        raise ValueError("stop has an empty string: it would end every row at once")
    return strings


def _texts(target: Model, tokens: np.ndarray, length: np.ndarray, stop: Sequence[str]) -> list[str]:
    if target.tokenizer is None:
        return []
    whole = [text.decode(target.tokenizer, row[:n].tolist()) for row, n in zip(tokens, length, strict=True)]
    strings = (stop,) if isinstance(stop, str) else stop
    return [t[: text.find_stop(t, strings)] for t in whole]
