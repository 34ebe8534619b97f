"""What `bench` and `measure` share: options that name settings, the settings, and printing what is found of them."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import console, options
from jaxspec.cli.options import DRAFT, TARGET, Json, Markdown, Seed, number, text
from jaxspec.cli.prompts import from_file, heldout, references

if TYPE_CHECKING:
    from jaxspec.analysis.bench import Config, Row, Setting, Store, Task
    from jaxspec.analysis.bench.table import Column
    from jaxspec.base import Bound, Model, Rule

COUNTED = {"unigram": 1, "bigram": 2, "trigram": 3}
PLANNED, RANDOM, UNROUNDED, NONE = "plan", "random:", "unrounded:", "none"


class Workload(NamedTuple):
    """The shared options; lists are separated by commas, and every combination is measured."""

    target: Annotated[str, text("MODEL", "Model to decode from, or random:SHAPE.")] = TARGET
    drafters: Annotated[str, text("NAMES", "As generate --draft; unigram, bigram; none.", "--drafters", "-d")] = DRAFT
    tasks: Annotated[str, text("NAMES", "Held-out translation, synopsis, edit, text.")] = ""
    prompts: Annotated[Path | None, text("FILE", "Instead: one a line, or .jsonl with inputs.")] = None
    temperatures: Annotated[str, text("T,T", "Of sampling; 0 is greedy.", "--temperatures", "-t")] = "0"
    gammas: Annotated[str, text("N,N", "Draft tokens a round, or plan.", "--gammas", "-g")] = "3"
    rules: Annotated[str, text("NAMES", "Of acceptance: block, lenient=0.3; or all.")] = "rejection"
    policies: Annotated[str, text("NAMES", "Also these, at the largest gamma.")] = ""
    batches: options.Batches = "1"
    dtypes: Annotated[str, text("NAMES", "float32, bfloat16, int8.")] = "float32"
    mesh: Annotated[str | None, text("MESH", "Devices, as data=2,model=4.")] = None
    widen: options.Widen = 0
    widen_draft: Annotated[int, number("The same for a model that drafts.", least=0)] = 0
    count: Annotated[int, number("Prompts per task to measure alpha on.")] = 8
    rows: Annotated[int, number("Prompts that a timed run decodes.")] = 8
    new_tokens: Annotated[int, number("Most new tokens per prompt.", "--new-tokens", "-n")] = 64
    full_length: Annotated[bool, typer.Option("--full-length", help="Exactly so many: nothing ends a text.")] = False
    repeats: Annotated[int, number("Timed runs, interleaved.")] = 5
    seed: Seed = 0
    resume: Annotated[Path | None, text("FILE", "Rows that are there are not measured again.")] = None
    minutes: Annotated[float | None, text("M", "Begin nothing after so many; --resume goes on.")] = None
    csv_file: Annotated[Path | None, text("FILE", "Also write all rows there.", "--csv")] = None
    markdown: Markdown = False
    as_json: Json = False


def workload_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of `Workload`, with some other defaults; they reach it as `workload`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(Workload, include_extras=True)
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, Workload._field_defaults[name]),
                annotation=hint,
            )
            for name, hint in hints.items()
        ]
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "workload"]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            work = Workload(**{name: given.pop(name, defaults.get(name)) for name in Workload._fields})
            command(work, **given)

        del wrapper.__wrapped__  # typer reads what this one takes
        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        wrapper.__signature__ = inspect.Signature([*shared, *keywords])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*shared, *keywords]}
        return wrapper

    return decorate


def settings_of(work: Workload, backends: Sequence[str] = ()) -> tuple[Model, list[Setting]]:
    """The target, and every combination of what was given; the first dtype is what the others are compared with."""
    from jaxspec.analysis.bench import product

    heats = options.floats(work.temperatures, "--temperatures", 0.0, float("inf"))
    gammas = [PLANNED if g == PLANNED else _whole(g) for g in options.parts(work.gammas, "--gammas")]
    names = [name for name in options.parts(work.drafters, "--drafters") if name != NONE]
    policies = [name for name in work.policies.split(",") if name not in ("", NONE)]
    targets = [model(work.target, dtype, work, work.widen, 0) for dtype in options.parts(work.dtypes, "--dtypes")]
    shared: dict[str, Any] = {"sampling": [{"temperature": heat} for heat in heats]}
    shared |= {"batch": list(options.integers(work.batches, "--batches")), "rule": _rules(work.rules)}
    shared["task"] = tasks = _tasks(targets[0], work)
    made = []
    for dtype, target in zip(options.parts(work.dtypes, "--dtypes"), targets, strict=True):
        own = shared | {"target": None if target is targets[0] else target}
        drafters = {name: _drafter(name, target, dtype, work) for name in names}
        made += product(**own, drafter=[None]) if not names else []
        made += product(**own, drafter=drafters, gamma=gammas) if names else []
        if names and policies:
            most = max((g for g in gammas if isinstance(g, int)), default=0)
            if not most:
                raise ValueError("--policies need the most draft tokens of a round: give a number among the --gammas")
            made += product(**own, drafter=drafters, gamma=most, policy=_policies(policies))
    order = {id(task): i for i, task in enumerate(tasks)}
    made = [one.on(backend) for one in made for backend in backends or ("jaxspec",)]
    return targets[0], sorted(made, key=lambda one: order[id(one.task)])


def measured(
    target: Model, settings: Sequence[Setting], work: Workload, config: Config, store: Store | None
) -> list[Row]:
    """Runs the settings, with a progress bar."""
    from jaxspec.analysis import bench

    until, rows = float("inf") if work.minutes is None else time.monotonic() + 60 * work.minutes, []
    with console.progress() as bar:
        shown = bar.add_task("loading", total=len(settings))
        for row in bench.run(target, settings, store, config, doing=lambda what: bar.update(shown, description=what)):
            rows.append(row)
            bar.update(shown, advance=not row.is_plain)
            if time.monotonic() > until:
                print("Time is over: the same command goes on where this ended.", file=bar.console.file)
                break
    return rows


def store_of(work: Workload) -> Store | None:
    """Of the rows that were found before."""
    from jaxspec.analysis.bench import Store

    return None if work.resume is None else Store(work.resume)


def show(rows: list[Row], work: Workload, sets: Sequence[Sequence[Column]], more: Sequence[str] = ()) -> None:
    """Prints rows: one table, or several, for each set of columns, and what they mean; exits with 1 if any failed."""
    from jaxspec.analysis.bench import table, to_json
    from jaxspec.analysis.measure import environment

    about = dict(rows[0].environment) if rows else environment.current()
    if work.csv_file is not None:
        from jaxspec.files import write_text

        write_text(work.csv_file, [table.as_csv(rows)])
    if work.as_json:
        print(json.dumps({"environment": about, "rows": [to_json(row) for row in rows]}, ensure_ascii=False))
    else:
        out = Console(highlight=False, width=400) if work.markdown else Console(highlight=False)
        out.print(Text(f"{environment.line(about)}, load {about['load']}, {about['date'][:10]}", "bold"))
        width, whole = None if work.markdown else out.width, rows + table.together(rows)
        for made in (one for columns in sets for one in table.tables(whole, columns, width)):
            if work.markdown:
                out.print()
            console.show(out, made, work.markdown)
        for line in [*more, *table.notes(rows)]:
            out.print(*[""] * work.markdown, Text(line), sep="\n", soft_wrap=work.markdown)
    if any(row.error for row in rows):
        raise typer.Exit(1)


def model(name: str, dtype: str, work: Workload, widen: int, seed: int) -> Model:
    """A model by its name; with random: a published shape, with unrounded: what int8 may have been before."""
    import jax

    from jaxspec import model
    from jaxspec.analysis.measure import synthetic
    from jaxspec.weights import orbax

    if name.startswith(RANDOM):
        made = synthetic.random_model(name.removeprefix(RANDOM), dtype, seed)
    elif name.startswith(UNROUNDED):
        stored = (model.load(name.removeprefix(UNROUNDED), dtype=kind, mesh=work.mesh) for kind in ("int8", dtype))
        drawn = synthetic.unrounded(next(stored).params, jax.random.fold_in(jax.random.key(work.seed), seed))
        made = next(stored)._replace(params=orbax.cast(drawn, dtype))
    else:
        made = model.load(name, dtype=dtype, mesh=work.mesh)
    return options.widened(made, widen)


def _drafter(name: str, target: Model, dtype: str, work: Workload) -> Model | Bound:
    if name in COUNTED:
        from jaxspec import drafters

        texts = references(target, max(work.count, work.rows))
        if not texts:
            raise ValueError(f"--count {work.count} leaves no held-out texts to count a {name} on: take fewer prompts")
        return drafters.ngram(texts, target, order=COUNTED[name])._replace(name=name)
    if name.startswith((RANDOM, UNROUNDED)):
        return model(name, dtype, work, work.widen_draft, 1)
    made = options.drafter(name, dtype, work.mesh, target)  # type: ignore[arg-type]
    from jaxspec.base import Model

    return options.widened(made, work.widen_draft) if isinstance(made, Model) else made


def _tasks(target: Model, work: Workload) -> list[Task]:
    from jaxspec.analysis.bench import Task
    from jaxspec.analysis.bench.paper import SOURCE
    from jaxspec.analysis.measure.synthetic import random_prompt
    from jaxspec.corpus import tasks_of

    prompts = max(work.count, work.rows)
    if work.tasks and work.prompts is not None:
        raise ValueError("got --tasks and --prompts: expected one of them")
    if work.target.startswith(RANDOM):
        rows = random_prompt(target, prompts, SOURCE)
        return [Task("random prompts", rows, work.new_tokens, ends=False)]
    if work.prompts is not None:
        return [Task(work.prompts.stem, from_file(work.prompts, prompts), work.new_tokens, not work.full_length)]
    names = options.parts(work.tasks or ",".join(tasks_of(target)), "--tasks")
    return [Task(name, heldout(name, prompts), work.new_tokens, not work.full_length) for name in names]


def _policies(names: Sequence[str]) -> dict[str, Any]:
    """By their names; `adaptive` gets what is measured."""
    return {name: name if name == "adaptive" else options.policy(name) for name in names}


def _rules(given: str) -> list[Rule]:
    """Rules by their names, or by their names and first numbers; of a lenience 1 is the rejection rule."""
    from jaxspec import accept
    from jaxspec.accept import catalogue

    if given == "all":
        return [entry.rule for entry in catalogue.RULES.values()]
    found = []
    for part in options.parts(given, "--rules"):
        name, _, number = part.partition("=")
        try:
            value = [float(number)] if number else []
        except ValueError:
            value = None
        if name not in catalogue.RULES or value is None:
            raise ValueError(
                f"--rules has {part!r}: expected all, or some of {', '.join(catalogue.RULES)}, or NAME=NUMBER"
            )
        rule = getattr(accept, name)(*value) if value else catalogue.RULES[name].rule
        found.append(accept.rejection() if (name, value) == ("lenient", [1.0]) else rule)
    return found


def _whole(part: str) -> int:
    if not part.isdecimal() or int(part) < 1:
        raise ValueError(f"--gammas has {part!r}: expected positive integers, or {PLANNED}")
    return int(part)
