"""`jaxspec measure`: the paper's Tables 2, 3 and 5 for a pair of one's own."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.options import (
    DRAFT,
    TARGET,
    Dtype,
    Json,
    Markdown,
    Seed,
    Target,
    Widen,
    floats,
    parts,
    widened,
)
from jaxspec.cli.prompts import from_file, heldout, references

if TYPE_CHECKING:
    from jaxspec.analysis.bench.grid import Settings, Task
    from jaxspec.base import Model

COUNTED = {"unigram": 1, "bigram": 2, "trigram": 3}
PLANNED = "plan"
TOKENS, THEOREM = "tokens\na round", "Thm\n3.8"
WIDE_ONLY = (THEOREM, "c", TOKENS, "v")  # columns that a narrow screen does not have, the first ones first


def measure(
    target: Target = TARGET,
    draft: Annotated[
        str, typer.Option(help="The models that draft, separated by commas; unigram, bigram and trigram are counted.")
    ] = DRAFT,
    task: Annotated[
        str, typer.Option(help="Held-out prompts, separated by commas: translation, synopsis, edit, text.")
    ] = "",
    prompts: Annotated[
        Path | None, typer.Option(help="Instead of a --task: a file of prompts, one a line, or .jsonl with inputs.")
    ] = None,
    temperature: Annotated[str, typer.Option("--temperature", "-t", help="Separated by commas.")] = "0,1",
    gamma: Annotated[
        str,
        typer.Option("--gamma", "-g", help="Draft tokens a round, separated by commas; plan: that of jaxspec plan."),
    ] = PLANNED,
    lenience: Annotated[str, typer.Option(help="Above 0, at most 1 (exact), separated by commas.")] = "1",
    count: Annotated[int, typer.Option(help="Prompts per task to measure α on.", min=2)] = 64,
    rows: Annotated[int, typer.Option(help="Prompts that one timed run decodes.", min=1)] = 8,
    batch: Annotated[int, typer.Option(help="Prompts at a time in timed runs.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.", min=1)] = 5,
    seed: Seed = 0,
    widen: Widen = 0,
    dtype: Dtype = "float32",
    resume: Annotated[
        Path | None,
        typer.Option(help="A file of finished cells: what it has is not measured again, what it lacks is added."),
    ] = None,
    csv_out: Annotated[Path | None, typer.Option("--csv", help="Also write the table to this file.")] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Measure a pair: α, c and v, and the speed-up as predicted and as it is, by task, temperature and lenience.

    α is over all positions of the target's own text, with 95% intervals; --json and --csv add how many of the draft
    tokens that had a trial were accepted, over all and by their place in the round ("conditional"). The prediction is
    Theorem 3.8 with v, which takes draft tokens to be independent, in texts as long as these; replayed is the same with
    the tokens a round that these texts would yield (known of exact rules only). Plain decoding and all γ of a setting
    are interleaved, so that --gamma plan,1,2,3,5,7 compares the plan with a sweep; where tokens are sampled each γ
    generates another text, and they are compared "on average": as timed, with the tokens of replayed rounds in place of
    their own. n-gram drafters are counted on the references of held-out prompts that are not measured on. A narrow
    screen has fewer columns; --json and --csv have all. An interrupted run goes on where it was if given the same
    --resume.

        jaxspec measure --draft debian-t5-small,bigram,unigram --resume t5.jsonl

        jaxspec measure --temperature 1 --lenience 1,0.5,0.3,0.1
    """
    from jaxspec import model
    from jaxspec.analysis.bench import grid
    from jaxspec.analysis.bench.store import Store
    from jaxspec.analysis.measure import environment

    settings = grid.Settings(
        temperatures=floats(temperature, "--temperature", 0.0, float("inf")),
        leniences=floats(lenience, "--lenience", 1e-9, 1.0),
        gammas=tuple(PLANNED if g == PLANNED else _whole(g) for g in parts(gamma, "--gamma")),
        new_tokens=new_tokens,
        rows=rows,
        batch=batch,
        repeats=repeats,
        seed=seed,
        dtype=dtype,
    )
    if task and prompts is not None:
        raise ValueError("got a --task and --prompts: expected one of them")
    about, store = environment.current(), Store(resume)
    big = widened(model.load(target, dtype=dtype), widen)
    tasks = _tasks(big, task, prompts, count)
    drafters = [_drafter(name, big, count, dtype) for name in parts(draft, "--draft")]
    with console.progress() as bar:
        shown = bar.add_task("measure", total=grid.count(tasks, drafters, settings))
        found: list[dict[str, Any]] = []

        def doing(what: str) -> None:
            bar.update(shown, description=what)

        for cell in grid.measure(big, drafters, tasks, settings, store, doing=doing):
            found.append(cell)
            bar.update(shown, advance=1)
    if csv_out is not None:
        from jaxspec.files import write_text

        write_text(csv_out, [as_csv(found)])
    if as_json:
        print(json.dumps({"environment": about, "cells": found}, ensure_ascii=False))
        return
    out = console.wide(markdown)
    out.print(Text(headline(big, settings, about), "bold"))
    for made in of_pairs(found, out):
        console.show(out, made, markdown)
    out.print(Text(summary(found)))


