"""`jaxspec plan`: whether to speculate, with which gamma or tree, and the speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console, names, options
from jaxspec.cli.options import TARGET, Batches, Json, NewTokens, Prompts, Seed, flag, number, text
from jaxspec.cli.prompts import prepared_pair

if TYPE_CHECKING:
    from jaxspec.analysis.plan import Plan
    from jaxspec.analysis.roofline import Machine

_COSTS = ("alpha", "c", "c_hat", "gamma", "as_json")
_PAIR = (
    "target",
    "draft",
    "temperature",
    "prompts",
    "count",
    "max_new_tokens",
    "repeats",
    "seed",
    "dtype",
    "as_json",
)
TIMED = 5  # draft tokens of a timed draft; its time is divided by this
FOR_COSTS = "a plan for --alpha and --c"
FOR_DEVICE = "a plan for a --device"
READ = {  # options, by the kind of plan
    FOR_COSTS: (*_COSTS, "v"),
    FOR_DEVICE: (*_COSTS, "device", "target", "draft", "batch", "dtype", "row_tokens"),
    "--tree": (*_PAIR, "tree", "nodes", "batch"),
    "a plan for a pair": (*_PAIR, "gamma", "batch"),
}


class Inputs(NamedTuple):
    """The options of `plan`: for a pair on this machine, known costs, or sizes on a device."""

    target: Annotated[
        str, text("MODEL", "The target; with --device a size (11B, 76M:4 layers), shape, hub id.")
    ] = TARGET
    draft: Annotated[str, text("MODEL", "The drafter, likewise.", "--draft", "-d")] = ""
    gamma: Annotated[int, number("The largest γ to consider.", "--gamma", "-g")] = 16
    temperature: Annotated[
        float, text("T", "Sampling temperature; 0 is greedy.", "--temperature", "-t")
    ] = 0.0
    batch: Batches = "1"
    prompts: Prompts = None
    count: Annotated[int, number("Prompts to measure on.")] = 32
    max_new_tokens: NewTokens = 64
    repeats: Annotated[int, number("Timings of each pass.")] = 25
    seed: Seed = 0
    dtype: Annotated[
        str, text("DTYPE", "Default: float32 of a pair that is measured, else bfloat16.")
    ] = ""
    tree: Annotated[bool, flag("The token tree that a pair should draft here.", "--tree")] = False
    nodes: Annotated[int, number("With --tree: most draft tokens.")] = 32
    alpha: Annotated[float | None, text("RATE", "Acceptance rate, if it is known.")] = None
    c: Annotated[
        float | None, text("COST", "A pass of the drafter, in passes of the target.", "--c")
    ] = None
    v: Annotated[
        float, text("COST", "What each further token adds to a pass of the target.", "--v")
    ] = 0.0
    c_hat: Annotated[
        float | None, text("RATIO", "Operations of the drafter over the target's.")
    ] = None
    device: Annotated[str, text("NAME", "Compute it for a machine: h200, a100, tpu-v5e, ...")] = ""
    row_tokens: Annotated[int, number("With shapes: tokens in the cache.", least=0)] = 256
    as_json: Json = False


@options.group_of("inputs", Inputs)
def plan(inputs: Inputs, context: typer.Context) -> None:
    """Tell whether to speculate, with which γ at each batch size, and how much faster that will be
    at most.

    For a pair, measured on prompts on this machine; for an acceptance rate and costs that are
    known; or for sizes on a machine that is not here, by its memory, bandwidth and peak. There a
    drafter's published acceptance stands in for --alpha:

    \b
        jaxspec plan --batch 1,8
        jaxspec plan --tree --nodes 32
        jaxspec plan --alpha 0.75 --c 0.02 --v 0.05
        jaxspec plan --alpha 0.75 --target 11B --draft 60M --device tpu-v4
        jaxspec plan --target qwen3-8b -d z-lab/Qwen3-8B-DFlash-b16 --device h100
    """
    from jaxspec.analysis import plan as planning
    from jaxspec.core.checks import at_least

    mode = _mode(inputs)
    unread = [name for name in Inputs._fields if name not in READ[mode]]
    options.refuse(options.typed(context, unread), mode)
    costs = {"--c": inputs.c, "--v": inputs.v, "--c-hat": inputs.c_hat}
    at_least(0, **{name: cost for name, cost in costs.items() if cost is not None})
    report = MAKERS.get(mode, _for_pair)(inputs, options.integers(inputs.batch, "--batch"))
    if inputs.as_json:
        return console.print_measured(
            about=report.heading,
            note=report.note,
            plans=[planning.to_dict(plan) for plan in report.plans],
        )
    _show(report, inputs)
    return None


def _mode(inputs: Inputs) -> str:
    """Names the kind of plan, a key of `READ`. Raises ValueError if it lacks an option."""
    if inputs.device:
        return FOR_DEVICE
    if (inputs.alpha is None) != (inputs.c is None):
        present, absent = ("--alpha", "--c") if inputs.c is None else ("--c", "--alpha")
        raise ValueError(
            f"{present} needs {absent}, too, or sizes as --target and --draft, and a --device"
        )
    if inputs.alpha is not None:
        return FOR_COSTS
    return "--tree" if inputs.tree else "a plan for a pair"


class PlanReport(NamedTuple):
    """Plans, with the text to print around them."""

    plans: Sequence[Plan]
    heading: str
    note: str


def _for_device(inputs: Inputs, batches: Sequence[int]) -> PlanReport:
    """Plans for a machine that is not here, from sizes of models and the machine's numbers."""
    from jaxspec.analysis import plan as planning
    from jaxspec.analysis import published, roofline

    target = inputs.target
    alpha = inputs.alpha
    if not inputs.draft and (alpha is None or target != TARGET):
        raise ValueError(published.needed(target))
    draft = inputs.draft or names.default_draft_model(target)
    sizes = {
        "dtype": inputs.dtype or "bfloat16",
        "row_tokens": inputs.row_tokens,
        "most": inputs.gamma,
        "c": inputs.c,
        "c_hat": inputs.c_hat,
    }
    source = ""
    is_hub_id = "/" in draft and roofline.shape_of(draft) is None
    if alpha is None or is_hub_id or published.is_of(draft, target):
        row = published.of(draft, target)
        draft = row.reads
        sizes["at_once"] = row.at_once
        if row.at_once:  # a block drafter has no more tokens than its block
            sizes["most"] = min(inputs.gamma, row.draft)
        if alpha is None:
            alpha = row.alpha
            source = (
                f"α is that of {row.figure}, drafting {row.draft}, with {row.drafter}: "
                f"{row.source}, {row.url}"
            )
    plans = [
        planning.of_sizes(alpha, target, draft, inputs.device, batch=batch, **sizes)
        for batch in batches
    ]
    device = roofline.machine(inputs.device)
    basis = "by memory, bandwidth and peak; real passes are slower"
    if device.kernel:
        basis = "estimates from bytes and kernels, as measured on an H100"
    notes = [source, planning.check_pair(target, draft)]
    notes += [_times(plan, device) for plan in plans if plan.fits]
    return PlanReport(
        plans,
        heading=f"{target} with {inputs.draft or draft} on {inputs.device}, {basis}",
        note="\n".join(filter(None, notes)),
    )


