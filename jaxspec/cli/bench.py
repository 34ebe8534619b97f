"""`jaxspec bench`: which drafter, gamma, policy, rule, batch size, dtype or library is fastest here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxspec.cli import workload as shared
from jaxspec.cli.options import text
from jaxspec.cli.workload import Workload, workload_options

if TYPE_CHECKING:
    from jaxspec.analysis.bench import Row
    from jaxspec.analysis.bench.paper import Floor
    from jaxspec.base import Model

PEER = "transformers"


@workload_options(gammas="1,4,7")
def bench(
    workload: Workload,
    also: Annotated[str, text("NAMES", "Also latency, memory, overlap (of dtypes).")] = "none",
    peer: Annotated[str, text("NAME", "Beside us: transformers, on the CPU (PyTorch).")] = "",
    paper: Annotated[bool, typer.Option("--paper", help="Table 2 at the paper's sizes, acceptance simulated.")] = False,
    loading: Annotated[Path | None, text("DIR", "Host memory of loading random:SHAPE, from DIR.")] = None,
    results: Annotated[Path | None, text("FILE", "Fill a page's tables by its own commands.")] = None,
) -> None:
    """Compare the speed of settings, interleaved with plain decoding on the same prompts.

    Lists (with commas) are axes: every combination has a row. × plain is over plain decoding by the same target,
    repeat by repeat. Texts in and out are not timed.

    \b
        jaxspec bench --gammas 1,3 --policies adaptive --drafters debian-t5-small,prompt_lookup
        jaxspec bench --gammas 3 --dtypes float32,int8 --also memory
        jaxspec bench --target random:t5-v1_1-small --drafters none
    """
    from jaxspec.analysis.bench import Config, table
    from jaxspec.analysis.measure import memory

    if results is not None:
        from jaxspec.cli.results import fill

        return fill(results, workload.resume)
    if paper or loading is not None:
        return _paper(workload, loading)
    if peer not in ("", PEER):
        raise ValueError(f"--peer is {peer!r}: expected {PEER}")
    before = memory.process_bytes()
    target, settings = shared.settings_of(workload, ("jaxspec.generate", PEER) if peer else ())
    if peer:  # which refuses to draft for batches
        settings = [one for one in settings if one.backend != PEER or one.is_plain or one.batch == 1]
        settings += [one.plain().on(PEER) for one in settings if one.batch > 1]
    extra = tuple(part for part in also.split(",") if part != "none")
    config = Config(workload.rows, workload.repeats, workload.seed, ("speed", "alpha", "costs", "search", *extra))
    rows = shared.measured(target, settings, workload, config, shared.store_of(workload))
    sets = [table.PEERS] if peer else [table.SPEED, table.THEORY, table.DRAFTS, table.LATENCY, table.MEMORY]
    more = [*_of_best(rows), *_beside(rows)]
    if "memory" in extra:
        peaks = {"process": memory.process_bytes(), "before the models": before, "device": memory.device_bytes()}
        more.append("Peak memory, MB: " + ", ".join(f"{name} {n / 1e6:,.0f}" for name, n in peaks.items() if n))
    shared.show(rows, workload, sets, more)
    if peer and any(row.same_text is not None and row.same_text < row.texts for row in rows):
        raise typer.Exit(1)


def _of_best(rows: list[Row]) -> list[str]:
    """Each policy beside its drafter's best constant gamma."""
    from jaxspec.analysis.bench import table

    shares = [(row, table.of_best_constant(row, rows)) for row in rows if row.policy]
    return [
        f"{row.task}, T = {row.temperature:g}, {row.drafter}: {row.policy} has {share:.2f} of the speed of the best γ."
        for row, share in shares
        if share is not None
    ]


def _beside(rows: list[Row]) -> list[str]:
    """Our speed over that of the other library."""
    from jaxspec.analysis.bench import table

    return [
        f"{row.task}, batch {row.batch}, {row.drafter or 'plain'}: {row.backend} has {ratio.median:.2f} times the "
        f"speed of {other.backend} ({table.around(ratio)})."
        for row, other, ratio in table.beside(rows)
        if ratio is not None
    ]


def _paper(work: Workload, loading: Path | None) -> None:
    """The paper's speed-ups at its sizes, or at others: of --target random:SHAPE and --drafters random:SHAPE."""
    from jaxspec.analysis.bench import Config, paper

    shapes = [name if name.startswith(shared.RANDOM) else "" for name in (work.target, work.drafters)]
    names = [given or shared.RANDOM + usual for given, usual in zip(shapes, paper.SHAPES, strict=True)]
    if loading is not None:
        Console().print(paper.load_in_a_fresh_process(names[0].removeprefix(shared.RANDOM), work.dtypes, loading))
        return
    target, draft = (shared.model(name, work.dtypes, work, 0, seed) for seed, name in enumerate(names))
    settings = paper.table_2(target, draft, texts=work.rows, new_tokens=work.new_tokens)
    config = Config(work.rows, work.repeats, work.seed, ("speed", "costs"))
    rows = shared.measured(target, settings, work, config, shared.store_of(work))
    least = paper.floor(target, draft, work.new_tokens)
    shared.show(rows, work, [paper.BESIDE_THE_PAPER], _explained(rows, draft, least))


def _explained(rows: list[Row], draft: Model, least: Floor) -> list[str]:
    """Plain decoding beside the memory's floor; and why the drafter's pass is dear, where it is."""
    from jaxspec.analysis.bench import paper

    lines = [least.sentence(row) for row in rows if row.is_plain]
    dear = next((row for row in rows if row.costs and row.costs.c.median > paper.CHEAP), None)
    return [*lines, paper.explain(draft, dear, least)] if dear else lines
