"""`jaxspec bench`: which drafter, gamma, policy, rule or dtype is fastest. `jaxspec measure`: α, c
and v of a pair.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from jaxspec.cli import console, drafter_names, names, options
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
    from jaxspec.core import Model

PLANNED = "plan"
NONE = "none"
ALSO = ("latency", "memory", "compile")
GAMMA = 3  # if no gamma can be planned
RANDOM_PROMPT = 64  # tokens of a random prompt


class Workload(NamedTuple):
    """The shared options; lists are separated by commas, and every combination is measured."""

    target: Annotated[str, text("MODEL", "Model to decode from, or random:SHAPE.")] = TARGET
    draft: Annotated[
        str, text("NAMES", "Drafters, as in generate; unigram to 4-gram; none.", "--draft", "-d")
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
    before = memory.process_bytes()
    target, settings = settings_of(work)

    def lines(results: list[BenchResult]) -> list[str]:
        peaks = {
            "process": memory.process_bytes(),
            "before the models": before,
            "device": memory.device_bytes(),
        }
        peak = "Peak memory, MB: " + ", ".join(
            f"{name} {n / 1e6:,.0f}" for name, n in peaks.items() if n
        )
        # resumed rows were measured by another process
        measured_now = "memory" in extra and work.resume is None
        return [*table.of_policies(results), *([peak] if measured_now else [])]

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

    if no_speed:
        work = _untimed(work)
    check_files(work)
    target, settings = settings_of(work)
    if no_speed:
        quantities = ("alpha",)
    else:
        quantities = ("speed", "alpha", "costs")
    if no_speed:
        columns = (table.DRAFTS,)
    else:
        columns = (table.THEORY, table.MEASURED)
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


def settings_of(work: Workload) -> tuple[Model, list[Setting]]:
    """Loads the models and makes every combination of the options; other dtypes are compared with
    the first.

    Leaves out impossible combinations, with a line on standard error: see `fitting`.
    """
    from jaxspec.analysis.result import product
    from jaxspec.rules import catalogue

    gammas = options.values(work.gamma, "--gamma", _gamma, f"positive integers, or {PLANNED},")
    chosen = work.draft or drafter_names.default(work.target)
    drafts = [name for name in options.values(chosen, "--draft") if name != NONE]
    policies = {
        name: name if name == "adaptive" else names.policy(name)  # which gets what is measured
        for name in (options.values(work.policy, "--policy") if work.policy else ())
        if name != NONE
    }
    largest = max((gamma for gamma in gammas if gamma != PLANNED), default=0)
    if drafts and policies and not largest:
        raise ValueError(
            "--policy needs the most draft tokens of a round: give a number with --gamma, too"
        )
    if work.rule == "all":
        rules = catalogue.RULES
    else:
        rules = options.values(work.rule, "--rule")
    dtypes = options.values(work.dtype, "--dtype")
    tasks = _chosen_tasks(work)
    heats = options.temperatures(work.temperature, "--temperature")
    shared: dict[str, Any] = {
        "sampling": [{"temperature": temperature} for temperature in heats],
        "batch": list(options.integers(work.batch, "--batch")),
        "rule": [names.rule(name) for name in rules],
    }
    for dtype in dtypes:  # all that can be known is, before the first model is loaded
        names.check_model(work.target, dtype)
        for name in drafts:
            drafter_names.check(name, dtype)
    targets = {
        dtype: names.model(work.target, dtype, work.mesh, seed=work.seed) for dtype in dtypes
    }
    first = targets[dtypes[0]]
    shared["task"] = tasks or _tasks_for(first, work)
    # Trees have a size of their own, and policies the largest gamma: neither is combined with all
    # gammas.
    settings: list[Setting] = []
    for dtype, target in targets.items():
        load = functools.partial(names.model, dtype=dtype, mesh=work.mesh, seed=work.seed + 1)
        counted_on = functools.partial(references, target, max(work.count, work.rows))
        drafters = {name: drafter_names.drafter(name, load, target, counted_on) for name in drafts}
        axes = shared | {"target": None if target is first else target}
        # of their own size
        trees = {name: drafter for name, drafter in drafters.items() if _drafts_trees(drafter)}
        chains = {name: drafter for name, drafter in drafters.items() if name not in trees}
        # Of no drafters, or no policies, there is no combination.
        settings += product(**axes, drafter=chains, gamma=gammas)
        settings += product(
            **axes, drafter=trees, gamma=next((g for g in gammas if g != PLANNED), 1)
        )
        settings += product(**axes, drafter=drafters, gamma=largest, policy=policies)
        if not drafters:
            settings += product(**axes, drafter=[None], gamma=0)
    order = {id(task): i for i, task in enumerate(shared["task"])}
    return first, sorted(fitting(settings), key=lambda setting: order[id(setting.task)])


def fitting(settings: list[Setting]) -> list[Setting]:
    """Returns the possible settings; prints a line on standard error for each kind left out.

    Trees do not go with rules that judge chains, or with policies that stop a draft token by token.
    A plan needs an acceptance rate, which only models have in advance: other drafters keep the
    numbers among the gammas, or get `GAMMA`.
    """
    from jaxspec.analysis.bench import has_alpha
    from jaxspec.core import Model

    fit: list[Setting] = []
    notes = dict[str, None]()
    numbered = {setting.drafter_name for setting in settings if setting.gamma != PLANNED}
    for setting in settings:
        name = setting.drafter_name
        rule = setting.rule
        stops = (
            getattr(getattr(setting.policy, "functions", setting.policy), "should_continue", None)
            is not None
        )
        if (
            setting.drafter is not None
            and _drafts_trees(setting.drafter)
            and (stops or not rule.trees)
        ):
            reason = f"the rule {rule.name} takes chains of draft tokens only"
            if stops:
                reason = f"the policy {setting.policy_label} stops a draft token by token"
            notes[f"{name} drafts trees, and {reason}: left out"] = None
        elif setting.gamma != PLANNED or has_alpha(setting):
            fit.append(setting)
        else:
            if name in numbered:
                instead = "left out"
            else:
                instead = f"γ = {GAMMA} in its place"
            if isinstance(setting.drafter, Model):
                why = f"the rule {rule.name} has no α"
            else:
                why = "it is no model"
            notes[f"no γ can be planned for {name}, for {why}: {instead}"] = None
            fit += [] if name in numbered else [setting._replace(gamma=GAMMA)]
    if not fit and settings:
        raise ValueError(f"nothing is left to measure: {'; '.join(notes)}")
    for line in notes:
        print(line, file=sys.stderr)
    return fit


def check_files(work: Workload) -> None:
    """Raises an error if a file could not be written or resumed later, or an option would be
    ignored.
    """
    from jaxspec import files
    from jaxspec.analysis.result import ResultStore

    if work.markdown and work.as_json:
        raise ValueError("got --markdown and --json: expected one of them")
    if work.target.startswith(names.RANDOM):
        options.refuse(
            [name for name in ("prompts", "task") if getattr(work, name)],
            "a target of random weights",
        )
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
    else:
        tasks = ()
        if work.task:
            tasks = options.values(work.task, "--task")
        prompts = {name: heldout(name, count) for name in tasks}
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
    target: Model,  # with the settings the result of `settings_of`
    settings: Sequence[Setting],
    work: Workload,  # how often to measure, and how to print
    quantities: Sequence[str],  # names of quantities to measure; see `bench.Config`
    columns: Groups,  # the tables' columns, in groups
    *,
    plain: bool = True,  # whether they show plain decoding, too
    # sentences about all results
    more: Callable[[list[BenchResult]], Sequence[str]] = lambda results: (),
) -> list[BenchResult]:
    """Measures settings; prints results group by group, as JSON and as CSV. Exits with 1 on a
    failure.
    """
    from jaxspec.analysis import bench, environment, table

    config = bench.Config(work.rows, work.repeats, work.seed, tuple(quantities))
    store = None
    if work.resume is not None:
        store = bench.ResultStore(work.resume)
    if work.minutes is None:
        until = float("inf")
    else:
        until = time.monotonic() + 60 * work.minutes
    out = console.printer(work.markdown)
    results = []

    def heading(machine: environment.Environment) -> None:
        out.print(
            Text(f"{environment.line(machine)}, load {machine.load}, {machine.date[:10]}", "bold")
        )

    def show(group: list[BenchResult]) -> None:
        if work.markdown and group[0] is results[0] and group[0].environment:
            heading(group[0].environment)  # of the day when the first row was measured
        shown = [result for result in group if plain or not result.setting.is_plain]
        for view in table.tables(shown, columns, None if work.markdown else out.width):
            console.show(out, view, work.markdown)

    if not (work.as_json or work.markdown):
        heading(environment.current())
    with console.sharing("starting") as (bar, advance):
        total = len(bench.groups(settings))
        for number, group in enumerate(
            bench.run_groups(target, settings, store, config, doing=advance), start=1
        ):
            results += group
            if not work.as_json:
                bar.stop()  # makes room for the tables
                show(group)
                bar.start()
            if time.monotonic() > until and number < total:
                if store:
                    goes_on = "goes on where this ended"
                else:
                    goes_on = "begins anew: --resume FILE keeps what is measured"
                print(f"Time is over: the same command {goes_on}.", file=bar.console.file)
                break
    if work.csv is not None:
        from jaxspec.files import write_text

        write_text(work.csv, [table.as_csv(results)])
    if work.as_json:
        console.print_measured(rows=results)
    else:
        for line in [*more(results), *table.notes(results)]:
            out.print(*[""] * work.markdown, Text(line), sep="\n", soft_wrap=work.markdown)
    if any(result.error for result in results):
        raise typer.Exit(1)
    return results
