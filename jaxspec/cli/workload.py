"""What `bench` and `measure` share: options that name settings, and the settings."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jaxspec.cli import drafter_names, lists, names
from jaxspec.cli.options import TARGET, Batches, Json, Markdown, NewTokens, Prompts, Seed, flag, number, text
from jaxspec.cli.prompts import by_task, heldout, references

if TYPE_CHECKING:
    from jaxspec.analysis.bench import Setting, Task
    from jaxspec.core import Model

PLANNED, NONE = "plan", "none"
GAMMA = 3  # where no gamma can be planned
RANDOM_PROMPT = 64  # tokens of a random prompt


class Workload(NamedTuple):
    """The shared options; lists are separated by commas, and every combination is measured."""

    target: Annotated[str, text("MODEL", "Model to decode from, or random:SHAPE.")] = TARGET
    draft: Annotated[str, text("NAMES", "Drafters, as in generate; unigram to 4-gram; none.", "--draft", "-d")] = ""
    gamma: Annotated[str, text("N,N", "Draft tokens a round, or plan.", "--gamma", "-g")] = "3"
    policy: Annotated[str, text("NAMES", "Draft-length policies to add, at the largest gamma.")] = ""
    rule: Annotated[str, text("NAMES", "Acceptance rules: block, lenient=0.3; all.")] = "rejection"
    temperature: Annotated[str, text("T,T", "Of sampling; 0 is greedy.", "--temperature", "-t")] = "0"
    batch: Batches = "1"
    dtype: Annotated[str, text("NAMES", "float32, bfloat16, int8.")] = "float32"
    task: Annotated[str, text("NAMES", "Held-out translation, synopsis, edit, text.")] = ""
    prompts: Prompts = None
    count: Annotated[int, number("Prompts of a task to measure α on.")] = 8
    rows: Annotated[int, number("Prompts that a timed run decodes.")] = 8
    max_new_tokens: NewTokens = 64
    full_length: Annotated[bool, flag("Ignore end tokens: all texts have --max-new-tokens.", "--full-length")] = False
    repeats: Annotated[int, number("Timed runs, interleaved.")] = 5
    seed: Seed = 0
    mesh: Annotated[str | None, text("MESH", "Devices, as data=2,model=4.")] = None
    resume: Annotated[Path | None, text("FILE", "Finished rows (JSONL): not measured again, new ones added.")] = None
    minutes: Annotated[
        float | None, typer.Option(metavar="M", help="Begin no new group of settings after M minutes.", min=0)
    ] = None
    csv: Annotated[Path | None, text("FILE", "Also write all rows there.")] = None
    markdown: Markdown = False
    as_json: Json = False


def settings_of(work: Workload) -> tuple[Model, list[Setting]]:
    """The target, and every combination of what was given; the first dtype is what the others are compared with.

    Combinations that cannot be are left out, and a line on standard error says so: see `fitting`.

    Raises:
        ValueError: what was given has no meaning, or none of its combinations can be.
    """
    from jaxspec.analysis.bench import product
    from jaxspec.rules import catalogue

    gammas = lists.values(work.gamma, "--gamma", _gamma, f"positive integers, or {PLANNED},")
    named = work.draft or drafter_names.default(work.target)
    drafts = [name for name in lists.values(named, "--draft") if name != NONE]
    policies = {
        name: name if name == "adaptive" else names.policy(name)  # which gets what is measured
        for name in (lists.values(work.policy, "--policy") if work.policy else ())
        if name != NONE
    }
    most = max((gamma for gamma in gammas if gamma != PLANNED), default=0)
    if drafts and policies and not most:
        raise ValueError("--policy needs the most draft tokens of a round: give a number with --gamma, too")
    rules = catalogue.RULES if work.rule == "all" else lists.values(work.rule, "--rule")
    dtypes, tasks = lists.values(work.dtype, "--dtype"), given_tasks(work)
    shared: dict[str, Any] = {
        "sampling": [{"temperature": heat} for heat in lists.temperatures(work.temperature, "--temperature")],
        "batch": list(lists.integers(work.batch, "--batch")),
        "rule": [names.rule(name) for name in rules],
    }
    for dtype in dtypes:  # all that can be known is, before the first model is loaded
        names.check_model(work.target, dtype)
        for name in drafts:
            drafter_names.check(name, dtype)
    targets = {dtype: model(work.target, work, dtype) for dtype in dtypes}
    first = targets[dtypes[0]]
    shared["task"], made = tasks or tasks_for(first, work), []
    for dtype, target in targets.items():
        load = functools.partial(_draft_model, work, dtype)
        left = functools.partial(references, target, max(work.count, work.rows))
        drafters = {name: drafter_names.drafter(name, load, target, left) for name in drafts}
        own = shared | {"target": None if target is first else target}
        trees = {name: drafter for name, drafter in drafters.items() if _drafts_trees(drafter)}  # of their own size
        chains = {name: drafter for name, drafter in drafters.items() if name not in trees}
        made += product(**own, drafter=chains, gamma=gammas) if chains else []
        made += product(**own, drafter=trees, gamma=next((g for g in gammas if g != PLANNED), 1)) if trees else []
        made += product(**own, drafter=drafters, gamma=most, policy=policies) if drafters and policies else []
        made += [] if drafters else product(**own, drafter=[None], gamma=0)
    made = fitting(made)
    order = {id(task): i for i, task in enumerate(shared["task"])}
    return first, sorted(made, key=lambda one: order[id(one.task)])


def fitting(settings: list[Setting]) -> list[Setting]:
    """Those of some settings that can be, with a line on standard error for each kind that cannot.

    Trees are refused by rules that judge chains, and by policies that stop a draft token by token. A plan needs an
    acceptance rate, which is known beforehand of models: other drafters have the gammas that were given, or `GAMMA`.

    Raises:
        ValueError: none can be.
    """
    from jaxspec.analysis.predict import has_alpha
    from jaxspec.core import Model

    left, notes, counted = [], dict[str, None](), {one.drafter_name for one in settings if one.gamma != PLANNED}
    for one in settings:
        stops = getattr(getattr(one.policy, "functions", one.policy), "should_continue", None) is not None
        if one.drafter is not None and _drafts_trees(one.drafter) and (stops or not one.rule.trees):
            what = f"the policy {one.policy_label} stops a draft token by token" if stops else (
                f"the rule {one.rule.name} takes chains of draft tokens only"
            )  # fmt: skip
            notes[f"{one.drafter_name} drafts trees, and {what}: left out"] = None
        elif one.gamma != PLANNED or has_alpha(one):
            left.append(one)
        else:
            instead = "left out" if one.drafter_name in counted else f"γ = {GAMMA} in its place"
            why = f"the rule {one.rule.name} has no α" if isinstance(one.drafter, Model) else "it is no model"
            notes[f"no γ can be planned for {one.drafter_name}, for {why}: {instead}"] = None
            left += [] if one.drafter_name in counted else [one._replace(gamma=GAMMA)]
    if not left and settings:
        raise ValueError(f"nothing is left to measure: {'; '.join(notes)}")
    for line in notes:
        print(line, file=sys.stderr)
    return left


def model(name: str, work: Workload, dtype: str, seed: int = 0) -> Model:
    """Loads a model of a workload."""
    return names.model(name, dtype, work.mesh, seed=work.seed + seed)


def _draft_model(work: Workload, dtype: str, name: str) -> Model:
    return model(name, work, dtype, seed=1)


def check_files(work: Workload) -> None:
    """Refuses files that could not be written, or gone on with, when all is measured.

    Raises:
        ValueError, OSError: there is such a file.
    """
    from jaxspec import files
    from jaxspec.analysis.bench import Store

    if work.csv is not None and not work.csv.resolve().parent.is_dir():
        raise ValueError(f"--csv is {work.csv}: there is no folder {work.csv.parent}")
    for name, file in (("--csv", work.csv), ("--resume", work.resume)):
        if file is not None and file.is_dir():
            raise ValueError(f"{name} is {file}: expected a file, and this is a folder")
        if file is not None:
            files.check_writable(file)
    Store(work.resume)


def given_tasks(work: Workload) -> list[Task]:
    """Prompts of a file, or of the tasks that are named; none, if the target is to say which it is for."""
    from jaxspec.analysis.bench import Task

    prompts, ends = max(work.count, work.rows), not work.full_length
    if work.task and work.prompts is not None:
        raise ValueError("got --task and --prompts: expected one of them")
    if work.target.startswith(names.RANDOM):
        return []
    if work.prompts is not None:
        return [Task(name, some, work.max_new_tokens, ends) for name, some in by_task(work.prompts, prompts).items()]
    tasks = lists.values(work.task, "--task") if work.task else ()
    return [Task(name, heldout(name, prompts), work.max_new_tokens, ends) for name in tasks]


def tasks_for(target: Model, work: Workload) -> list[Task]:
    """Prompts where none are given: held out, or, for a published shape, random."""
    from jaxspec.analysis.bench import Task
    from jaxspec.analysis.random_model import random_prompt
    from jaxspec.files import corpus

    if work.target.startswith(names.RANDOM):
        prompt = random_prompt(target, max(work.count, work.rows), RANDOM_PROMPT)
        return [Task("random prompts", prompt, work.max_new_tokens, ends=False)]
    return given_tasks(work._replace(task=",".join(corpus.tasks_of(target))))


def _drafts_trees(drafter: Any) -> bool:
    return getattr(getattr(drafter, "functions", None), "tree", None) is not None


def _gamma(part: str) -> int | str:
    return PLANNED if part == PLANNED else lists.positive(part)
