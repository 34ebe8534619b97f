"""`jaxspec drafts`: drafters and draft-length policies side by side, task by task, each beside plain decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxspec.analysis.options import numbers
from jaxspec.cli import kept, named, prices, speeds, tables
from jaxspec.cli.prompts import heldout
from jaxspec.cli.ways import Task, Way, compare, together

if TYPE_CHECKING:
    from jaxspec.base import Drafter, Model, Policy


def drafts(
    target: Annotated[str, typer.Option(help="The model to decode from.")] = "debian-t5-base",
    drafters: Annotated[
        str, typer.Option(help="As `generate --draft` has them, separated by commas; a+b asks b where a has no guess.")
    ] = "debian-t5-small,lookup",
    tasks: Annotated[
        str, typer.Option(help="Held-out prompts: translation, synopsis, edit, text; separated by commas.")
    ] = "",
    gammas: Annotated[str, typer.Option(help="Fixed numbers of guesses, separated by commas.")] = "1,2,3,5,8",
    policies: Annotated[
        str, typer.Option(help="Policies with at most the largest gamma; or 'none'.")
    ] = "heuristic,confidence,entropy,estimated",
    temperatures: Annotated[str, typer.Option(help="Each task at each of these; separated by commas.")] = "0",
    rows: Annotated[int, typer.Option(help="Prompts per task.", min=1)] = 12,
    batch: Annotated[int, typer.Option(help="Prompts at a time.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements, in turn.", min=1)] = 5,
    widen: Annotated[int, typer.Option(help="Widen the target's MLPs to this, the same function at more cost.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or int8 matrices in float32.")] = "float32",
    no_speed: Annotated[
        bool, typer.Option("--no-speed", help="Only α and tokens a round, in batches, nothing timed: no policies.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for a document.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare drafters and draft-length policies on held-out prompts.

    Every way takes its turn in each repeat, plain decoding too; ratios are to plain decoding in the same repeat. α is
    the share of kept guesses among those that had a trial; theory is the tokens per round over what its passes cost
    (Theorem 3.8 with the verify pass at its price); "of best" compares with that drafter's best fixed γ. Passes are
    priced greedily and, where a task is sampled, with a draw. With several tasks or temperatures a last table is of
    all of them as one workload. In a batch a round is as long as its longest draft.

        jaxspec drafts --drafters lookup,debian-t5-small --widen 9216

        jaxspec drafts --policies none --gammas 2,4

        jaxspec drafts --no-speed --gammas 3 --rows 64 --temperatures 0,1
    """
    import jax

    from jaxspec import model
    from jaxspec.analysis import cost, environment

    big = named.widened(model.load(target, dtype=dtype), widen)
    lengths, heat = numbers(gammas, "--gammas"), _temperatures(temperatures)
    names = [name for name in drafters.split(",") if name]
    if no_speed:
        made = {name: named.drafter(name, dtype, target=big) for name in names}
        found = {"environment": environment.current(), "target": target, "rows": rows, "new_tokens": new_tokens}
        found["results"] = _without_speed(big, made, _names(big, tasks), heat, lengths, rows, new_tokens)
        if as_json:
            print(json.dumps(found))
            return
        out = Console(highlight=False, width=200 if markdown else None)
        out.print(environment.line(found["environment"]))
        for index in range(len(lengths)):
            tables.show(out, kept.table(found["results"], index), markdown)
        return
    wanted = _tasks(big, tasks, heat, rows)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        kinds = sorted({task.sampled for task in wanted})
        example = speeds.groups_of(wanted[0].prompt, batch, batch)[0]
        shown = bar.add_task("costs", total=len(names) * (len(kinds) + len(wanted)))
        found: dict[str, Any] = {"environment": environment.current(), "target": target, "widen": widen, "batch": batch}
        found |= {"costs": [], "tasks": []}
        made = {name: named.drafter(name, dtype, target=big) for name in names}
        ways: dict[bool, list[Way]] = {}
        for sampled in kinds:
            sized: dict[str, Any] = dict(max_new_tokens=new_tokens, sampled=sampled)
            most = max(lengths)
            passes = cost.measure_all(big, big, example, gammas=sorted({*lengths, *cost.judged(most)}), **sized)
            exact = {one.gamma: one.v for one in passes}
            v = cost.stepped(most, exact)
            c, search = {}, {}
            ways[sampled] = [Way(("plain", ""), None, 0)]
            for name, drafter in made.items():
                c[name] = prices.of_guess(drafter, name, dtype, big, example, **sized)
                fixed = [(n, fixed_costs(drafter, n, exact[n])) for n in lengths]
                ways[sampled] += [Way((name, f"γ = {n}"), drafter, n, None, c[name], each) for n, each in fixed]
                search[name] = prices.of_search(drafter, big, example, gamma=most, **sized)
                free = chosen(policies, c[name], v + search[name] * (np.arange(most + 1) > 0))
                ways[sampled] += [Way((name, kind), drafter, most, p, c[name], v) for kind, p in free]
                bar.update(shown, advance=1)
            costs = {"sampled": sampled, "c": c, "search": search, "v": v.tolist(), "v_by_gamma": exact}
            found["costs"].append(costs)
        for task in wanted:
            bar.update(shown, description=task.name, advance=len(names))
            sized = dict(batch=batch, new_tokens=new_tokens, repeats=repeats)
            found["tasks"].append(compare(big, ways[task.sampled], task, **sized))
            jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes
    if len(wanted) > 1:
        found["tasks"].append(together(found["tasks"]))
    if as_json:
        print(json.dumps(found))
        return
    out = Console(highlight=False, width=160 if markdown else None)
    out.print(environment.line(found["environment"]))
    for table in map(table_of, found["tasks"]):
        tables.show(out, table, markdown)
    differ = [
        r
        for task in found["tasks"][: len(wanted)]
        for r in task["results"]
        if not r["sampled"] and r["same_text"] < r["prompts"]
    ]
    out.print(f"{len(differ)} of the greedy runs said anything else than plain decoding.")
    for costs in found["costs"]:
        passes = ", ".join(f"{v:.2f} (γ = {n})" for n, v in costs["v_by_gamma"].items())
        guesses = ", ".join(f"{c:.3f} ({name})" for name, c in costs["c"].items())
        how = "With draws" if costs["sampled"] else "Greedily"
        out.print(f"{how}, in one-token passes: verifying γ guesses costs {passes}; a guess costs {guesses}.")


