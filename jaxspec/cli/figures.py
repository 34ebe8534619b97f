"""`jaxspec figures`: the paper's figures, and those of a pair that is measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli.options import DRAFT, TARGET, Draft, Json, Target
from jaxspec.cli.prompts import heldout_for

if TYPE_CHECKING:  # an extra
    from matplotlib.figure import Figure

    from jaxspec.decode.request import Job

ROUNDS = 100_000  # of the empirical distribution
P_AND_Q = (0.45, 0.25, 0.15, 0.1, 0.05), (0.2, 0.2, 0.2, 0.2, 0.2)
TYPICAL = 0.6  # a position whose draft token is accepted about so often shows both parts of its distribution


def figures(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
    formats: Annotated[str, typer.Option("--format", help="png, svg or both, separated by a comma.")] = "png,svg",
    target: Target = TARGET,
    draft: Draft = DRAFT,
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Draft tokens a round of the measured pair.", min=1)] = 5,
    count: Annotated[int, typer.Option(help="Held-out prompts to measure α on.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 48,
    repeats: Annotated[int, typer.Option(help="Timings of each pass.", min=1)] = 5,
    theory_only: Annotated[bool, typer.Option("--theory-only", help="Only what needs no models.")] = False,
    as_json: Json = False,
) -> None:
    """Draw the paper's Figures 2 to 5, and a pair's place among them, as PNG and SVG.

    figure-2, -3 and -4 are theory. distribution-distance shows that the empirical distribution of speculative sampling
    is the target's. Measured, greedily, on held-out prompts: landscape (speed-up over α and γ, with the pair marked),
    decomposition (one position's distribution as accepted and residual mass, at temperature 1) and figure-5 (the passes
    of one generation). Needs matplotlib: pip install "jaxspec-decoding[figures]"

        jaxspec figures --theory-only

        jaxspec figures --target debian-gpt-base --draft debian-gpt-small
    """
    from jaxspec.analysis.figures import style
    from jaxspec.analysis.measure import environment

    forms, written = tuple(part.strip() for part in formats.split(",")), []
    try:
        style.canvas()
    except ImportError as error:
        raise ValueError(str(error)) from error
    with Console(stderr=True).status("drawing") as status:

        def draw(drawn: Iterator[tuple[str, Figure]]) -> None:
            for name, figure in drawn:
                written.extend(style.save(figure, out, name, forms))
                status.update(f"{name} is drawn")

        draw(of_theory())
        if not theory_only:
            from jaxspec import model
            from jaxspec.decode.request import prepare

            big, small = (model.load(name, dtype="float32") for name in (target, draft))
            texts = heldout_for(big, count)
            draw(of_pair(prepare(big, texts, drafter=small, gamma=gamma, max_new_tokens=new_tokens), repeats))
    if as_json:
        print(json.dumps({"environment": environment.current(), "files": [str(path) for path in written]}))
        return
    console = Console(highlight=False)
    for path in written:
        console.print(Text(str(path)), soft_wrap=True)


def of_theory() -> Iterator[tuple[str, Figure]]:
    """Names and figures that need no models."""
    from jaxspec import accept
    from jaxspec.analysis import figures as draw
    from jaxspec.analysis.figures import sampling

    yield "figure-2", draw.expected_tokens()
    yield "figure-3", draw.optimal_gamma()
    yield "figure-4", draw.trade_off()
    (p, q), counts = P_AND_Q, np.unique(np.geomspace(10, ROUNDS, 17).astype(int))
    distances = {}
    for name, rule in {"rejection rule": accept.rejection(), "lenient rule, l = 0.5": accept.lenient(0.5)}.items():
        tokens = sampling.first_tokens(rule, p, q, ROUNDS, seed=0)
        distances[name] = sampling.l1_distance(tokens, p, counts)
    yield "distribution-distance", draw.distribution_distance(counts, distances, sampling.noise_distance(p, counts))


def of_pair(job: Job, repeats: int) -> Iterator[tuple[str, Figure]]:
    """Names and figures of what is measured of a pair, greedily, over all prompts of a job."""
    from jaxspec.analysis import bench
    from jaxspec.analysis import figures as draw
    from jaxspec.analysis.bench.setting import setting_of
    from jaxspec.analysis.figures.theory import Mark
    from jaxspec.analysis.measure import jobs, timeline

    gamma, config = job.decoder.gamma, bench.Config(len(job.prompt.length), repeats, 0, ("speed", "alpha", "costs"))
    _, row = bench.run(job.target, [setting_of(job, "prompts", 1)], config=config)
    assert row.alpha is not None and row.alpha.value is not None and row.costs is not None
    alpha, c, v = min(row.alpha.value, 1.0), row.costs.c.median, row.costs.v.median
    slope = (v - 1) / gamma  # v is known at one gamma; a line through it serves the others
    after = row.speed_after_prefill  # as the theorem, and the landscape, have it; None if noise left no time
    mark = Mark(f"measured: {after.median:.2f}×" if after else "measured: –", alpha, gamma)
    names = job.target.name, jobs.drafting_model(job).name
    title = f"{names[0]} with {names[1]}: c = {c:.3f}, v = {v:.2f} at γ = {gamma}"
    yield "landscape", draw.landscape(c, lambda drafted: max(0.1, 1 + slope * drafted), [mark], title=title)

    p, q, tokens = distributions(jobs.take(job, range(min(4, len(job.prompt.length)))))
    yield "decomposition", draw.decomposition(p, q, tokens)

    one = jobs.take(job, [0])
    rows = {f"γ = {some}": timeline.record(one.replace(gamma=some), repeats=repeats) for some in (7, 3)}
    rows["plain"] = timeline.record(one.plain(), repeats=repeats)
    yield "figure-5", draw.trace_diagram(rows)


def distributions(job: Job) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Both distributions at a typical position of the target's text at temperature 1, and the names of its tokens."""
    import jax

    from jaxspec.analysis.measure import replay
    from jaxspec.analysis.theory import divergence

    tokenizer = job.target.tokenizer
    with tempfile.TemporaryDirectory() as folder:
        trace = replay.collect(Path(folder) / "trace", job.replace(temperature=1.0, key=jax.random.key(0)))
        p, q = (np.asarray(jax.nn.softmax(side.astype(np.float64), axis=-1)) for side in (trace.target, trace.draft))
    at = int(np.argmin(np.abs(divergence.beta(p, q) - TYPICAL)))
    names = [str(i) for i in range(p.shape[1])]
    if tokenizer is not None:
        names = tokenizer.convert_ids_to_tokens(range(p.shape[1]))
    return p[at], q[at], names
