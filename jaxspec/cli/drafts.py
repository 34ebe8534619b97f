"""`jaxspec drafts`: drafters and draft-length policies side by side, task by task, each beside plain decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from jaxspec.cli import console, options
from jaxspec.cli.options import TARGET, Dtype, Json, Markdown, Target, Widen
from jaxspec.cli.prompts import heldout

if TYPE_CHECKING:
    from jaxspec.analysis.bench.variants import Variant
    from jaxspec.base import Bound, Model
    from jaxspec.decode.request import Job


def drafts(
    target: Target = TARGET,
    drafters: Annotated[
        str, typer.Option(help="As `generate --draft` has them, separated by commas; a+b asks b where a has no draft.")
    ] = "debian-t5-small,prompt_lookup",
    tasks: Annotated[
        str, typer.Option(help="Held-out prompts: translation, synopsis, edit, text; separated by commas.")
    ] = "",
    gammas: Annotated[str, typer.Option(help="Fixed numbers of draft tokens, separated by commas.")] = "1,2,3,5,8",
    policies: Annotated[
        str, typer.Option(help="Policies with at most the largest gamma; or 'none'.")
    ] = "heuristic,confidence,entropy,adaptive",
    temperatures: Annotated[str, typer.Option(help="Each task at each of these; separated by commas.")] = "0",
    rows: Annotated[int, typer.Option(help="Prompts per task.", min=1)] = 12,
    batch: Annotated[int, typer.Option(help="Prompts at a time.", min=1)] = 1,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements, interleaved.", min=1)] = 5,
    widen: Widen = 0,
    dtype: Dtype = "float32",
    no_speed: Annotated[
        bool, typer.Option("--no-speed", help="Only α and tokens a round, in batches, nothing timed: no policies.")
    ] = False,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Compare drafters and draft-length policies on held-out prompts.

    All variants are interleaved, plain decoding too; ratios are to plain decoding in the same repeat. α is the share of
    accepted draft tokens among those that had a trial; theory is the tokens per round over what its passes cost
    (Theorem 3.8 with the verify pass at its measured cost); "of best" compares with that drafter's best fixed γ. Passes
    are timed greedily and, where a task is sampled, with a draw. With several tasks or temperatures a last table is of
    all of them as one workload. In a batch a round is as long as its longest draft.

        jaxspec drafts --drafters prompt_lookup,debian-t5-small --widen 9216

        jaxspec drafts --policies none --gammas 2,4

        jaxspec drafts --no-speed --gammas 3 --rows 64 --temperatures 0,1
    """
    import jax

    from jaxspec import model
    from jaxspec.analysis.bench.variants import compare, together
    from jaxspec.analysis.measure import environment
    from jaxspec.corpus import tasks_of
    from jaxspec.decode.request import prepare

    big = options.widened(model.load(target, dtype=dtype), widen)
    lengths, heat = (
        options.integers(gammas, "--gammas"),
        options.floats(temperatures, "--temperatures", 0.0, float("inf")),
    )
    made = {name: options.drafter(name, dtype, target=big) for name in drafters.split(",") if name}
    jobs: dict[tuple[str, float], Job] = {}
    for task in tasks.split(",") if tasks else tasks_of(big):
        job = prepare(big, heldout(task, rows), gamma=max(lengths), max_new_tokens=new_tokens, key=jax.random.key(0))
        jobs |= {(task, temperature): job.replace(temperature=temperature) for temperature in heat}
    found: dict[str, Any] = {"environment": environment.current(), "target": target}
    out = console.wide(markdown)
    if no_speed:
        found |= {"rows": rows, "new_tokens": new_tokens, "results": untimed_results(jobs, made, lengths)}
        if as_json:
            print(json.dumps(found))
            return
        out.print(environment.line(found["environment"]))
        for index in range(len(lengths)):
            console.show(out, untimed_table(found["results"], index), markdown)
        return
    with console.progress() as bar:
        kinds = sorted({temperature > 0 for temperature in heat})
        shown = bar.add_task("costs", total=len(made) * (len(kinds) + len(jobs)))
        found |= {"widen": widen, "batch": batch, "costs": [], "tasks": []}
        variants: dict[bool, list[Variant]] = {}
        for kind in kinds:
            job = next(job for (_, temperature), job in jobs.items() if (temperature > 0) == kind)
            variants[kind], costs = timed_variants(job, made, lengths, policies, batch)
            found["costs"].append({"sampled": kind} | costs)
            bar.update(shown, advance=len(made))
        for (task, temperature), job in jobs.items():
            bar.update(shown, description=f"{task}, T = {temperature:g}", advance=len(made))
            name = f"{task}, T = {temperature:g}"
            found["tasks"].append(compare(job, variants[temperature > 0], name, batch=batch, repeats=repeats))
            jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes
    if len(jobs) > 1:
        found["tasks"].append(together(found["tasks"]))
    if as_json:
        print(json.dumps(found))
        return
    out.print(environment.line(found["environment"]))
    for table in map(table_of, found["tasks"]):
        console.show(out, table, markdown)
    for line in notes(found, len(jobs)):
        out.print(line)