def _for_costs(inputs: Inputs, batches: Sequence[int]) -> PlanReport:
    """Plans for a known acceptance rate and known costs."""
    from jaxspec.analysis import plan as planning

    alpha = inputs.alpha
    c = inputs.c
    v = inputs.v
    assert alpha is not None and c is not None
    verify_costs = [1 + v * gamma for gamma in range(inputs.gamma + 1)]
    plan = planning.plan(alpha, c, verify_costs, c_hat=inputs.c_hat)
    verify_cost = f"1 + {v:g} γ" if v else "1"
    return PlanReport(
        [plan],
        heading=f"α = {alpha:g}, c = {c:g}, a pass over γ + 1 tokens taking {verify_cost}",
        note=_bound(plan, v),
    )


MAKERS = {FOR_DEVICE: _for_device, FOR_COSTS: _for_costs}  # other plans are for a pair


def _for_pair(inputs: Inputs, batches: Sequence[int]) -> PlanReport:
    """Plans for two models, measured on prompts on this machine."""
    from jaxspec.analysis import environment
    from jaxspec.analysis import plan as planning

    target = inputs.target
    draft = inputs.draft or names.default_draft_model(target)
    prepared = prepared_pair(
        target,
        draft,
        inputs.dtype or "float32",
        inputs.prompts,
        inputs.count,
        gamma=TIMED,
        temperature=inputs.temperature,
        seed=inputs.seed,
        max_new_tokens=inputs.max_new_tokens,
    )
    largest = inputs.nodes if inputs.tree else inputs.gamma
    with console.counting("plan", planning.steps(batches, largest, inputs.tree)) as advance:
        plans = list(
            planning.of_pair(
                prepared,
                advance=advance,
                batches=batches,
                most=largest,
                trees=inputs.tree,
                repeats=inputs.repeats,
            )
        )
    machine = environment.current()
    return PlanReport(
        plans,
        heading=f"{target} with {draft}, temperature {inputs.temperature:g}, measured here",
        note=(
            f"{environment.line(machine)}, load {machine.load}\n"
            "Passes are timed one after the other; in a round they share caches: `jaxspec bench` "
            "times whole texts."
        ),
    )


