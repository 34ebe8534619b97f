"""`jaxspec measure`: alpha, c and v of a pair, and the paper's Tables 2, 3 and 5."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxspec.cli import console, options
from jaxspec.cli import workload as shared
from jaxspec.cli.options import text
from jaxspec.cli.workload import Workload, workload_options

SHAPE = "t5-v1_1-base"  # whose pass verdicts are compared with


@workload_options(temperatures="0,1", gammas="plan", count=64)
def measure(
    workload: Workload,
    table: Annotated[int | None, text("N", "The paper's Table 2, 3 or 5: sets its options.")] = None,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Nothing is timed: α and tokens a round.")] = False,
    rule_costs: Annotated[bool, typer.Option("--rule-costs", help="What a verdict of each rule takes.")] = False,
    card: Annotated[Path | None, text("DIR", "Held-out loss, quality, α: DIR has train's data.")] = None,
) -> None:
    """Measure a pair: α, c, v, and the speed as predicted and as it is, by task, temperature, γ and rule.

    α has 95% intervals over prompts. Predicted is Theorem 3.8 in texts as long as these; replayed is with the tokens
    a round that these texts yield. Speeds are after prefill; on average, a sampled one has the tokens of replayed
    rounds in place of its own.

    \b
        jaxspec measure --drafters debian-t5-small,bigram --gammas plan,3 --resume t5.jsonl
        jaxspec measure --table 5
        jaxspec measure --rules all --no-speed --gammas 7
    """
    from jaxspec.analysis.bench import Config, paper
    from jaxspec.analysis.bench import table as tables

    if rule_costs:
        return _rule_costs(workload)
    if card is not None:
        return _card(workload, card)
    if table is not None:
        if table not in paper.OPTIONS:
            raise ValueError(f"--table is {table}: expected one of {', '.join(map(str, paper.OPTIONS))}")
        preset = dict(paper.OPTIONS[table])
        no_speed = no_speed or preset.pop("speed", "yes") == ""
        workload = workload._replace(**preset)
    if no_speed and shared.PLANNED in workload.gammas:
        workload = workload._replace(gammas="3")
    target, settings = shared.settings_of(workload)
    quantities = ("alpha", "replay", "candidates") if no_speed else ("speed", "alpha", "costs", "search", "replay")
    config = Config(workload.rows, workload.repeats, workload.seed, quantities)
    rows = shared.measured(target, settings, workload, config, shared.store_of(workload))
    columns = (*tables.DRAFTS, *tables.CANDIDATES) if no_speed else (*tables.THEORY, *tables.MEASURED)
    shown = [row for row in rows if not row.is_plain]
    shared.show(rows if workload.as_json else shown, workload, [columns])


def _rule_costs(work: Workload) -> None:
    """Every rule's verdict, by batch size and vocabulary, beside a pass of a model of random weights."""
    from jaxspec.analysis.measure import environment, rules

    shape = work.target.removeprefix(shared.RANDOM) if work.target.startswith(shared.RANDOM) else SHAPE
    gammas = [int(part) for part in options.parts(work.gammas, "--gammas") if part.isdecimal()] or [7]
    batches = options.integers(work.batches, "--batches")
    with Console(stderr=True).status("starting") as status:
        found = rules.beside_passes(shape, batches, gammas[0], repeats=work.repeats, doing=status.update)
    if work.as_json:
        import json

        print(json.dumps({"environment": environment.current(), "shape": shape, "costs": found}))
        return
    out = console.wide(work.markdown)
    out.print(environment.line(environment.current()), *[""] * work.markdown, sep="\n")
    for size in found:
        console.show(out, _costs_table(size, shape, gammas[0]), work.markdown)


def _costs_table(size: dict[str, Any], shape: str, gamma: int) -> Any:
    title = f"batch {size['batch']}, V = {size['vocab']:,}, γ = {gamma}; a pass of {shape} takes "
    title += f"{size['one_token_ms']:.1f} ms over 1 token, {size['verify_ms']:.1f} ms over {gamma + 1}"
    made = console.table(
        ["µs", "min..max", "µs, all\naccepted", "min..max", "of the\nlong pass"], first="", title=title
    )
    for name, row in size["rules"].items():
        cells = []
        for what in ("usual_us", "all_accepted_us"):
            cells += [f"{row[what]['median']:,.0f}", f"{row[what]['min']:,.0f}..{row[what]['max']:,.0f}"]
        made.add_row(name, *cells, f"{row['share']:.1%}" if row["share"] is not None else "–")
    return made


def _card(work: Workload, folder: Path) -> None:
    """A pair's model card."""
    from jaxspec.analysis.bench import model_card, to_json
    from jaxspec.analysis.measure import environment

    pair = [shared.model(name, work.dtypes, work, 0, 0) for name in (work.target, work.drafters)]
    with Console(stderr=True).status("starting") as status:
        found = model_card.card(
            pair[0], pair[1], folder, rows=work.count, new_tokens=work.new_tokens, doing=status.update
        )
    if work.as_json:
        import json

        print(json.dumps({"environment": environment.current(), "tasks": [to_json(one) for one in found]}))
        return
    out = console.wide(work.markdown)
    out.print(environment.line(environment.current()), *[""] * work.markdown, sep="\n")
    made = model_card.table(found, *(one.name for one in pair))
    made.title = f"{pair[0].name} and {pair[1].name}"
    console.show(out, made, work.markdown)