def timed_variants(
    job: Job, drafters: dict[str, Model | Bound], gammas: Sequence[int], policies: str, batch: int
) -> tuple[list[Variant], dict[str, Any]]:
    """Plain decoding, every drafter with every gamma and policy, each with what its passes cost; and these costs."""
    from jaxspec.analysis.bench.variants import Variant, of_variant
    from jaxspec.analysis.measure import cost
    from jaxspec.analysis.measure import jobs as parts

    (example,), most = parts.whole_batches(job, batch, batch), max(gammas)
    passes = cost.measure_all(example.replace(drafter=job.target), sorted({*gammas, *cost.measured_drafts(most)}))
    exact = {one.gamma: one.v for one in passes}
    v = cost.monotone_costs(most, exact)
    c, search, found = {}, {}, [Variant(("plain", ""), None, 0)]
    for name, drafter in drafters.items():
        own = of_variant(example, Variant((name, ""), drafter, most))
        c[name], search[name] = cost.draft_token_cost(own), cost.search_cost(own)
        for n in gammas:
            fixed = Variant((name, f"γ = {n}"), drafter, n, None, c[name])
            found.append(fixed._replace(v=fixed_costs(fixed, exact[n])))
        free = chosen(policies, c[name], v + search[name] * (np.arange(most + 1) > 0))
        found += [Variant((name, kind), drafter, most, policy, c[name], v) for kind, policy in free]
    return found, {"c": c, "search": search, "v": v.tolist(), "v_by_gamma": exact}


def notes(found: dict[str, Any], tasks: int) -> list[str]:
    """How many texts differ, and what passes cost."""
    results = [result for task in found["tasks"][:tasks] for result in task["results"] if not result["sampled"]]
    differ = sum(result["same_text"] < result["prompts"] for result in results)
    lines = [f"{differ} of the greedy runs generated another text than plain decoding."]
    for costs in found["costs"]:
        passes = ", ".join(f"{v:.2f} (γ = {n})" for n, v in costs["v_by_gamma"].items())
        each = ", ".join(f"{c:.3f} ({name})" for name, c in costs["c"].items())
        how = "With draws" if costs["sampled"] else "Greedily"
        lines.append(
            f"{how}, in one-token passes: verifying γ draft tokens costs {passes}; a draft token costs {each}."
        )
    return lines


def untimed_results(
    jobs: dict[tuple[str, float], Job], drafters: dict[str, Model | Bound], gammas: Sequence[int]
) -> list[dict[str, Any]]:
    """What each drafter's draft tokens are worth, by task and temperature."""
    import jax

    from jaxspec.analysis.bench import untimed

    found = []
    with Console(stderr=True).status("starting") as status:
        for (task, temperature), job in jobs.items():
            for name, drafter in drafters.items():
                status.update(f"{task}, T = {temperature:g}, {name}")
                about = {"drafter": name, "task": task, "temperature": temperature}
                found.append(about | untimed.measure(job.replace(drafter=drafter), gammas))
            jax.clear_caches()  # each program takes memory maps, and a process that runs out of these crashes
    return found


