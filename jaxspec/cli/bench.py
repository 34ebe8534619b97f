"""`jaxspec bench`: which drafter, gamma, policy, rule or dtype is fastest. `jaxspec measure`: α, c
and v of a pair.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import rich.console
import typer
from rich.text import Text

from jaxspec.cli import console, names, options
from jaxspec.cli.options import (
    TARGET,
    Batches,
    Json,
    NewTokens,
    Prompts,
    Seed,
    flag,
    group_of,
    number,
    text,
)
from jaxspec.cli.prompts import by_task, heldout, references

if TYPE_CHECKING:
    from jaxspec.analysis.result import BenchResult, Setting, Task
    from jaxspec.analysis.table import Groups
    from jaxspec.core import BoundDrafter, Model, Rule

PLANNED = "plan"
NONE = "none"
ALSO = ("latency", "memory", "compile")
GAMMA = 3  # if no gamma can be planned
RANDOM_PROMPT = 64  # tokens of a random prompt


class Workload(NamedTuple):
    """The shared options; lists are separated by commas, and every combination is measured."""

    target: Annotated[str, text("MODEL", "Model to decode from, or random:SHAPE.")] = TARGET
    draft: Annotated[
        str,
        text("NAMES", "Drafters, as in generate; bigram, ngram(order=3); none.", "--draft", "-d"),
    ] = ""
    gamma: Annotated[str, text("N,N", "Draft tokens a round, or plan.", "--gamma", "-g")] = "3"
    policy: Annotated[str, text("NAMES", "Draft-length policies to add, at the largest gamma.")] = (
        ""
    )
    rule: Annotated[str, text("NAMES", "Acceptance rules: block, lenient=0.3; all.")] = "rejection"
    temperature: Annotated[
        str, text("T,T", "Sampling temperature; 0 is greedy.", "--temperature", "-t")
    ] = "0"
    batch: Batches = "1"
    dtype: Annotated[str, text("NAMES", "float32, bfloat16, int8, int4, int8/bfloat16.")] = (
        "float32"
    )
    task: Annotated[str, text("NAMES", "Held-out translation, synopsis, edit, text.")] = ""
    prompts: Prompts = None
    count: Annotated[int, number("Prompts of a task to measure α on.")] = 8
    rows: Annotated[int, number("Prompts that a timed run decodes.")] = 8
    max_new_tokens: NewTokens = 64
    full_length: Annotated[
        bool, flag("Ignore end tokens: all texts have --max-new-tokens.", "--full-length")
    ] = False
    repeats: Annotated[int, number("Timed runs, interleaved.")] = 5
    seed: Seed = 0
    mesh: Annotated[str | None, text("MESH", "Devices, as data=2,model=4.")] = None
    resume: Annotated[
        Path | None, text("FILE", "Finished rows (JSONL): not measured again, new ones added.")
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", help="Begin no new group of settings after M minutes.", min=0),
    ] = None
    csv: Annotated[Path | None, text("FILE", "Also write all rows there.")] = None
    markdown: Annotated[bool, flag("Print tables for a document.", "--markdown")] = False
    as_json: Json = False


BENCH = Workload(gamma="1,4,7")  # the defaults of both commands
MEASURE = Workload(temperature="0,1", gamma=PLANNED, count=16, repeats=3)


@group_of("work", Workload, **BENCH._asdict())
def bench(
    work: Workload,
    also: Annotated[str, text("NAMES", "Also latency, memory, compile.")] = "none",
) -> None:
    """Compare the speed of settings, interleaved with plain decoding on the same prompts.

    Lists (with commas) are axes: every combination has a row. "× plain" is over plain decoding by
    the same target.

    \b
        jaxspec bench --gamma 2,3 --temperature 0,1
        jaxspec bench --target debian-t5-edit --draft prompt_lookup --gamma 7
        jaxspec bench --target random:t5-v1_1-small --draft none
    """
    from jaxspec.analysis import memory, table
    from jaxspec.core.checks import one_of

    extra = tuple(name for name in options.values(also, "--also") if name != NONE)
    for name in extra:
        one_of(name, "--also", ALSO)
    check_files(work)
    bytes_before = memory.process_bytes()
    target, settings = settings_of(work)

    def lines(results: list[BenchResult]) -> list[str]:
        lines = list(table.of_policies(results))
        # Resumed rows were measured by another process, whose memory is unknown.
        if "memory" in extra and work.resume is None:
            peaks = {
                "process": memory.process_bytes(),
                "before the models": bytes_before,
                "device": memory.device_bytes(),
            }
            sizes = [f"{name} {size / 1e6:,.0f}" for name, size in peaks.items() if size]
            lines.append(f"Peak memory, MB: {', '.join(sizes)}")
        return lines

    run(target, settings, work, ("speed", "alpha", "costs", *extra), table.BENCH, more=lines)


@group_of("work", Workload, **MEASURE._asdict())
def measure(
    work: Workload,
    no_speed: Annotated[
        bool, flag("Nothing is timed: α and tokens a round.", "--no-speed")
    ] = False,
) -> None:
    """Measure a pair: α, c, v, and the speed as predicted and as it is, by task, temperature, γ and
    rule.

    α has 95% intervals over prompts. Predicted is Theorem 3.8 with c and v as measured, and what
    the rounds that were run cost; speeds are after prefill. A table appears as soon as its task and
    temperature are measured.

    \b
        jaxspec measure --draft debian-t5-draft,bigram --resume t5.jsonl
        jaxspec measure --rule rejection,lenient=0.5,lenient=0.1
        jaxspec measure --rule all --no-speed --gamma 7
    """
    from jaxspec.analysis import table

    quantities = ("speed", "alpha", "costs")
    columns = (table.THEORY, table.MEASURED)
    if no_speed:
        work = _untimed(work)
        quantities = ("alpha",)
        columns = (table.DRAFTS,)
    check_files(work)
    target, settings = settings_of(work)
    run(target, settings, work, quantities, columns, plain=False)


def _untimed(work: Workload) -> Workload:
    """Drops planned gammas, which need costs. Raises ValueError for the policy that needs them."""
    if any(name.strip() == "adaptive" for name in work.policy.split(",")):
        raise ValueError(
            "--policy adaptive goes by costs, and with --no-speed nothing is timed: leave one of "
            "them out"
        )
    numbers = [gamma for gamma in options.values(work.gamma, "--gamma") if gamma != PLANNED]
    return work._replace(gamma=",".join(numbers) or str(GAMMA))


class WorkAxes(NamedTuple):
    """The values of the lists among the options, parsed; nothing is loaded yet."""

    gammas: Sequence[int | str]  # numbers and `PLANNED`
    drafts: Sequence[str]  # names of drafters
    policies: Mapping[str, Any]  # by name; "adaptive" stands for itself until costs are measured
    rules: Sequence[Rule]
    dtypes: Sequence[str]
    temperatures: Sequence[float]
    batches: Sequence[int]

    @property
    def largest(self) -> int:
        """The largest gamma that is a number; 0 if all are planned."""
        return max((gamma for gamma in self.gammas if isinstance(gamma, int)), default=0)


def settings_of(work: Workload) -> tuple[Model, list[Setting]]:
    """Loads the models and combines the options; the first dtype is the baseline of others.

    Leaves out impossible combinations, with a line on standard error: see `fitting`.
    """
    axes = _axes(work)
    tasks = _chosen_tasks(work)
    # Fail on a bad name before loading anything.
    for dtype in axes.dtypes:
        names.check_model(work.target, dtype)
        for name in axes.drafts:
            names.check_drafter(name, dtype)
    targets = {
        dtype: names.model(work.target, dtype, work.mesh, seed=work.seed) for dtype in axes.dtypes
    }
    first = targets[axes.dtypes[0]]
    tasks = tasks or _tasks_for(first, work)
    settings: list[Setting] = []
    for dtype, target in targets.items():
        drafters = _drafters(work, axes.drafts, dtype, target)
        # None: the target that the others are compared with
        settings += _combined(axes, tasks, None if target is first else target, drafters)
    order = {id(task): i for i, task in enumerate(tasks)}
    return first, sorted(fitting(settings), key=lambda setting: order[id(setting.task)])


def _axes(work: Workload) -> WorkAxes:
    """Parses the lists among the options."""
    from jaxspec.cli.old_names import new_spelling
    from jaxspec.rules import catalogue

    chosen = work.draft or names.default_drafter(work.target)
    policy_names = options.values(work.policy, "--policy") if work.policy else ()
    rule_names = catalogue.RULES if work.rule == "all" else options.values(work.rule, "--rule")
    axes = WorkAxes(
        gammas=options.values(work.gamma, "--gamma", _gamma, f"positive integers, or {PLANNED},"),
        drafts=[new_spelling(x) for x in options.values(chosen, "--draft") if x != NONE],
        policies={
            name: name if name == "adaptive" else names.policy(name)
            for name in policy_names
            if name != NONE
        },
        rules=[names.rule(name) for name in rule_names],
        dtypes=options.values(work.dtype, "--dtype"),
        temperatures=options.temperatures(work.temperature, "--temperature"),
        batches=options.integers(work.batch, "--batch"),
    )
    if axes.drafts and axes.policies and not axes.largest:
        raise ValueError(
            "--policy needs the most draft tokens of a round: give a number with --gamma, too"
        )
    return axes


def _drafters(
    work: Workload, drafts: Sequence[str], dtype: str, target: Model
) -> dict[str, Model | BoundDrafter]:
    """Loads the drafters of a target. Held-out texts that no task uses make n-gram tables."""
    counted_on = functools.partial(references, target, max(work.count, work.rows))
    loading = {"dtype": dtype, "mesh": work.mesh, "seed": work.seed + 1}
    return {name: names.drafter(name, target, counted_on, **loading) for name in drafts}


def _combined(
    axes: WorkAxes,
    tasks: Sequence[Task],
    target: Model | None,
    drafters: Mapping[str, Model | BoundDrafter],
) -> list[Setting]:
    """Combines the axes for the drafters of one target; without drafters, for plain decoding."""
    from jaxspec.analysis.result import product

    shared: dict[str, Any] = {
        "sampling": [{"temperature": temperature} for temperature in axes.temperatures],
        "batch": list(axes.batches),
        "rule": list(axes.rules),
        "task": tasks,
        "target": target,
    }
    if not drafters:
        return product(**shared, drafter=[None], gamma=0)
    trees = {name: drafter for name, drafter in drafters.items() if _drafts_trees(drafter)}
    chains = {name: drafter for name, drafter in drafters.items() if name not in trees}
    # A tree has a fixed size, and a policy goes with the largest gamma: neither is combined with
    # all gammas.
    any_gamma = next((gamma for gamma in axes.gammas if gamma != PLANNED), 1)
    return [
        *product(**shared, drafter=chains, gamma=axes.gammas),
        *product(**shared, drafter=trees, gamma=any_gamma),
        *product(**shared, drafter=drafters, gamma=axes.largest, policy=axes.policies),
    ]


def fitting(settings: list[Setting]) -> list[Setting]:
    """Returns the possible settings; prints a line on standard error for each kind left out.

    Trees do not go with rules that judge chains, or with policies that stop a draft token by token.
    Rules that need sampling are left out at temperature 0. A plan needs an acceptance rate, which
    only models have in advance: other drafters keep the numbers among the gammas, or get `GAMMA`.
    """
    from jaxspec.analysis.bench import has_alpha
    from jaxspec.core import Model

    possible: list[Setting] = []
    notes = dict[str, None]()  # a set in the order of its additions
    numbered = {setting.drafter_name for setting in settings if setting.gamma != PLANNED}
    for setting in settings:
        name = setting.drafter_name
        clash = _clash_of_trees(setting)
        if clash is not None:
            notes[f"{name} drafts trees, and {clash}: left out"] = None
            continue
        rule = setting.rule
        if rule.needs_sampling and not setting.is_plain and setting.temperature == 0:
            reason = "reads probabilities of draft tokens: left out at temperature 0"
            notes[f"the rule {rule.name} {reason}"] = None
            continue
        if setting.gamma != PLANNED or has_alpha(setting):
            possible.append(setting)
            continue
        is_model = isinstance(setting.drafter, Model)
        why = f"the rule {setting.rule.name} has no α" if is_model else "it is not a model"
        instead = "left out"
        if name not in numbered:
            instead = f"γ = {GAMMA} in its place"
            possible.append(setting._replace(gamma=GAMMA))
        notes[f"no γ can be planned for {name}, for {why}: {instead}"] = None
    if not possible and settings:
        raise ValueError(f"nothing is left to measure: {'; '.join(notes)}")
    for line in notes:
        print(line, file=sys.stderr)
    return possible


def _clash_of_trees(setting: Setting) -> str | None:
    """Says why a setting whose drafter drafts trees is impossible; None if it is possible."""
    if setting.drafter is None or not _drafts_trees(setting.drafter):
        return None
    policy = getattr(setting.policy, "functions", setting.policy)
    if getattr(policy, "should_continue", None) is not None:
        return f"the policy {setting.policy_label} stops a draft token by token"
    if not setting.rule.trees:
        return f"the rule {setting.rule.name} takes chains of draft tokens only"
    return None


def check_files(work: Workload) -> None:
    """Raises an error if a file cannot be written or resumed, or an option would be ignored."""
    from jaxspec import files
    from jaxspec.analysis.result import ResultStore

    if work.markdown and work.as_json:
        raise ValueError("got --markdown and --json: expected one of them")
    if work.target.startswith(names.RANDOM):
        ignored = [name for name in ("prompts", "task") if getattr(work, name)]
        options.refuse(ignored, "a target of random weights")
    if {draft.strip() for draft in work.draft.split(",")} == {NONE}:
        ignored = [
            name
            for name in ("policy", "rule")
            if getattr(work, name) not in (getattr(BENCH, name), NONE)
        ]
        options.refuse(ignored, "plain decoding (--draft none)")
    if work.csv is not None and not work.csv.resolve().parent.is_dir():
        raise ValueError(f"--csv is {work.csv}: there is no folder {work.csv.parent}")
    for option, file in ("--csv", work.csv), ("--resume", work.resume):
        if file is not None:
            files.check_file(file, option)
    ResultStore(work.resume)


def _chosen_tasks(work: Workload) -> list[Task]:
    """Makes the tasks of --prompts or --task; an empty list if the target decides."""
    from jaxspec.analysis.result import Task

    count = max(work.count, work.rows)
    ends = not work.full_length
    if work.task and work.prompts is not None:
        raise ValueError("got --task and --prompts: expected one of them")
    if work.target.startswith(names.RANDOM):
        return []
    if work.prompts is not None:
        prompts = by_task(work.prompts, count)
    elif work.task:
        prompts = {name: heldout(name, count) for name in options.values(work.task, "--task")}
    else:
        return []
    return [Task(name, inputs, work.max_new_tokens, ends) for name, inputs in prompts.items()]


def _tasks_for(target: Model, work: Workload) -> list[Task]:
    """Makes the default tasks of a target: held-out prompts, or random ones for random weights."""
    from jaxspec.analysis.random_model import random_prompt
    from jaxspec.analysis.result import Task
    from jaxspec.files import corpus

    if work.target.startswith(names.RANDOM):
        prompt = random_prompt(target, max(work.count, work.rows), RANDOM_PROMPT)
        return [Task("random prompts", prompt, work.max_new_tokens, ends=False)]
    return _chosen_tasks(work._replace(task=",".join(corpus.tasks_of(target))))


def _drafts_trees(drafter: Any) -> bool:
    return getattr(getattr(drafter, "functions", None), "tree", None) is not None


def _gamma(written: str) -> int | str:
    if written == PLANNED:
        return PLANNED
    return options.positive(written)


def run(
    target: Model,
    settings: Sequence[Setting],
    work: Workload,  # how often to measure, and how to print
    quantities: Sequence[str],  # names of quantities to measure; see `bench.Config`
    columns: Groups,  # the tables' columns, in groups
    *,
    plain: bool = True,  # whether they show plain decoding, too
    # sentences about all results
    more: Callable[[list[BenchResult]], Sequence[str]] = lambda results: (),
) -> list[BenchResult]:
    """Measures settings and prints results, group by group. Exits with 1 after a failure."""
    from jaxspec import files
    from jaxspec.analysis import environment, table

    out = console.printer(work.markdown)
    results = []

    def heading(machine: environment.Environment) -> None:
        line = f"{environment.line(machine)}, load {machine.load}, {machine.date[:10]}"
        out.print(Text(line, "bold"))

    def show(group: list[BenchResult]) -> None:
        if work.markdown and group[0] is results[0] and group[0].environment:
            heading(group[0].environment)  # the machine on the day when the first row was measured
        shown = [result for result in group if plain or not result.setting.is_plain]
        for view in table.tables(shown, columns, None if work.markdown else out.width):
            console.show(out, view, work.markdown)

    if not (work.as_json or work.markdown):
        heading(environment.current())
    with console.sharing("starting") as (bar, advance):
        for group in _groups(target, settings, work, quantities, bar.console, advance):
            results += group
            if not work.as_json:
                bar.stop()  # makes room for the tables
                show(group)
                bar.start()
    if work.csv is not None:
        files.write_text(work.csv, [table.as_csv(results)])
    if work.as_json:
        console.print_measured(rows=results)
    else:
        for line in [*more(results), *table.notes(results)]:
            if work.markdown:
                out.print()  # each is a paragraph
            out.print(Text(line), soft_wrap=work.markdown)
    if any(result.error for result in results):
        raise typer.Exit(1)
    return results


def _groups(
    target: Model,
    settings: Sequence[Setting],
    work: Workload,
    quantities: Sequence[str],
    err: rich.console.Console,
    advance: Callable[[str, float], None],
) -> Iterator[list[BenchResult]]:
    """Measures settings, group by group, until --minutes are over, which it then says."""
    from jaxspec.analysis import bench

    config = bench.Config(work.rows, work.repeats, work.seed, tuple(quantities))
    store = None if work.resume is None else bench.ResultStore(work.resume)
    deadline = float("inf") if work.minutes is None else time.monotonic() + 60 * work.minutes
    total = len(bench.groups(settings))
    groups = bench.run_groups(target, settings, store, config, doing=advance)
    for num_done, group in enumerate(groups, start=1):
        yield group
        if time.monotonic() > deadline and num_done < total:
            goes_on = "begins anew: --resume FILE keeps what is measured"
            if store:
                goes_on = "goes on where this ended"
            print(f"Time is over: the same command {goes_on}.", file=err.file)
            return
