"""`jaxspec rules`: how much each acceptance rule accepts on a pair, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.options import Json, Markdown, Seed, integers
from jaxspec.cli.prompts import heldout_for

if TYPE_CHECKING:
    from jaxspec.analysis.measure.cost import Cost
    from jaxspec.base import Rule

TEMPERATURES = (0.0, 0.7, 1.0)
CANDIDATES = (1, 2, 4)  # for one token, which the rejection rule tries one after the other
SOURCE = 64  # tokens per prompt of the model whose pass is timed


def rules(
    target: Annotated[str, typer.Option(help="Of a pair: the model to decode from; both shipped pairs if none.")] = "",
    draft: Annotated[str, typer.Option(help="and the model that drafts.")] = "",
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Draft tokens a round.", min=1)] = 7,
    count: Annotated[int, typer.Option(help="Held-out prompts per pair.", min=2)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
    seed: Seed = 0,
    cost: Annotated[bool, typer.Option("--cost", help="Measure what the rules cost instead.")] = False,
    shape: Annotated[str, typer.Option(help="With --cost: whose pass to compare with.")] = "t5-v1_1-base",
    vocab: Annotated[str, typer.Option(help="With --cost: vocabularies, separated by commas.")] = "32128,256000",
    batch: Annotated[str, typer.Option(help="With --cost: batch sizes, separated by commas.")] = "1,32",
    repeats: Annotated[int, typer.Option(help="With --cost: calls of each rule.", min=1)] = 20,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Compare the acceptance rules: acceptance rates and tokens per round with confidence intervals, or costs.

    Rates are of held-out prompts, at temperatures 0, 0.7 and 1. Costs are of one verdict, by itself, beside a
    pass of a model with random weights at a published shape.

        jaxspec rules

        jaxspec rules --cost
    """
    if bool(target) != bool(draft):
        raise ValueError("a pair has two models: give --target and --draft, or neither")
    import jax

    from jaxspec import model
    from jaxspec.analysis.measure import environment
    from jaxspec.analysis.measure import rules as comparing
    from jaxspec.decode.request import prepare

    found: dict[str, Any] = {"environment": environment.current(), "gamma": gamma}
    with Console(stderr=True).status("starting") as status:
        if cost:
            sizes = [(b, v) for b in integers(batch, "--batch") for v in integers(vocab, "--vocab")]
            found |= {"shape": shape, "costs": cost_of_all(shape, sizes, gamma, repeats, status.update)}
        else:
            found["pairs"] = []
            for names in [(target, draft)] if target else shipped_pairs():
                big, small = (model.load(name, dtype="float32") for name in names)
                prompts, rows = heldout_for(big, count), []
                key = jax.random.key(seed)
                job = prepare(big, prompts, drafter=small, gamma=gamma, max_new_tokens=new_tokens, key=key)
                for temperature in TEMPERATURES:
                    status.update(f"{names[0]} and {names[1]} at temperature {temperature:g}")
                    some = job.replace(temperature=temperature)
                    rows += comparing.acceptance_of(some, every_rule(), candidates=CANDIDATES)
                about = {"target": names[0], "draft": names[1], "prompts": len(prompts), "new_tokens": new_tokens}
                found["pairs"].append(about | {"rules": rows})
    if as_json:
        print(json.dumps(found))
        return
    out = console.wide(markdown)
    out.print(Text(environment.line(found["environment"]), "bold"), *[""] * markdown, sep="\n")
    for table in cost_tables(found) if cost else pair_tables(found):
        console.show(out, table, markdown)


def shipped_pairs() -> list[tuple[str, str]]:
    """Every shipped target with its drafter."""
    from jaxspec.model import shipped

    names = list(shipped())
    pairs = [(name, name.removesuffix("-base") + "-small") for name in names if name.endswith("-base")]
    return [pair for pair in pairs if pair[1] in names]


def every_rule() -> list[Rule]:
    """The rules of the catalogue."""
    from jaxspec.accept import catalogue

    return [entry.rule for entry in catalogue.RULES.values()]


