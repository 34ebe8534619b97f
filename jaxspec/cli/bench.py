"""`jaxspec bench`: which drafter, gamma, policy, rule, batch size or dtype is fastest here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from jaxspec.cli import lists, rows, workload
from jaxspec.cli.options import group_of, text
from jaxspec.cli.workload import Workload

if TYPE_CHECKING:
    from jaxspec.analysis.bench import BenchResult

USUAL = Workload(gamma="1,4,7")


@group_of("work", Workload, **USUAL._asdict())
def bench(
    work: Workload,
    also: Annotated[str, text("NAMES", "Also latency, memory, compile.")] = "none",
) -> None:
    """Compare the speed of settings, interleaved with plain decoding on the same prompts.

    Lists (with commas) are axes: every combination has a row. "× plain" is over plain decoding by the same target.

    \b
        jaxspec bench --gamma 2,3 --temperature 0,1
        jaxspec bench --target debian-t5-edit --draft prompt_lookup --gamma 7
        jaxspec bench --target random:t5-v1_1-small --draft none
    """
    from jaxspec.analysis import memory, table

    extra = tuple(part for part in lists.values(also, "--also") if part != "none")
    workload.check_files(work)
    before = memory.process_bytes()
    target, settings = workload.settings_of(work)

    def lines(results: list[BenchResult]) -> list[str]:
        peaks = {"process": memory.process_bytes(), "before the models": before, "device": memory.device_bytes()}
        peak = "Peak memory, MB: " + ", ".join(f"{name} {n / 1e6:,.0f}" for name, n in peaks.items() if n)
        measured_here = "memory" in extra and work.resume is None  # not by the process that wrote the file
        return [*table.of_policies(results), *([peak] if measured_here else [])]

    rows.run(target, settings, work, rows.config_of(work, ("speed", "alpha", "costs", *extra)), table.BENCH, more=lines)
