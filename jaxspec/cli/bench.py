"""`jaxspec bench`: the speed of drafters, gammas, policies, rules and dtypes; α, c and v of a pair."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
GAMMA = 3  # if no gamma can be planned
DRAFTING = {"gamma", "policy", "rule"}  # options that plain decoding does not read
RANDOM_PROMPT = 64  # tokens of a random prompt


class Workload(NamedTuple):
    """The shared options; lists are separated by commas, and every combination is measured."""

    target: Annotated[str, text("MODEL", "Model to decode from, or random:SHAPE.")] = TARGET
    draft: Annotated[
        str,
        text("NAMES", "Drafters, as in generate; bigram, ngram(order=3); none.", "--draft", "-d"),
    ] = ""
    gamma: Annotated[str, text("N,N", "Draft tokens a round, or plan.", "--gamma", "-g")] = "1,4,7"
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
    count: Annotated[int, number("Prompts of a task, on all of which α is measured.")] = 8
    rows: Annotated[int, number("Prompts that a timed run decodes; at most --count.")] = 8
    max_new_tokens: NewTokens = 64
    full_length: Annotated[
        bool, flag("Ignore end tokens: all texts have --max-new-tokens.", "--full-length")
    ] = False
    repeats: Annotated[int, number("Timed runs, interleaved.")] = 5
    measure: Annotated[
        str,
        text(
            "NAMES", "speed, alpha, costs, latency, memory, compile; all. alpha alone: not timed."
        ),
    ] = "speed,alpha,costs"
    seed: Seed = 0
    mesh: Annotated[str | None, text("MESH", "Devices, as data=2,model=4.")] = None
    markdown: Annotated[bool, flag("Print tables for a document.", "--markdown")] = False
    as_json: Json = False


@group_of("work", Workload)
def bench(work: Workload, context: typer.Context) -> None:
    """Measure settings, interleaved with plain decoding on the same prompts.

    Lists (with commas) are axes: every combination has a row. "× plain" is over plain decoding by
    the same target. α has 95% intervals over prompts. "Thm 3.8" and "own rounds" predict the speed
    from c, v and α, or from the rounds that were run. A table appears as soon as its task and
    temperature are measured.

    \b
        jaxspec bench --gamma 2,3 --temperature 0,1
        jaxspec bench --target debian-t5-edit --draft prompt_lookup --gamma 7
        jaxspec bench --measure alpha --rule all --gamma 7 --count 16
        jaxspec bench --target random:t5-v1_1-small --draft none
    """
    work = checked(work, set(options.typed(context, Workload._fields)))
    run(*settings_of(work), work)


def checked(work: Workload, typed: set[str]) -> Workload:
    """Raises ValueError if an option that the user typed would be ignored.

    Returns the options, with --count and --rows made to fit each other unless both were typed.
    """
    quantities = quantities_of(work)
    if "speed" not in quantities:
        ignored = sorted(typed & {"batch", "repeats", "rows"})
        options.refuse(ignored, f"--measure {work.measure}, which times nothing,")
    if work.target.startswith(names.RANDOM):
        options.refuse(sorted(typed & {"prompts", "task"}), "a target of random weights")
    if {draft.strip() for draft in work.draft.split(",")} == {NONE}:
        ignored = {name for name in typed & DRAFTING if getattr(work, name) != NONE}
        options.refuse(sorted(ignored), "plain decoding (--draft none)")
        if "speed" not in quantities:
            raise ValueError("plain decoding (--draft none) has no α: expected speed in --measure")
    if {"count", "rows"} <= typed and work.rows > work.count:
        raise ValueError(
            f"got --rows {work.rows} and --count {work.count}: expected no more rows than prompts"
        )
    if "rows" in typed:
        return work._replace(count=max(work.count, work.rows))
    return work._replace(rows=min(work.count, work.rows))


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


class LoadedWork(NamedTuple):
    """The models and prompts that the axes name."""

    targets: Sequence[Model]  # one for each dtype
    drafters: Sequence[Mapping[str, Model | BoundDrafter]]  # drafters of each target, by name
    tasks: Sequence[Task]


def settings_of(work: Workload) -> tuple[Model, list[Setting]]:
    """Loads the models and combines the options; the first dtype is the baseline of others.

    Leaves out impossible combinations, with a line on standard error: see `fitting`.
    """
    axes = parse(work)
    loaded = load(work, axes)
    return loaded.targets[0], fitting(combine(axes, loaded))


def parse(work: Workload) -> WorkAxes:
    """Parses the lists among the options. Raises an error for a bad name before anything loads."""
    from jaxspec.cli.old_names import new_spelling
    from jaxspec.rules import catalogue

    if work.markdown and work.as_json:
        raise ValueError("got --markdown and --json: expected one of them")
    if work.task and work.prompts is not None:
        raise ValueError("got --task and --prompts: expected one of them")
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
    needs_costs = [
        *(["--gamma plan"] if PLANNED in axes.gammas else []),
        *(["--policy adaptive"] if "adaptive" in axes.policies else []),
    ]
    if needs_costs and "speed" not in quantities_of(work):
        raise ValueError(
            f"{needs_costs[0]} goes by costs, and --measure {work.measure} times nothing: leave "
            "it out, or add speed"
        )
    for dtype in axes.dtypes:
        names.check_model(work.target, dtype)
        for name in axes.drafts:
            names.check_drafter(name, dtype)
    return axes


def quantities_of(work: Workload) -> tuple[str, ...]:
    """Returns the quantities of `analysis.bench.Config` that --measure names."""
    from jaxspec.analysis import bench as runner

    if work.measure == "all":
        return tuple(runner.QUANTITIES)
    quantities = options.values(work.measure, "--measure")
    runner.check_quantities(quantities, "--measure")
    return quantities


def load(work: Workload, axes: WorkAxes) -> LoadedWork:
    """Loads the targets, their drafters and the prompts, these first unless the target names them.

    Held-out texts that no task uses make n-gram tables.
    """
    prompts = _chosen_prompts(work)
    targets = [names.model(work.target, x, work.mesh, seed=work.seed) for x in axes.dtypes]
    drafters = list[dict[str, Any]]()
    for dtype, target in zip(axes.dtypes, targets, strict=True):
        counted_on = functools.partial(references, target, work.count)
        loading = {"dtype": dtype, "mesh": work.mesh, "seed": work.seed + 1}
        drafters.append(
            {name: names.drafter(name, target, counted_on, **loading) for name in axes.drafts}
        )
    return LoadedWork(targets, drafters, _tasks(work, targets[0], prompts))


def _chosen_prompts(work: Workload) -> dict[str, list[str]]:
    """Reads the prompts of --prompts or --task, by task; none if the target decides."""
    if work.prompts is not None:
        return by_task(work.prompts, work.count)
    if work.task:
        return {name: heldout(name, work.count) for name in options.values(work.task, "--task")}
    return {}


def _tasks(work: Workload, target: Model, prompts: Mapping[str, list[str]]) -> list[Task]:
    """Makes the tasks, by default those of a target: held-out prompts, or random ones."""
    from jaxspec.analysis.random_model import random_prompt
    from jaxspec.analysis.result import Task
    from jaxspec.files import corpus

    if work.target.startswith(names.RANDOM):
        prompt = random_prompt(target, work.count, RANDOM_PROMPT)
        return [Task("random prompts", prompt, work.max_new_tokens, ends=False)]
    prompts = prompts or {name: heldout(name, work.count) for name in corpus.tasks_of(target)}
    ends = not work.full_length
    return [Task(name, inputs, work.max_new_tokens, ends) for name, inputs in prompts.items()]


def combine(axes: WorkAxes, loaded: LoadedWork) -> list[Setting]:
    """Combines the axes with what was loaded; without drafters, for plain decoding."""
    from jaxspec.analysis.result import product

    settings: list[Setting] = []
    for target, drafters in zip(loaded.targets, loaded.drafters, strict=True):
        shared: dict[str, Any] = {
            "task": loaded.tasks,
            "sampling": [{"temperature": temperature} for temperature in axes.temperatures],
            "batch": list(axes.batches),
            "rule": list(axes.rules),
            # None: the target that the others are compared with
            "target": None if target is loaded.targets[0] else target,
        }
        if not drafters:
            settings += product(**shared, drafter=[None], gamma=0)
            continue
        trees = {name: drafter for name, drafter in drafters.items() if _drafts_trees(drafter)}
        chains = {name: drafter for name, drafter in drafters.items() if name not in trees}
        # A tree has a fixed size, and a policy goes with the largest gamma: neither is combined
        # with all gammas.
        any_gamma = next((gamma for gamma in axes.gammas if gamma != PLANNED), 1)
        settings += product(**shared, drafter=chains, gamma=axes.gammas)
        settings += product(**shared, drafter=trees, gamma=any_gamma)
        settings += product(**shared, drafter=drafters, gamma=axes.largest, policy=axes.policies)
    return settings


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


def _drafts_trees(drafter: Any) -> bool:
    return getattr(getattr(drafter, "functions", None), "tree", None) is not None


def _gamma(written: str) -> int | str:
    if written == PLANNED:
        return PLANNED
    return options.positive(written)


def run(
    target: Model,
    settings: Sequence[Setting],
    work: Workload,  # what to measure, how often, and how to print it
    columns: Groups | None = None,  # the tables' columns, in groups; by default of --measure
    # sentences about all results
    more: Callable[[list[BenchResult]], Sequence[str]] = lambda results: (),
) -> list[BenchResult]:
    """Measures settings and prints results, group by group. Exits with 1 after a failure.

    Tables leave out plain decoding where nothing is timed.
    """
    from jaxspec.analysis import bench as runner
    from jaxspec.analysis import environment, table

    quantities = quantities_of(work)
    timed = "speed" in quantities
    columns = columns or (table.BENCH if timed else (table.DRAFTS,))
    config = runner.Config(work.rows, work.repeats, work.seed, quantities)
    out = console.printer(work.markdown)
    results: list[BenchResult] = []
    machine = environment.current()
    if not work.as_json:
        line = f"{environment.line(machine)}, load {machine.load}, {machine.date[:10]}"
        out.print(Text(line, "bold"))
    with console.sharing("starting") as (bar, advance):
        for group in runner.run_groups(target, settings, config, doing=advance):
            results += group
            if work.as_json:
                continue
            shown = [result for result in group if timed or not result.setting.is_plain] or group
            bar.stop()  # makes room for the tables
            for view in table.tables(shown, columns, None if work.markdown else out.width):
                console.show(out, view, work.markdown)
            bar.start()
    if work.as_json:
        console.print_measured(rows=results)
    else:
        peak = [_peak_memory()] if "memory" in quantities else []
        for line in [*more(results), *table.of_policies(results), *peak, *table.notes(results)]:
            if work.markdown:
                out.print()  # each is a paragraph
            out.print(Text(line), soft_wrap=work.markdown)
    if any(result.error for result in results):
        raise typer.Exit(1)
    return results


def _peak_memory() -> str:
    from jaxspec.analysis import memory

    peaks = {"process": memory.process_bytes(), "device": memory.device_bytes()}
    sizes = [f"{name} {size / 1e6:,.0f}" for name, size in peaks.items() if size]
    return f"Peak memory, MB: {', '.join(sizes)}"