def cost_of_all(
    shape: str, sizes: list[tuple[int, int]], gamma: int, repeats: int, doing: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Microseconds of every rule at every batch size and vocabulary, and milliseconds of a pass at each batch size."""
    from jaxspec.analysis.measure import cost
    from jaxspec.analysis.measure import rules as comparing
    from jaxspec.analysis.measure.synthetic import random_model, random_prompt
    from jaxspec.decode.request import prepare

    doing(f"making {shape}")
    model, found, passes = random_model(shape, "float32", seed=0), [], {}
    for batch, vocab in sizes:
        if batch not in passes:
            doing(f"{shape}, batch {batch}")
            job = prepare(model, random_prompt(model, batch, SOURCE), drafter=model, gamma=gamma, max_new_tokens=64)
            passes[batch] = cost.measure(job, repeats=5, inner=2)
        doing(f"rules, batch {batch}, vocabulary {vocab}")
        made = comparing.Sizes(vocab, batch, gamma)
        usual, alike = (
            comparing.costs(every_rule(), made, repeats=repeats, alike=same, candidates=CANDIDATES)
            for same in (False, True)
        )
        found.append(_costs(batch, vocab, usual, alike, passes[batch], vocab == model.lm.vocab_size))
    return found


def _costs(
    batch: int, vocab: int, usual: dict[str, np.ndarray], alike: dict[str, np.ndarray], taken: Cost, same: bool
) -> dict[str, Any]:
    from jaxspec.analysis.measure.statistics import median_min_max

    passes = {"one_token_ms": taken.target_ms, "verify_ms": taken.verify_ms}
    rows: dict[str, Any] = {}
    for name in usual:
        rows[name] = {
            "usual_us": median_min_max(1e6 * usual[name]),
            "all_accepted_us": median_min_max(1e6 * alike[name]),
        }
        if same:
            worst = 1e3 * max(float(np.median(seconds[name])) for seconds in (usual, alike))
            rows[name]["share"] = {of: worst / ms for of, ms in passes.items()}
    return {"batch": batch, "vocab": vocab, "rules": rows} | passes


def pair_tables(found: dict[str, Any]) -> list[Table]:
    """For each pair, the rules by temperature."""
    made = []
    for pair in found["pairs"]:
        about = f"{pair['prompts']} prompts of up to {pair['new_tokens']} tokens, γ = {found['gamma']}, 95% intervals"
        title = f"{pair['target']} and {pair['draft']}: {about}"
        heads = [f"{what}, T = {t:g}" for t in TEMPERATURES for what in ("α", "tokens per round")]
        table = console.table(heads, first="rule", title=title)
        by_rule: dict[str, list[dict[str, Any]]] = {}
        for row in pair["rules"]:
            by_rule.setdefault(row["rule"] + ("" if row["exact"] else ", inexact"), []).append(row)
        for name, rows in by_rule.items():
            table.add_row(name, *(cell(row[what]) for row in rows for what in ("alpha", "tokens_per_round")))
        made.append(table)
    return made


def cost_tables(found: dict[str, Any]) -> list[Table]:
    """For each size, microseconds of each rule."""
    made = []
    for size in found["costs"]:
        one, many = f"{size['one_token_ms']:.1f}", f"{size['verify_ms']:.1f}"
        title = f"batch {size['batch']}, V = {size['vocab']:,}, γ = {found['gamma']}"
        title += f"; a pass of {found['shape']} takes {one} ms over 1 token, {many} ms over {found['gamma'] + 1}"
        heads = ["µs", "min..max", "µs, all accepted", "min..max", "of the long pass", "of the short"]
        table = console.table(heads, first="", title=title)
        for name, row in size["rules"].items():
            cells = [text for what in ("usual_us", "all_accepted_us") for text in _range(row[what])]
            share = row.get("share", {})
            table.add_row(name, *cells, *(f"{share[of]:.1%}" if share else "–" for of in ("verify_ms", "one_token_ms")))
        made.append(table)
    return made


def cell(numbers: dict[str, float] | None) -> str:
    """A value, and how far its 95% interval reaches; that of a probability may be cut on one side.

    >>> cell({"value": 2.5, "low": 2.4, "high": 2.6}), cell({"value": 0.98, "low": 0.94, "high": 1.0})
    ('2.500 ± 0.100', '0.980 ± 0.040')
    """
    if numbers is None:
        return "–"
    value, low, high = (numbers[name] for name in ("value", "low", "high"))
    return f"{value:.3f} ± {max(value - low, high - value):.3f}"


def _range(taken: dict[str, float]) -> tuple[str, str]:
    return f"{taken['median']:,.0f}", f"{taken['min']:,.0f}..{taken['max']:,.0f}"
