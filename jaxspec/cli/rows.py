"""Running the settings of `bench` and `measure`, and printing what is found: tables as groups end, JSON, CSV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.workload import Workload

if TYPE_CHECKING:
    from jaxspec.analysis.bench import BenchResult, Config, Setting
    from jaxspec.analysis.table import Groups
    from jaxspec.core import Model


def config_of(work: Workload, quantities: Sequence[str]) -> Config:
    """What is measured of each setting."""
    from jaxspec.analysis.bench import Config

    return Config(work.rows, work.repeats, work.seed, tuple(quantities))


def run(
    target: Model,
    settings: Sequence[Setting],
    work: Workload,
    config: Config,
    columns: Groups,
    *,
    plain: bool = True,
    more: Callable[[list[BenchResult]], Sequence[str]] = lambda rows: (),
) -> list[BenchResult]:
    """Measures settings and prints their rows, group by group; exits with 1 if any failed.

    Args:
        target, settings, config: as `bench.run` takes them.
        work: how to print.
        columns: of the tables, in groups.
        plain: whether they show plain decoding, too.
        more: sentences about all rows.
    """
    from jaxspec.analysis import bench, environment, table

    store = None if work.resume is None else bench.Store(work.resume)
    until = float("inf") if work.minutes is None else time.monotonic() + 60 * work.minutes
    out, rows = printer(work.markdown), []

    def heading(about: environment.Environment) -> None:
        out.print(Text(f"{environment.line(about)}, load {about.load}, {about.date[:10]}", "bold"))

    def show(some: list[BenchResult]) -> None:
        if work.markdown and some[0] is rows[0] and some[0].environment:
            heading(some[0].environment)  # of the day when it was measured
        some = [row for row in some if plain or not row.setting.is_plain]
        for made in table.tables(some, columns, None if work.markdown else out.width):
            console.show(out, made, work.markdown)

    if not (work.as_json or work.markdown):
        heading(environment.current())
    with console.progress(remaining=True) as bar:
        shown = bar.add_task("starting", total=100)
        advance = lambda what, share: bar.update(shown, description=what, completed=round(100 * share))  # noqa: E731
        total = len(bench.groups(settings))
        for i, group in enumerate(bench.run_groups(target, settings, store, config, doing=advance), start=1):
            rows += group
            if not work.as_json:
                with console.paused(bar):
                    show(group)
            if time.monotonic() > until and i < total:
                goes_on = "goes on where this ended" if store else "begins anew: --resume FILE keeps what is measured"
                print(f"Time is over: the same command {goes_on}.", file=bar.console.file)
                break
    if work.csv is not None:
        from jaxspec.files import write_text

        write_text(work.csv, [table.as_csv(rows)])
    if work.as_json:
        console.print_measured(rows=rows)
    else:
        for line in [*more(rows), *table.notes(rows)]:
            out.print(*[""] * work.markdown, Text(line), sep="\n", soft_wrap=work.markdown)
    if any(row.error for row in rows):
        raise typer.Exit(1)
    return rows


def printer(markdown: bool) -> Console:
    """Standard output, wide enough for the tables of a document."""
    return Console(highlight=False, width=400 if markdown else None)