def fixed_costs(variant: Variant, v: float) -> np.ndarray:
    """v of a fixed gamma, by number of draft tokens: the pass is of one width, but for rounds without a draft."""
    costs = np.full(variant.gamma + 1, v)
    if variant.may_be_empty:
        costs[0] = 1.0
    return costs


def chosen(names: str, c: float, v: np.ndarray) -> list[tuple[str, Bound]]:
    """Policies by their names; `adaptive` gets what was measured, searches included."""
    wanted = [] if names == "none" else [name for name in names.split(",") if name]
    return [(name, options.policy(name, c=c, v=v)) for name in wanted]


def table_of(found: dict[str, Any]) -> Table:
    """A task for a screen."""
    plain, *results = found["results"]
    speed = plain["tokens_per_second"]
    title = f"{found['task']}, {found['prompts']} prompts; plain {speed['median']:.1f} tokens/s"
    heads = ("× plain", "spread", "theory", "of best", "α", "tokens\nper round", "draft\ntokens", "in the\nlongest")
    view = console.table(heads, first="", title=title)
    last = ""
    for result in results:
        if result["drafter"] != last:
            last = result["drafter"]
            view.add_section()
            view.add_row(last, style="bold")
        ratio, alpha = result["ratio"], result["alpha"]
        view.add_row(
            result["variant"],
            f"{ratio['median']:.2f}",
            f"{ratio['min']:.2f}..{ratio['max']:.2f}",
            "–" if result["predicted"] is None else f"{result['predicted']:.2f}",
            "–" if result["of_best_fixed"] is None else f"{result['of_best_fixed']:.2f}",
            "–" if alpha is None else f"{alpha:.2f}",
            f"{result['tokens_per_round']:.2f}",
            f"{result['draft_tokens_per_round']:.2f}",
            f"{result['longest_per_round']:.2f}",
        )
    return view


def untimed_table(found: Sequence[dict[str, Any]], index: int) -> Table:
    """Drafters by task and temperature, at one of the gammas.

    Args:
        found: of `untimed_results`.
        index: of the gamma.
    """
    heads = list(dict.fromkeys(head(row) for row in found))
    rows: dict[str, dict[str, str]] = {}
    for row in found:
        rows.setdefault(row["drafter"], {})[head(row)] = cell(row["alpha"], row["by_gamma"][index])
    gamma = found[0]["by_gamma"][index]["gamma"]
    title = f"γ = {gamma}: α (or accepted of tested, in rounds with a draft) · tokens a round"
    made = console.table(heads, first="drafter", title=title)
    for name, cells in rows.items():
        made.add_row(name, *(cells[head] for head in heads))
    return made


def head(row: dict[str, Any]) -> str:
    """Of its column."""
    return f"{row['task']}, T = {row['temperature']:g}"


def cell(alpha: dict[str, Any] | None, run: dict[str, Any]) -> str:
    """Alpha, or what is known where there is none; and tokens a round.

    >>> run = {"conditional": {"value": 0.6}, "drafted": {"value": 0.36}, "tokens_per_round": {"value": 1.35}}
    >>> cell(None, run), cell({"value": 0.64}, run)
    ('0.60 in 36% · 1.35', '0.64 · 1.35')
    >>> run |= {"conditional": {"value": None}, "drafted": {"value": 0.0}, "tokens_per_round": {"value": 1.0}}
    >>> cell(None, run)
    '– · 1.00'
    """
    rate, tokens = run["conditional"]["value"], run["tokens_per_round"]["value"]
    worth = "–" if rate is None else f"{rate:.2f} in {run['drafted']['value']:.0%}"
    text = worth if alpha is None else f"{alpha['value']:.2f}"
    return text if tokens is None else f"{text} · {tokens:.2f}"
