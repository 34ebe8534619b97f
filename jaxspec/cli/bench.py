"""`jaxspec bench`: which drafter, gamma, policy, rule or dtype is fastest. `jaxspec measure`: α, c and v of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from jaxspec.cli import options, workload
from jaxspec.cli.options import flag, group_of, text
from jaxspec.cli.workload import Workload

if TYPE_CHECKING:
    from jaxspec.analysis.result import BenchResult

BENCH = Workload(gamma="1,4,7")  # the defaults of both commands
MEASURE = Workload(temperature="0,1", gamma=workload.PLANNED, count=16, repeats=3)


@group_of("work", Workload, **BENCH._asdict())
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

    extra = tuple(part for part in options.values(also, "--also") if part != "none")
    workload.check_files(work)
    before = memory.process_bytes()
    target, settings = workload.settings_of(work)

    def lines(results: list[BenchResult]) -> list[str]:
        peaks = {"process": memory.process_bytes(), "before the models": before, "device": memory.device_bytes()}
        peak = "Peak memory, MB: " + ", ".join(f"{name} {n / 1e6:,.0f}" for name, n in peaks.items() if n)
        measured_now = "memory" in extra and work.resume is None  # not by the process that wrote the file
        return [*table.of_policies(results), *([peak] if measured_now else [])]

    workload.run(target, settings, work, ("speed", "alpha", "costs", *extra), table.BENCH, more=lines)


@group_of("work", Workload, **MEASURE._asdict())
def measure(
    work: Workload,
    no_speed: Annotated[bool, flag("Nothing is timed: α and tokens a round.", "--no-speed")] = False,
) -> None:
    """Measure a pair: α, c, v, and the speed as predicted and as it is, by task, temperature, γ and rule.

    α has 95% intervals over prompts. Predicted is Theorem 3.8 with c and v as measured, and what the rounds that were
    run cost; speeds are after prefill. A table appears as soon as its task and temperature are measured.

    \b
        jaxspec measure --draft debian-t5-draft,bigram --resume t5.jsonl
        jaxspec measure --rule rejection,lenient=0.5,lenient=0.1
        jaxspec measure --rule all --no-speed --gamma 7
    """
    from jaxspec.analysis import table

    work = _untimed(work) if no_speed else work
    workload.check_files(work)
    target, settings = workload.settings_of(work)
    quantities = ("alpha",) if no_speed else ("speed", "alpha", "costs")
    columns = (table.DRAFTS,) if no_speed else (table.THEORY, table.MEASURED)
    workload.run(target, settings, work, quantities, columns, plain=False)


def _untimed(work: Workload) -> Workload:
    """Leaves out what rests on costs: the plan's gamma, and the policy that takes them."""
    if any(name.strip() == "adaptive" for name in work.policy.split(",")):
        raise ValueError("--policy adaptive goes by costs, and with --no-speed nothing is timed: leave one of them out")
    numbers = [part for part in options.values(work.gamma, "--gamma") if part != workload.PLANNED]
    return work._replace(gamma=",".join(numbers) or str(workload.GAMMA))
