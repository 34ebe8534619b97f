"""`jaxspec generate --compare`: speculative against plain decoding, measured in one process on the same prompts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from jaxspec import trace
from jaxspec.cli import console

if TYPE_CHECKING:
    from jaxspec.cli.session import Session
    from jaxspec.decode.request import Job

REPEATS = 5  # of each side of a comparison, interleaved
CPU_CACHE = 100e6  # bytes of parameters that some cache of a CPU may hold
IDLE = 1.25  # a check that costs less than so many one-token passes runs on compute that was idle


class Comparison(NamedTuple):
    """Speculative against plain decoding, as measured.

    Attributes:
        gamma: draft tokens a round.
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


def compare_with_plain(session: Session, rows: int) -> Comparison:
    """Both, interleaved, `rows` prompts at a time, and what theory predicts."""
    import jax
    import numpy as np

    from jaxspec.analysis.measure import acceptance, cost, jobs
    from jaxspec.analysis.measure.statistics import median_min_max
    from jaxspec.analysis.measure.timing import interleave
    from jaxspec.analysis.theory import formulas

    job, gamma = session.job, session.job.decoder.gamma
    speculative = [session.rows(at, rows) for at in range(0, len(session.texts), rows)]
    runs = [functools.partial(run, some) for some in (speculative, [one.plain() for one in speculative])]
    texts = [side() for side in runs]  # also compiles
    tokens = np.array([[sum(map(len, rows))] for rows in texts])
    ours, plain = tokens / interleave(runs, REPEATS)
    where = None if jobs.is_sampled(job) else first_difference(job.target.tokenizer, *texts)
    alpha, costs = acceptance.measure(job).alpha, cost.measure(speculative[0])
    size = sum(x.nbytes for x in jax.tree.leaves(job.weights.target))
    return Comparison(
        gamma=gamma,
        speculative=float(np.median(ours)),
        plain=float(np.median(plain)),
        ratio=median_min_max(ours / plain),
        identical=None if jobs.is_sampled(job) else where is None,
        difference=where,
        alpha=alpha,
        c=costs.c,
        v=costs.v,
        expected=float(formulas.expected_tokens(alpha, gamma)),
        predicted=float(formulas.improvement(alpha, gamma, costs.c, costs.v)),
        cached=jax.default_backend() == "cpu" and size < CPU_CACHE,
    )


def run(some: Sequence[Job]) -> list[list[int]]:
    """The new tokens of every prompt of some jobs."""
    from jaxspec.analysis.measure import jobs
    from jaxspec.decode import loop

    return jobs.texts([loop.run(job) for job in some])


def first_difference(tokenizer: Any, ours: list[list[int]], plain: list[list[int]]) -> str | None:
    """Where speculative and plain text differ, in words; None if they do not."""
    from jaxspec.analysis.measure import numerics

    found = [(row, numerics.first_difference(a, b)) for row, (a, b) in enumerate(zip(ours, plain, strict=True))]
    differ = [(row, at) for row, at in found if at is not None]
    if not differ:
        return None
    row, at = differ[0]
    a, b = ours[row], plain[row]
    names = [trace.spell(tokenizer, a[:at], text[at : at + 1]) or ["nothing"] for text in (a, b)]
    return (
        f"{len(differ)} of {len(ours)} prompts; first in prompt {row + 1}, token {at + 1}: {names[0][0]!r} "
        f"where plain decoding has {names[1][0]!r}. Passes of other widths round otherwise: is it a near tie?"
    )


def table(found: Comparison) -> Table:
    """Both speeds, and the speed-up as measured and as predicted."""
    made, ratio = console.table(("tokens/s", "speed-up", "min..max"), first=""), found.ratio
    made.add_row("plain", f"{found.plain:.1f}", "1.00×")
    speeds = f"{found.speculative:.1f}", f"{ratio['median']:.2f}×", f"{ratio['min']:.2f}..{ratio['max']:.2f}"
    made.add_row(f"speculative, γ = {found.gamma}", *speeds)
    made.add_row("predicted by Theorem 3.8, with v", "", f"{found.predicted:.2f}×", style="dim")
    return made


def sentences(found: Comparison) -> list[Text]:
    """The numbers behind the prediction, whether the texts agree, and the conclusion."""
    formula = Text(
        f"α = {found.alpha:.3f}, c = {found.c:.3f}, v = {found.v:.2f}: a round yields {found.expected:.2f} "
        f"tokens and costs γc + v = {found.round_cost:.2f} one-token passes of the target."
    )
    return [formula, _agreement(found), Text(_conclusion(found))]


def _agreement(found: Comparison) -> Text:
    if found.identical is None:
        return Text("The texts are samples: they have one distribution, and need not be the same.")
    if found.identical:
        return Text("Greedy texts: identical.", "green")
    return Text(f"Greedy texts: different. {found.difference}", "yellow")


def _conclusion(found: Comparison) -> str:
    ratio = found.ratio["median"]
    if ratio >= 1:
        return f"Speculative decoding is {ratio:.2f} times as fast here."
    if found.predicted >= 1:
        return (
            f"Speculative decoding is slower here, though a round should give {found.expected:.2f} tokens in "
            f"the time of {found.round_cost:.2f} passes: reading prompts twice and short last rounds cost it."
        )
    busy = found.cached and found.v > IDLE
    why = ", for a model that fits a CPU's cache leaves no compute idle to check draft tokens with" if busy else ""
    return (
        f"Speculative decoding is slower here: a round yields {found.expected:.2f} tokens and takes the time "
        f"of {found.round_cost:.2f} one-token passes, {found.v:.2f} to check {found.gamma + 1} tokens (v) "
        f"and {found.gamma * found.c:.2f} to draft {found.gamma} (γc){why}."
    )
