"""Speculative against plain decoding, measured in one process on the same prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec import trace
from jaxspec.analysis.estimate import spread
from jaxspec.cli import timing

if TYPE_CHECKING:
    from jaxspec.base import Model
    from jaxspec.cli.session import Session
    from jaxspec.decode.request import Job

REPEATS = 5  # of each side of a comparison, in turn
CPU_CACHE = 100e6  # bytes of parameters that some cache of a CPU may hold


class Comparison(NamedTuple):
    """Speculative against plain decoding, as measured.

    Attributes:
        gamma: guesses a round.
        speculative, plain: tokens/s, in the median.
        ratio: of the one to the other, repeat by repeat: median, min and max.
        identical: whether all texts were the same; None where they need not be (sampling).
        difference: where they first differ, if they do.
        alpha, c, v: acceptance rate; cost of a draft pass and of the check, in one-token passes.
        expected: tokens a round should yield at this alpha.
        predicted: speed-up by Theorem 3.8, expected / (gamma c + v).
        cached: whether the target is small enough to live in a CPU's cache, and on a CPU.
    """

    gamma: int
    speculative: float
    plain: float
    ratio: dict[str, float]
    identical: bool | None
    difference: str | None
    alpha: float
    c: float
    v: float
    expected: float
    predicted: float
    cached: bool

    @property
    def round_cost(self) -> float:
        """gamma c + v: what a round costs, in one-token passes of the target."""
        return self.gamma * self.c + self.v


def compare_with_plain(session: Session, drafter: Model, rows: int) -> Comparison:
    """Both ways of decoding in turn, `rows` prompts at a time, and what theory says to it."""
    import jax
    import numpy as np

    from jaxspec.analysis import acceptance, cost, theory

    s, target, starts = session.settings, session.target, range(0, len(session.texts), rows)
    sides = [[session.job(at, at + rows, drafter=d) for at in starts] for d in (drafter, None)]
    runs = [functools.partial(run, jobs) for jobs in sides]
    texts = [side() for side in runs]  # also compiles
    tokens = np.array([[sum(map(len, said))] for said in texts])
    ours, plain = tokens / cost.take_turns(runs, REPEATS)
    where = first_difference(session, *texts) if s.temperature == 0 else None
    prompt, keys = session.rows(0, len(session.texts))
    limit = dict(max_new_tokens=s.max_new_tokens)
    alpha = acceptance.measure(target, drafter, prompt, key=keys, **limit, **session.warping()).alpha
    timed: dict[str, Any] = dict(gamma=s.gamma, sampled=s.temperature > 0, **limit)
    costs = cost.measure(target, drafter, session.rows(0, rows)[0], **timed)
    size = sum(x.nbytes for x in jax.tree.leaves(target.params))
    return Comparison(
        gamma=s.gamma,
        speculative=float(np.median(ours)),
        plain=float(np.median(plain)),
        ratio=spread(ours / plain),
        identical=where is None if s.temperature == 0 else None,
        difference=where,
        alpha=alpha,
        c=costs.c,
        v=costs.v,
        expected=float(theory.expected_tokens(alpha, s.gamma)),
        predicted=float(theory.improvement(alpha, s.gamma, costs.c, costs.v)),
        cached=jax.default_backend() == "cpu" and size < CPU_CACHE,
    )


def run(jobs: Sequence[Job]) -> list[list[int]]:
    """The new tokens of every prompt of some jobs."""
    from jaxspec.decode import loop

    return timing.tokens([loop.run(*job) for job in jobs])


def first_difference(session: Session, ours: list[list[int]], plain: list[list[int]]) -> str | None:
    """Where speculative and plain text part, in words; None if they do not."""
    differ = [index for index, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b]
    if not differ:
        return None
    index = differ[0]
    a, b = ours[index], plain[index]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    names = [trace.spell(session.target.tokenizer, a[:at], text[at : at + 1]) or ["nothing"] for text in (a, b)]
    return (
        f"{len(differ)} of {len(ours)} prompts; first in prompt {index + 1}, token {at + 1}: {names[0][0]!r} "
        f"where plain decoding has {names[1][0]!r}. Passes of other widths round otherwise: is it a near tie?"
    )