def _times(plan: Plan, device: Machine) -> str:
    """Returns the estimated times in milliseconds that a plan for a device is based on."""
    assert plan.plain_seconds is not None
    plain = 1e3 * plan.plain_seconds
    bound = "" if device.kernel else "at least "
    return (
        f"Batch {plan.batch}: a plain step takes {bound}{plain:.2f} ms; with γ = "
        f"{plan.chain.gamma} a draft token takes {plain * plan.c:.2f}, the verify pass "
        f"{plain * plan.v:.2f}."
    )


def _bound(plan: Plan, v: float) -> str:
    """Returns a sentence about an oracle for γ, the bound of all draft-length policies."""
    from jaxspec.analysis import formulas

    # a draft token costs c and v
    oracle = float(formulas.oracle_improvement(plan.alpha, plan.c + v))
    gain = oracle / plan.improvement - 1
    return (
        f"A policy that varies γ has at most {oracle:.2f} times the speed of plain decoding (an "
        f"oracle that knows how many draft tokens will be accepted): {gain:+.0%} over this."
    )


def _show(report: PlanReport, inputs: Inputs) -> None:
    """Prints plans as a table and sentences."""
    from jaxspec.analysis import plan as planning

    option = "--nodes" if inputs.tree else "--gamma"
    largest = inputs.nodes if inputs.tree else inputs.gamma  # the largest γ that was tried
    plans = report.plans
    out = console.out()
    out.print(Text(report.heading, "bold"))
    console.show(out, _table(plans))
    for plan in plans:
        line = planning.sentence(plan)
        if len(plans) > 1:
            line = f"Batch {plan.batch}: {line}"
        if plan.gamma == largest and plan.at_cap:
            line += f" {option} {2 * largest} tries γ up to {2 * largest}."
        out.print(Text(line), soft_wrap=plan.best.is_tree)  # a tree's has code to copy
    if report.note:
        out.print(Text(report.note))


def _table(plans: Sequence[Plan]) -> Table:
    """Makes the table of plans: a row for each, or with --tree one for its chain and its tree."""
    table = console.table(
        [
            "batch",
            "α",
            "c",
            "v",
            "γ",
            "tokens\na round",
            "speed,\nat most",
            "opera-\ntions",
            "bytes",
        ]
    )
    for plan in plans:
        if plan.tree is None:
            rows = [(plan.v, plan.best)]
        else:
            rows = [(row.verifying, row) for row in (plan.chain, plan.tree)]
        for v, draft in rows:
            if draft.is_tree:
                name = f"tree\nof {len(draft.shape)}"
            else:
                name = f"{draft.gamma or 'plain'}"
            table.add_row(
                f"{plan.batch}",
                f"{plan.alpha:.3f}",
                f"{plan.c:.3f}",
                f"{v:.2f}",
                name,
                f"{draft.tokens_per_round:.2f}",
                f"{draft.improvement:.2f}×",
                f"{draft.operations:.2f}×",
                f"{draft.accesses:.2f}×",
            )
    return table
