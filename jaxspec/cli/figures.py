"""`jaxspec figures`: the paper's figures, and those of a pair that is measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli.prompts import heldout_for
from jaxspec.cli.session import DRAFT, TARGET

if TYPE_CHECKING:  # an extra
    from matplotlib.figure import Figure

    from jaxspec.base import Model

ROUNDS = 100_000  # of the empirical law
LAW = (0.45, 0.25, 0.15, 0.1, 0.05), (0.2, 0.2, 0.2, 0.2, 0.2)  # p and q of the empirical law
TYPICAL = 0.6  # a position whose guess is kept about so often shows both parts of its law


def figures(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("figures"),
    formats: Annotated[str, typer.Option("--format", help="png, svg or both, separated by a comma.")] = "png,svg",
    target: Annotated[str, typer.Option(help="The model to decode from: a shipped checkpoint or a folder.")] = TARGET,
    draft: Annotated[str, typer.Option(help="The model that guesses.")] = DRAFT,
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Guesses a round of the measured pair.", min=1)] = 5,
    count: Annotated[int, typer.Option(help="Held-out prompts to measure α on.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 48,
    repeats: Annotated[int, typer.Option(help="Timings of each pass.", min=1)] = 5,
    theory_only: Annotated[bool, typer.Option("--theory-only", help="Only what needs no models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Draw the paper's Figures 2 to 5, and a pair's place among them, as PNG and SVG.

    figure-2, -3 and -4 are theory. law-distance shows that the empirical law of speculative sampling is the
    target's. Measured, greedily, on held-out prompts: landscape (speed-up over α and γ, with the pair marked),
    decomposition (one position's law as accepted and residual mass, at temperature 1) and figure-5 (the passes
    of one generation). Needs matplotlib: pip install "jaxspec-decoding[figures]"

        jaxspec figures --theory-only

        jaxspec figures --target debian-gpt-base --draft debian-gpt-small
    """
    from jaxspec.analysis import environment
    from jaxspec.analysis.figures import style

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

            big, small = (model.load(name, dtype="float32") for name in (target, draft))
            draw(of_pair(big, small, gamma, count, new_tokens, repeats))
    if as_json:
        print(json.dumps({"environment": environment.current(), "files": [str(path) for path in written]}))
        return
    console = Console(highlight=False)
    for path in written:
        console.print(Text(str(path)), soft_wrap=True)


def of_theory() -> Iterator[tuple[str, Figure]]:
    """Names and figures that need no models."""
    from jaxspec import accept
    from jaxspec.analysis import empirical
    from jaxspec.analysis import figures as draw

    yield "figure-2", draw.expected_tokens()
    yield "figure-3", draw.optimal_gamma()
    yield "figure-4", draw.trade_off()
    (p, q), counts = LAW, np.unique(np.geomspace(10, ROUNDS, 17).astype(int))
    distances = {}
    for name, rule in {"rejection rule": accept.rejection(), "lenient rule, l = 0.5": accept.lenient(0.5)}.items():
        tokens = empirical.first_tokens(rule, p, q, ROUNDS, seed=0)
        distances[name] = empirical.l1_distance(tokens, p, counts)
    yield "law-distance", draw.law_distance(counts, distances, empirical.noise_distance(p, counts))


def of_pair(
    target: Model, drafter: Model, gamma: int, count: int, new_tokens: int, repeats: int
) -> Iterator[tuple[str, Figure]]:
    """Names and figures of what is measured of a pair."""
    from jaxspec.analysis import figures as draw
    from jaxspec.analysis import timeline
    from jaxspec.analysis.figures.theory import Mark
    from jaxspec.cli import speeds
    from jaxspec.decode import request

    texts = heldout_for(target, count)
    ask = speeds.Ask(gammas=(gamma,), new_tokens=new_tokens, rows=count, repeats=repeats)
    found = speeds.collect(target, drafter, request.encode(target, texts), ask)
    row, alpha = found["results"][1], min(found["alpha"]["alpha"], 1.0)
    slope = (row["v"] - 1) / gamma  # v is known at one gamma; a line through it serves the others
    after = row["ratio_after_prefill"]  # as the theorem, and the landscape, have it; None if noise left no time
    mark = Mark(f"measured: {after['median']:.2f}×" if after else "measured: –", alpha, gamma)
    title = f"{target.name} with {drafter.name}: c = {row['c']:.3f}, v = {row['v']:.2f} at γ = {gamma}"
    yield "landscape", draw.landscape(row["c"], lambda guesses: max(0.1, 1 + slope * guesses), [mark], title=title)

    p, q, names = laws(target, drafter, texts, new_tokens)
    yield "decomposition", draw.decomposition(p, q, names)

    asked: dict[str, Any] = dict(max_new_tokens=new_tokens, repeats=repeats)
    rows = {f"γ = {guesses}": timeline.record(target, drafter, texts[0], gamma=guesses, **asked) for guesses in (7, 3)}
    rows["plain"] = timeline.record(target, None, texts[0], gamma=0, **asked)
    yield "figure-5", draw.trace_diagram(rows)


def laws(target: Model, drafter: Model, texts: list[str], new_tokens: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Both laws at a typical position of the target's text at temperature 1, and the names of its tokens."""
    import jax

    from jaxspec.analysis import divergence, replay

    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = dict(temperature=1.0, key=jax.random.key(0), max_new_tokens=new_tokens)
        store = replay.record(Path(folder) / "store", target, drafter, texts[:4], **asked)
        p, q = (np.asarray(jax.nn.softmax(side.astype(np.float64), axis=-1)) for side in (store.target, store.draft))
    at = int(np.argmin(np.abs(divergence.beta(p, q) - TYPICAL)))
    names = [str(i) for i in range(p.shape[1])]
    if target.tokenizer is not None:
        names = target.tokenizer.convert_ids_to_tokens(range(p.shape[1]))
    return p[at], q[at], names
