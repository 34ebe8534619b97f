"""The paper's figures by name, and those that show where a measured pair stands among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxspec import rules
from jaxspec.analysis import bench
from jaxspec.analysis.bench.setting import setting_of
from jaxspec.analysis.figures import sampling, theory, timeline
from jaxspec.analysis.measure import acceptance, batching, cost, replay
from jaxspec.analysis.measure import timeline as measured
from jaxspec.analysis.theory import divergence
from jaxspec.decode.request import Prepared

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS = 100_000  # of the empirical distribution
P_AND_Q = (0.45, 0.25, 0.15, 0.1, 0.05), (0.2, 0.2, 0.2, 0.2, 0.2)
TYPICAL = 0.6  # a position whose draft token is accepted about so often shows both parts of its distribution


def of_theory() -> Iterator[tuple[str, Figure]]:
    """Names and figures that need no models: Figures 2 to 4, and how samples approach the target's distribution."""
    yield "figure-2", theory.expected_tokens()
    yield "figure-3", theory.optimal_gamma()
    yield "figure-4", theory.trade_off()
    (p, q), counts = P_AND_Q, np.unique(np.geomspace(10, ROUNDS, 17).astype(int))
    distances = {}
    for name, rule in {"rejection rule": rules.rejection(), "lenient rule, l = 0.5": rules.lenient(0.5)}.items():
        tokens = sampling.first_tokens(rule, p, q, ROUNDS, seed=0)
        distances[name] = sampling.l1_distance(tokens, p, counts)
    yield "distribution-distance", sampling.distribution_distance(counts, distances, sampling.noise_distance(p, counts))


def of_pair(prepared: Prepared, repeats: int) -> Iterator[tuple[str, Figure]]:
    """Names and figures of a greedy pair: the landscape with its place in it, one position, and Figure 5."""
    gamma, alpha, passes = (
        prepared.decoder.gamma,
        acceptance.measure(prepared).alpha,
        cost.measure(prepared, repeats=repeats),
    )
    slope = (passes.v - 1) / gamma  # v is known at one gamma; a line through it serves the others
    after = speedup_after_prefill(prepared, repeats)
    mark = theory.Mark("measured: –" if after is None else f"measured: {after:.2f}×", min(alpha, 1.0), gamma)
    names = f"{prepared.target.name} with {batching.drafting_model(prepared).name}"
    title = f"{names}: c = {passes.c:.3f}, v = {passes.v:.2f} at γ = {gamma}"
    yield "landscape", theory.landscape(passes.c, lambda drafted: max(0.1, 1 + slope * drafted), [mark], title=title)

    p, q, tokens = distributions(batching.take(prepared, range(min(4, len(prepared.prompt.length)))))
    yield "decomposition", sampling.decomposition(p, q, tokens)

    one = batching.take(prepared, [0])
    rows = {f"γ = {some}": measured.record(one.replace(gamma=some), repeats=repeats) for some in (7, 3)}
    rows["plain"] = measured.record(one.plain(), repeats=repeats)
    yield "figure-5", timeline.trace_diagram(rows)


def speedup_after_prefill(prepared: Prepared, repeats: int) -> float | None:
    """Speed over plain decoding without the time to the first token, as Theorem 3.8 has it; None if noise left none."""
    config = bench.Config(len(prepared.prompt.length), repeats)
    _, row = bench.run(prepared.target, [setting_of(prepared, "prompts", 1)], config=config)
    return None if row.speed_after_prefill is None else row.speed_after_prefill.median


def distributions(prepared: Prepared) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Both distributions at a typical position of the target's text at temperature 1, and the names of its tokens."""
    tokenizer = prepared.target.tokenizer
    trace = replay.collect(prepared.replace(temperature=1.0, key=jax.random.key(0)))
    p, q = (np.asarray(jax.nn.softmax(side.astype(np.float64), axis=-1)) for side in (trace.target, trace.draft))
    at = int(np.argmin(np.abs(divergence.beta(p, q) - TYPICAL)))
    words = tokenizer.convert_ids_to_tokens(range(p.shape[1])) if tokenizer else [None] * p.shape[1]
    return p[at], q[at], [word or str(index) for index, word in enumerate(words)]
