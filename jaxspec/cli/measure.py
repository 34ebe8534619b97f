"""`jaxspec measure`: alpha, c and v of a pair, and the speed as predicted and as it is."""

from __future__ import annotations

from typing import Annotated

from jaxspec.cli import lists, rows, workload
from jaxspec.cli.options import flag, group_of
from jaxspec.cli.workload import Workload

USUAL = Workload(temperature="0,1", gamma=workload.PLANNED, count=16, repeats=3)


@group_of("work", Workload, **USUAL._asdict())
def measure(
    work: Workload,
    no_speed: Annotated[bool, flag("Nothing is timed: α and tokens a round.", "--no-speed")] = False,
) -> None:
    """Measure a pair: α, c, v, and the speed as predicted and as it is, by task, temperature, γ and rule.

    α has 95% intervals over prompts. Predicted is Theorem 3.8 with c and v as measured, and what the rounds that were
    run cost; speeds are after prefill. A table appears as soon as its task and temperature are measured.

    \b
        jaxspec measure --draft debian-t5-draft,bigram --gamma plan,3 --resume t5.jsonl
        jaxspec measure --rule rejection,lenient=0.5,lenient=0.1
        jaxspec measure --rule all --no-speed --gamma 7
    """
    from jaxspec.analysis import table

    if no_speed:
        work = _untimed(work)
    workload.check_files(work)
    target, settings = workload.settings_of(work)
    config = rows.config_of(work, ("alpha",) if no_speed else ("speed", "alpha", "costs"))
    columns = (table.DRAFTS,) if no_speed else (table.THEORY, table.MEASURED)
    rows.run(target, settings, work, config, columns, plain=False)


def _untimed(work: Workload) -> Workload:
    """Without what rests on costs: the plan's gamma, and the policy that is given them."""
    if any(name.strip() == "adaptive" for name in work.policy.split(",")):
        raise ValueError("--policy adaptive goes by costs, and with --no-speed nothing is timed: leave one of them out")
    numbers = [part for part in lists.values(work.gamma, "--gamma") if part != workload.PLANNED]
    return work._replace(gamma=",".join(numbers) or str(workload.GAMMA))
