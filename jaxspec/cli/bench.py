"""`jaxspec bench`: which drafter, gamma, policy, rule, batch size, dtype or library is fastest here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxspec.cli import lists, names, options, rows, workload
from jaxspec.cli.options import flag, group_of, text
from jaxspec.cli.workload import Workload

if TYPE_CHECKING:
    from jaxspec.analysis.bench import Row

PEER = "transformers"
USUAL = Workload(gamma="1,4,7")
PRINTED = {"seed", "repeats", "resume", "minutes", "csv", "markdown", "as_json"}  # read by whatever times rows
PAPER = {"target", "draft", "dtype", "rows", "max_new_tokens", *PRINTED}


@group_of("work", Workload, **USUAL._asdict())
def bench(
    work: Workload,
    also: Annotated[str, text("NAMES", "Also latency, memory, compile; overlap with the first dtype.")] = "none",
    peer: Annotated[str, text("NAME", "Beside us: transformers, on the CPU (PyTorch).")] = "",
    paper: Annotated[bool, flag("Table 2 at the paper's sizes, acceptance simulated.", "--paper")] = False,
    loading: Annotated[Path | None, text("DIR", "Host memory of loading random:SHAPE, from DIR.")] = None,
    results: Annotated[Path | None, text("FILE", "Rerun a Markdown page's commands, update its tables.")] = None,
) -> None:
    """Compare the speed of settings, interleaved with plain decoding on the same prompts.

    Lists (with commas) are axes: every combination has a row. "× plain" is over plain decoding by the same target.

    \b
        jaxspec bench --gamma 2,3 --temperature 0,1
        jaxspec bench --target debian-t5-edit --draft prompt_lookup --widen 32768 --gamma 7
        jaxspec bench --target random:t5-v1_1-small --draft none
    """
    from jaxspec.analysis.bench import table
    from jaxspec.analysis.measure import memory

    extra = tuple(part for part in lists.values(also, "--also") if part != "none")
    if results is not None:
        options.refuse_others({"resume"}, "--results")
        from jaxspec.cli.results import fill

        return fill(results, work.resume)
    if loading is not None:
        options.refuse_others({"target", "dtype"}, "--loading")
    elif paper:
        options.refuse_others(PAPER, "--paper")
    if peer not in ("", PEER):
        raise ValueError(f"--peer is {peer!r}: expected {PEER}")
    workload.check_files(work)
    if paper or loading is not None:
        return _paper(work, loading)
    before = memory.process_bytes()
    target, settings = workload.settings_of(work, ("jaxspec.generate", PEER) if peer else ("jaxspec",))
    if peer:  # which refuses to draft for batches
        settings = [one for one in settings if one.backend != PEER or one.is_plain or one.batch == 1]
        settings += [one.plain()._replace(backend=PEER) for one in settings if one.batch > 1]

    def lines(found: list[Row]) -> list[str]:
        peaks = {"process": memory.process_bytes(), "before the models": before, "device": memory.device_bytes()}
        peak = "Peak memory, MB: " + ", ".join(f"{name} {n / 1e6:,.0f}" for name, n in peaks.items() if n)
        measured_here = "memory" in extra and work.resume is None  # not by the process that wrote the file
        sentences = [*table.of_policies(found), *table.of_libraries(found)]
        if peer:
            from jaxspec.analysis.bench import transformers

            sentences += transformers.about(settings)
        return [*sentences, *([peak] if measured_here else [])]

    config = rows.config_of(work, ("speed", "alpha", "costs", "search", *extra))
    found = rows.run(target, settings, work, config, table.PEERS if peer else table.BENCH, more=lines)
    if peer and any(row.same_text is not None and row.same_text < row.texts for row in found):
        raise typer.Exit(1)


def _paper(work: Workload, loading: Path | None) -> None:
    """The paper's speed-ups at its sizes, or at others: of --target random:SHAPE and --draft random:SHAPE."""
    from jaxspec.analysis.bench import paper
    from jaxspec.analysis.measure import loading as fresh

    mode, given = "--paper" if loading is None else "--loading", []
    for option, name in (("target", work.target), ("draft", work.draft)):
        given.append(name if name.startswith(names.RANDOM) else "")
        if not given[-1] and option in options.given.get():
            raise ValueError(f"--{option} is {name!r}: expected {names.RANDOM}SHAPE with {mode}")
    shapes = [one or names.RANDOM + usual for one, usual in zip(given, paper.SHAPES, strict=True)]
    if loading is not None:
        Console().print(fresh.in_fresh_processes(shapes[0].removeprefix(names.RANDOM), work.dtype, loading))
        return
    target, draft = (workload.model(name, work, work.dtype, seed=seed) for seed, name in enumerate(shapes))
    settings = paper.table_2(target, draft, texts=work.rows, new_tokens=work.max_new_tokens)
    least = paper.floor(target, draft, work.max_new_tokens)
    config = rows.config_of(work, ("speed", "costs"))
    explained = lambda found: paper.explained(found, draft, least)  # noqa: E731
    rows.run(target, settings, work, config, paper.BESIDE_THE_PAPER, more=explained)
