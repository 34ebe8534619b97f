"""When a generation does what: the passes of target and drafter, timed round by round, for a trace diagram."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.analysis import cost
from jaxspec.base import Model, Prompt
from jaxspec.decode import loop, request

KINDS = ("target prefill", "draft prefill", "draft", "target")


class Span(NamedTuple):
    """One block: what ran, from when, for how long; milliseconds."""

    kind: str
    start: float
    duration: float


def record(
    target: Model,
    drafter: Model | None,
    prompt: Sequence[str] | str | Prompt,
    *,
    gamma: int,
    max_new_tokens: int,
    repeats: int = 5,
) -> list[Span]:
    """The blocks of one greedy generation.

    Prefill and each round are timed (medians over the repeats of the same generation). Within a round nothing can be
    timed without stopping it: its time is shared out by the measured costs of a draft pass and of the verify pass.

    Args:
        target, drafter: the models; None decodes plainly.
        prompt: one prompt.
        gamma: guesses a round; ignored without a drafter.
        max_new_tokens: as in `jaxspec.generate`.
        repeats: how often it is run.

    Raises:
        ValueError: as `jaxspec.generate`, more than one prompt, or repeats < 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxspec.testing import table_model
        >>> model, prompt = table_model(jax.random.key(1), vocab=5), Prompt(jnp.array([[3]]), jnp.array([1]))
        >>> spans = record(model, model, prompt, gamma=2, max_new_tokens=7, repeats=1)
        >>> [span.kind for span in spans][2:]  # six tokens after the first, in two rounds
        ['draft', 'draft', 'target', 'draft', 'draft', 'target']
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: expected at least 1")
    encoded = request.encode(target, prompt)
    if len(encoded.length) != 1:
        raise ValueError(f"got {len(encoded.length)} prompts: expected one")
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens)
    plain = request.prepare(target, encoded, gamma=0, **options)
    job = plain if drafter is None else request.prepare(target, encoded, drafter=drafter, gamma=gamma, **options)
    first = np.median([_first(plain) for _ in range(repeats + 1)][1:])
    runs = np.median([_rounds(job) for _ in range(repeats + 1)][1:], axis=0)  # the first one compiles
    spans = [Span("target prefill", 0.0, float(first))]
    if drafter is None:
        return spans + _after(spans[-1], [[("target", float(taken))] for taken in runs[1:]])
    spans.append(Span("draft prefill", float(first), max(0.0, float(runs[0] - first))))
    passes = cost.measure(
        target, drafter, encoded, gamma=gamma, repeats=repeats, inner=5, max_new_tokens=max_new_tokens
    )
    shares = np.array([passes.draft_ms] * gamma + [passes.verify_ms])
    shares, kinds = shares / shares.sum(), ["draft"] * gamma + ["target"]
    return spans + _after(spans[-1], [list(zip(kinds, (taken * shares).tolist(), strict=True)) for taken in runs[1:]])


def _after(last: Span, rounds: Sequence[Sequence[tuple[str, float]]]) -> list[Span]:
    """Blocks of rounds one after the other, behind the last block so far."""
    spans, at = [], last.start + last.duration
    for kind, duration in (block for blocks in rounds for block in blocks):
        spans.append(Span(kind, at, duration))
        at += duration
    return spans


def _first(job: request.Job) -> float:
    began = time.perf_counter()
    jax.block_until_ready(loop.start(*job))
    return 1e3 * (time.perf_counter() - began)


def _rounds(job: request.Job) -> list[float]:
    """Milliseconds of prefill and of each round."""
    began = time.perf_counter()
    state, taken = jax.block_until_ready(loop.start(*job)), []
    taken.append(1e3 * (time.perf_counter() - began))
    while not np.asarray(state.done).all():
        began = time.perf_counter()
        state, _ = jax.block_until_ready(loop.advance(job.decoder, job.keys, job.weights, state))
        taken.append(1e3 * (time.perf_counter() - began))
    return taken