def of_pairs(found: Sequence[dict[str, Any]], out: Console) -> list[Table]:
    """A table for each task and drafter, with a line for each cell, and as many columns as there is room for."""
    pairs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in found:
        pairs.setdefault((cell["task"], cell["draft_name"]), []).append(cell)
    made, unlimited = [], Console(width=1000)
    for (task, draft), some in pairs.items():
        sizes = [table(f"{task}, {draft}", some, WIDE_ONLY[:count]) for count in range(len(WIDE_ONLY) + 1)]
        made.append(next((one for one in sizes if unlimited.measure(one).maximum <= out.width), sizes[-1]))
    return made


def table(title: str, found: Sequence[dict[str, Any]], without: Sequence[str] = ()) -> Table:
    """A line for each cell, speed-ups after prefill; a setting that all have in common goes into the title.

    Args:
        title: above the table.
        found: the cells.
        without: heads of columns to leave out.
    """
    names = {"temperature": "T", "lenience": "l"}
    varied = [name for name in names if len({cell[name] for cell in found}) > 1]
    alike = [f"{names[name]} = {found[0][name]:g}" for name in names if name not in varied]
    lines = [{names[name]: f"{cell[name]:g}" for name in varied} | line_of(cell) for cell in found]
    heads = [head for head in dict.fromkeys(head for line in lines for head in line) if head not in without]
    if {PLANNED} < {cell["gamma"] for cell in found}:
        for cell, line in zip(found, lines, strict=True):
            line["γ"] += "*" if cell["gamma"] == PLANNED else ""
        alike.append("* the plan's")
    made = console.table(heads, title=", ".join([title, *alike]))
    for line in lines:
        made.add_row(*(line.get(head, "") for head in heads))
    return made


def line_of(cell: dict[str, Any]) -> dict[str, str]:
    """A cell by the heads of its columns; one without a speed has few."""
    alpha, low, high = (cell[name] for name in ("alpha", "alpha_low", "alpha_high"))
    after, error = cell["speed_after_prefill"], "" if low is None else f"±{max(alpha - low, high - alpha):.2f}"
    line = {"γ": f"{cell['chosen_gamma'] or 'plain'}", "α": f"{alpha:.2f}{error}"}
    if cell["chosen_gamma"]:
        line |= {"c": f"{cell['c']:.3f}", "v": f"{cell['v']:.2f}", TOKENS: f"{cell['tokens_per_round']:.2f}"}
        line |= {THEOREM: f"{cell['theorem']:.2f}", "pre-\ndicted": f"{cell['predicted']:.2f}"}
        line["re-\nplayed"] = "–" if cell["replayed"] is None else f"{cell['replayed']:.2f}"
        if after:
            line |= {"meas-\nured": f"{after['median']:.2f}", "min..max": f"{after['min']:.2f}..{after['max']:.2f}"}
        if averaged := cell["speed_on_average"]:
            line["on\naverage"] = f"{averaged['median']:.2f}"
    return line


def headline(target: Model, settings: Settings, about: dict[str, Any]) -> str:
    """What was measured, and on what."""
    from jaxspec.analysis.measure import environment
    from jaxspec.weights import int8

    how = f"batch {settings.batch}, {settings.new_tokens} new tokens, {settings.dtype}"
    size = console.count(int8.count(target.params))
    return f"{target.name} ({size}) · {how} · {environment.line(about)}, load {about['load']}"


def summary(found: Sequence[dict[str, Any]]) -> str:
    """How measured speeds (on average) compare with predicted ones, and the plan's gamma with the best of a sweep.

    >>> cell = {"task": "text", "draft": "d", "temperature": 0, "lenience": 1, "gamma": 4}
    >>> cell |= {"theorem": 2.5, "predicted": 2.0, "replayed": 1.9, "speed_after_prefill": {"median": 1.9}}
    >>> cell |= {"speed_on_average": None, "measured": {"id": "one"}}
    >>> for part in summary([cell]).split(". "):
    ...     print(part)
    Measured over predicted: 0.95 in the median of 1 cells, 0.95 to 0.95
    Measured over replayed: 1.00 in the median of 1 cells, 1.00 to 1.00
    Measured over Theorem 3.8 in endless texts: 0.76 in the median of 1 cells, 0.76 to 0.76.
    >>> summary([cell, cell | {"gamma": "plan", "predicted": None, "speed_after_prefill": None}]).split(". ")[3]
    "The plan's γ has 0.53 of the best γ's speed in the worst of 1 sweeps; in 1 it is not to speculate."
    """
    lines = []
    hows = {"predicted": "predicted", "replayed": "replayed", "theorem": "Theorem 3.8 in endless texts"}
    for name, how in hows.items():
        shares = [speed_of(cell) / cell[name] for cell in found if cell[name] and cell["speed_after_prefill"]]
        if shares:
            around = f"{min(shares):.2f} to {max(shares):.2f}"
            lines.append(
                f"Measured over {how}: {np.median(shares):.2f} in the median of {len(shares)} cells, {around}."
            )
    shares = plan_shares(found)
    plain = sum(cell["predicted"] is None for cell in found)
    if shares:
        worst = f"The plan's γ has {min(shares):.2f} of the best γ's speed in the worst of {len(shares)} sweeps"
        lines.append(worst + (f"; in {plain} it is not to speculate." if plain else "."))
    elif plain:
        lines.append(f"The plan is not to speculate in {plain}.")
    return " ".join(lines)


