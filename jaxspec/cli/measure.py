"""`jaxspec measure`: alpha, c and v of a pair, and the paper's Tables 2, 3 and 5."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from jaxspec.cli import console, drafter_names, lists, names, options, rows, workload
from jaxspec.cli.options import flag, group_of, text
from jaxspec.cli.workload import Workload

if TYPE_CHECKING:
    from jaxspec.analysis.measure.rules import RuleCosts

SHAPE = "t5-v1_1-base"  # whose pass verdicts are compared with
RULE_COSTS = {"target", "gamma", "batch", "repeats", "markdown", "as_json"}  # what they read
CARD = {"target", "draft", "dtype", "mesh", "count", "max_new_tokens", "seed", "markdown", "as_json"}
USUAL = Workload(temperature="0,1", gamma=workload.PLANNED, count=16, repeats=3)


@group_of("work", Workload, **USUAL._asdict())
def measure(
    work: Workload,
    table: Annotated[int | None, text("N", "The paper's Table 2, 3 or 5: its options, where you give none.")] = None,
    no_speed: Annotated[bool, flag("Nothing is timed: α and tokens a round.", "--no-speed")] = False,
    rule_costs: Annotated[bool, flag("Time one call of each acceptance rule.", "--rule-costs")] = False,
    card: Annotated[Path | None, text("DIR", "Model card: loss, quality, α. DIR: data of train.")] = None,
) -> None:
    """Measure a pair: α, c, v, and the speed as predicted and as it is, by task, temperature, γ and rule.

    α has 95% intervals over prompts. Predicted is Theorem 3.8 in texts as long as these; replayed is with the tokens
    a round that these texts yield. Speeds are after prefill; on average, a sampled one has the tokens of replayed
    rounds in place of its own. A table appears as soon as its task and temperature are measured.

    \b
        jaxspec measure --draft debian-t5-draft,bigram --gamma plan,3 --resume t5.jsonl
        jaxspec measure --table 5
        jaxspec measure --rule all --no-speed --gamma 7
    """
    from jaxspec.analysis.bench import paper
    from jaxspec.analysis.bench import table as tables

    if rule_costs:
        options.refuse_others(RULE_COSTS, "--rule-costs")
        return _rule_costs(work)
    if card is not None:
        options.refuse_others(CARD, "--card")
        return _card(work, card)
    if table is not None:
        if table not in paper.OPTIONS:
            raise ValueError(f"--table is {table}: expected one of {', '.join(map(str, paper.OPTIONS))}")
        work, no_speed = _preset(work, table), no_speed or table in paper.UNTIMED
    if no_speed:
        work = _untimed(work)
    workload.check_files(work)
    target, settings = workload.settings_of(work)
    quantities = ("alpha", "replay", "candidates") if no_speed else ("speed", "alpha", "costs", "search", "replay")
    columns = (*tables.DRAFTS, *tables.CANDIDATES) if no_speed else (*tables.THEORY, *tables.MEASURED)
    rows.run(target, settings, work, rows.config_of(work, quantities), columns, plain=False)


def _preset(work: Workload, table: int) -> Workload:
    """The options of one of the paper's tables, in place of defaults only."""
    from jaxspec.analysis.bench import paper

    asked, beside = paper.OPTIONS[table], paper.BESIDE.get(table)
    unsaid = {name: value for name, value in asked.items() if name not in options.given.get()}
    draft = work.draft or drafter_names.default(work.target)
    return work._replace(**unsaid, draft=f"{draft},{beside}" if beside else draft)


def _untimed(work: Workload) -> Workload:
    """Without what rests on costs: the plan's gamma, and the policy that is given them."""
    if any(name.strip() == "adaptive" for name in work.policy.split(",")):
        raise ValueError("--policy adaptive goes by costs, and with --no-speed nothing is timed: leave one of them out")
    numbers = [part for part in lists.values(work.gamma, "--gamma") if part != workload.PLANNED]
    return work._replace(gamma=",".join(numbers) or str(workload.GAMMA))


def _rule_costs(work: Workload) -> None:
    """Every rule's verdict, by batch size and vocabulary, beside a pass of a model of random weights."""
    from jaxspec.analysis.measure import environment, rules

    if not work.target.startswith(names.RANDOM) and "target" in options.given.get():
        raise ValueError(f"--target is {work.target!r}: expected {names.RANDOM}SHAPE with --rule-costs")
    shape = work.target.removeprefix(names.RANDOM) if work.target.startswith(names.RANDOM) else SHAPE
    gamma = 7 if work.gamma == workload.PLANNED else lists.integers(work.gamma, "--gamma")[0]
    with Console(stderr=True).status("starting") as status:
        batches = lists.integers(work.batch, "--batch")
        found = rules.beside_passes(shape, batches, gamma, repeats=work.repeats, doing=status.update)
    if work.as_json:
        return console.print_measured(shape=shape, costs=found)
    out = rows.printer(work.markdown)
    out.print(environment.line(environment.current()), *[""] * work.markdown, sep="\n")
    for size in found:
        console.show(out, _costs_table(size, shape, gamma), work.markdown)


def _costs_table(size: RuleCosts, shape: str, gamma: int) -> Table:
    title = f"batch {size.batch}, V = {size.vocab:,}, γ = {gamma}; a pass of {shape} takes "
    title += f"{size.one_token_ms:.1f} ms over 1 token, {size.verify_ms:.1f} ms over {gamma + 1}"
    heads = ["µs", "min..max", "µs, all\naccepted", "min..max", "of the\nlong pass"]
    made = console.table(heads, first="", title=title)
    for name, one in size.rules.items():
        cells = []
        for taken in (one.usual_us, one.all_accepted_us):
            cells += [f"{taken.median:,.0f}", f"{taken.min:,.0f}..{taken.max:,.0f}"]
        made.add_row(name, *cells, f"{one.share:.1%}" if one.share is not None else "–")
    return made


def _card(work: Workload, folder: Path) -> None:
    """A pair's model card."""
    from jaxspec.analysis.bench import model_card
    from jaxspec.analysis.measure import environment

    pair = work.target, work.draft or drafter_names.default_model(work.target)
    for name in pair:
        names.check_model(name, work.dtype)
    target, draft = (workload.model(name, work, work.dtype) for name in pair)
    with Console(stderr=True).status("starting") as status:
        sizes = {"rows": work.count, "new_tokens": work.max_new_tokens}
        found = model_card.card(target, draft, folder, **sizes, doing=status.update)
    if work.as_json:
        return console.print_measured(tasks=found)
    out = rows.printer(work.markdown)
    out.print(environment.line(environment.current()), *[""] * work.markdown, sep="\n")
    made = model_card.table(found, target.name, draft.name)
    made.title = f"{target.name} and {draft.name}"
    console.show(out, made, work.markdown)
