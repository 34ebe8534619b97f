"""The passes of target and drafter in a generation, timed round by round, for a trace diagram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.analysis import cost
from jaxspec.decode.request import Prepared

KINDS = ("target prefill", "draft prefill", "draft", "target")


class Span(NamedTuple):
    """One block: what ran, from when, for how long; milliseconds."""

    kind: str
    start: float
    duration: float


def record(prepared: Prepared, *, repeats: int = 5) -> list[Span]:
    """The blocks of one generation.

    Prefill and each round are timed (medians over the repeats of the same generation). Within a
    round nothing can be timed without stopping it: its time is divided in proportion to the
    measured costs of draft passes and verify pass.

    Example:
        >>> from jaxspec.decode import batches
        >>> from jaxspec.testing import prepared_table
        >>> prepared = batches.take(prepared_table(gamma=2, max_new_tokens=7), [0])
        >>> spans = record(prepared.replace(drafter=prepared.target), repeats=1)
        >>> [span.kind for span in spans][2:]  # six tokens after the first, in two rounds
        ['draft', 'draft', 'target', 'draft', 'draft', 'target']
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}: expected at least 1")
    if len(prepared.prompt.length) != 1:
        raise ValueError(f"got {len(prepared.prompt.length)} prompts: expected one")
    plain = prepared.plain()
    only_first = plain._replace(request=plain.request._replace(max_new_tokens=np.ones(1, np.int32)))
    first = np.median([next(cost.timed_rounds(only_first))[0] for _ in range(repeats + 1)][1:])
    every = [[took for took, _ in cost.timed_rounds(prepared)] for _ in range(repeats + 1)]
    runs = np.median(every[1:], axis=0)  # the first one compiles
    spans = [Span("target prefill", 0.0, float(first))]
    if prepared.drafter is None:
        return spans + _after(spans[-1], [[("target", float(ms))] for ms in runs[1:]])
    spans.append(Span("draft prefill", float(first), max(0.0, float(runs[0] - first))))
    passes, gamma = cost.measure(prepared, repeats=repeats, inner=5), prepared.decoder.gamma
    shares = np.array([passes.draft_ms] * gamma + [passes.verify_ms])
    shares, kinds = shares / shares.sum(), ["draft"] * gamma + ["target"]
    return spans + _after(
        spans[-1], [list(zip(kinds, (ms * shares).tolist(), strict=True)) for ms in runs[1:]]
    )


def _after(last: Span, rounds: Sequence[Sequence[tuple[str, float]]]) -> list[Span]:
    """Blocks of rounds one after the other, after the last block so far."""
    spans, at = [], last.start + last.duration
    for kind, duration in (block for blocks in rounds for block in blocks):
        spans.append(Span(kind, at, duration))
        at += duration
    return spans