def plan_shares(found: Sequence[dict[str, Any]]) -> list[float]:
    """Speed with the plan's gamma over that with the best measured, where both were interleaved; sampled, on average.

    >>> cell = {"task": "text", "draft": "d", "temperature": 1, "lenience": 1, "gamma": 3, "predicted": 2.0}
    >>> cell |= {"measured": {"id": "one"}}
    >>> fast, lucky = ({"speed_after_prefill": {"median": speed}} for speed in (1.8, 2.0))
    >>> sweep = [cell | fast | {"gamma": "plan", "speed_on_average": {"median": 1.8}}]
    >>> plan_shares([*sweep, cell | lucky | {"speed_on_average": {"median": 1.7}}])
    [1.0]
    >>> plan_shares([*sweep, cell | lucky | {"speed_on_average": None}])
    [0.9]
    >>> plan_shares([*sweep, cell | lucky | {"speed_on_average": None, "measured": {"id": "another day"}}])
    []
    """
    sweeps: dict[tuple[Any, ...], dict[Any, float]] = {}
    for cell in found:
        speed = 1.0 if cell["predicted"] is None else speed_of(cell) if cell["speed_after_prefill"] else 0.0
        where = tuple(cell[name] for name in ("task", "draft", "temperature", "lenience")), cell["measured"]["id"]
        sweeps.setdefault(where, {})[cell["gamma"]] = speed
    both = [speeds for speeds in sweeps.values() if PLANNED in speeds and len(speeds) > 1]
    return [speeds[PLANNED] / max(1.0, *speeds.values()) for speeds in both]


def speed_of(cell: dict[str, Any]) -> float:
    """A cell's measured speed: on average, where that is known."""
    return (cell["speed_on_average"] or cell["speed_after_prefill"])["median"]


def as_csv(found: Sequence[dict[str, Any]]) -> str:
    """All cells as comma-separated values; a spread is three columns, and a list as many as it is long.

    >>> cell = {"task": "text", "speed": {"median": 1.5, "min": 1.0, "max": 2.0}, "c": None, "kinds": [{"low": 0.5}, 9]}
    >>> print(as_csv([cell, {"task": "edit", "c": 0.1}]), end="")
    task,speed_median,speed_min,speed_max,c,kinds_1_low,kinds_2
    text,1.5,1.0,2.0,,0.5,9
    edit,,,,0.1,,
    """
    lines = [{head: value for name, of in cell.items() for head, value in _columns(name, of)} for cell in found]
    heads = list(dict.fromkeys(head for line in lines for head in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, heads, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    """What is within a value, each by a name of its own; an empty list, or dict, has nothing."""
    if not isinstance(value, dict | list):
        return [(name, value)]
    parts = value.items() if isinstance(value, dict) else enumerate(value, start=1)
    return [column for part, inner in parts for column in _columns(f"{name}_{part}", inner)]


def _tasks(target: Model, names: str, file: Path | None, count: int) -> list[Task]:
    from jaxspec.analysis.bench import grid
    from jaxspec.corpus import tasks_of

    if file is not None:
        return [grid.Task(file.stem, from_file(file, count))]
    names = names or ",".join(tasks_of(target))
    return [grid.Task(name, heldout(name, count)) for name in parts(names, "--task")]


def _drafter(name: str, target: Model, count: int, dtype: str) -> Model:
    """A model by its name, or an n-gram one, counted."""
    from jaxspec import model

    if name not in COUNTED:
        return model.load(name, dtype=dtype)
    from jaxspec import drafters

    texts = references(target, count)
    if not texts:
        raise ValueError(f"--count {count} leaves no held-out texts to count a {name} on: take fewer prompts")
    return drafters.ngram(texts, target, order=COUNTED[name])._replace(name=name)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--gamma has {text!r}: expected positive integers, or {PLANNED}")
    return int(text)