def _without_speed(
    target: Model,
    drafters: dict[str, Model | Drafter],
    tasks: Sequence[str],
    temperatures: Sequence[float],
    gammas: Sequence[int],
    rows: int,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """What each drafter's guesses are worth, by task and temperature."""
    import jax

    found = []
    with Console(stderr=True).status("starting") as status:
        for task, temperature in itertools.product(tasks, temperatures):
            asked: dict[str, Any] = dict(gammas=gammas, temperature=temperature, new_tokens=new_tokens)
            for name, drafter in drafters.items():
                status.update(f"{task}, T = {temperature:g}, {name}")
                about = {"drafter": name, "task": task, "temperature": temperature}
                found.append(about | kept.measure(target, drafter, heldout(task, rows), **asked))
            jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes
    return found


def fixed_costs(drafter: Model | Drafter, gamma: int, v: float) -> np.ndarray:
    """v of a fixed gamma, by number of guesses: the pass is of one width, but for rounds without a guess."""
    costs = np.full(gamma + 1, v)
    if getattr(drafter, "abstains", False):  # a Model has none, and always guesses
        costs[0] = 1.0
    return costs


def chosen(names: str, c: float, v: np.ndarray) -> list[tuple[str, Policy]]:
    """Policies by their names; `estimated` knows what was measured, searches included."""
    wanted = [] if names == "none" else [name for name in names.split(",") if name]
    return [(name, named.policy(name, c=c, v=v)) for name in wanted]


def table_of(found: dict[str, Any]) -> Table:
    """A task for a screen."""
    plain, *results = found["results"]
    speed = plain["tokens_per_second"]
    title = f"{found['task']}, {found['prompts']} prompts; plain {speed['median']:.1f} tokens/s"
    heads = ("× plain", "spread", "theory", "of best", "α", "tokens\nper round", "guesses", "in the\nlongest")
    view = tables.table(heads, first="", title=title)
    last = ""
    for result in results:
        if result["drafter"] != last:
            last = result["drafter"]
            view.add_section()
            view.add_row(last, style="bold")
        ratio, alpha = result["ratio"], result["alpha"]
        view.add_row(
            result["way"],
            f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f}..{ratio['max']:.2f}",
            "–" if result["predicted"] is None else f"{result['predicted']:.2f}",
            "–" if result["of_best_fixed"] is None else f"{result['of_best_fixed']:.2f}",
            "–" if alpha is None else f"{alpha:.2f}",
            f"{result['tokens_per_round']:.2f}",
            f"{result['guesses_per_round']:.2f}",
            f"{result['longest_per_round']:.2f}",
        )
    return view


def _names(target: Model, tasks: str) -> Sequence[str]:
    """The tasks that were asked for, or those that the target is for."""
    from jaxspec.analysis.heldout import tasks_of

    return tasks.split(",") if tasks else tasks_of(target)


def _tasks(target: Model, names: str, temperatures: list[float], rows: int) -> list[Task]:
    from jaxspec.decode import request

    prompts = {name: request.encode(target, heldout(name, rows)) for name in _names(target, names)}
    return [Task(f"{name}, T = {t:g}", prompt, t) for name, prompt in prompts.items() for t in temperatures]


def _temperatures(text: str) -> list[float]:
    """Numbers separated by commas.

    >>> _temperatures("0,0.7")
    [0.0, 0.7]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if min(found) < 0:
        raise ValueError(f"--temperatures is {text!r}: expected numbers of at least 0, separated by commas")
    return found
