"""`jaxspec rules`: what each acceptance rule is worth on a pair, and what it costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.analysis.estimate import spread
from jaxspec.analysis.options import numbers
from jaxspec.analysis.shapes import random_model, random_prompt
from jaxspec.cli import tables
from jaxspec.cli.prompts import heldout_for

if TYPE_CHECKING:
    from jaxspec.accept import Rule
    from jaxspec.analysis.cost import Cost

TEMPERATURES = (0.0, 0.7, 1.0)
SEVERAL = (1, 2, 4)  # guesses of one token, for `iterated`
SOURCE = 64  # tokens per prompt of the model whose pass is timed


def rules(
    target: Annotated[str, typer.Option(help="Of a pair: the model to decode from; both shipped pairs if none.")] = "",
    draft: Annotated[str, typer.Option(help="and the model that guesses.")] = "",
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Guesses a round.", min=1)] = 7,
    count: Annotated[int, typer.Option(help="Held-out prompts per pair.", min=2)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt.", min=2)] = 64,
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    cost: Annotated[bool, typer.Option("--cost", help="Measure what the rules cost instead.")] = False,
    shape: Annotated[str, typer.Option(help="With --cost: whose pass to compare with.")] = "t5-v1_1-base",
    vocab: Annotated[str, typer.Option(help="With --cost: vocabularies, separated by commas.")] = "32128,256000",
    batch: Annotated[str, typer.Option(help="With --cost: batch sizes, separated by commas.")] = "1,32",
    repeats: Annotated[int, typer.Option(help="With --cost: calls of each rule.", min=1)] = 20,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for a document.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare the acceptance rules: acceptance rates and tokens per round with confidence intervals, or costs.

    Rates are of held-out prompts, at temperatures 0, 0.7 and 1. Costs are of one verdict, by itself, beside a
    pass of a model with random weights at a published shape.

        jaxspec rules

        jaxspec rules --cost
    """
    if bool(target) != bool(draft):
        raise ValueError("a pair has two models: give --target and --draft, or neither")
    from jaxspec.analysis import environment

    found: dict[str, Any] = {"environment": environment.current(), "gamma": gamma}
    with Console(stderr=True).status("starting") as status:
        if cost:
            sizes = numbers(vocab, "--vocab"), numbers(batch, "--batch")
            found |= {"shape": shape, "costs": cost_of_all(shape, *sizes, gamma, repeats, status.update)}
        else:
            pairs = [(target, draft)] if target else shipped_pairs()
            found |= {"pairs": [of_pair(*pair, gamma, count, new_tokens, seed, status.update) for pair in pairs]}
    if as_json:
        print(json.dumps(found))
        return
    out = Console(highlight=False, width=200 if markdown else None)
    out.print(Text(environment.line(found["environment"]), "bold"), *[""] * markdown, sep="\n")
    for table in cost_tables(found) if cost else pair_tables(found):
        tables.show(out, table, markdown)


def shipped_pairs() -> list[tuple[str, str]]:
    """Every shipped target with its drafter."""
    from jaxspec.model import shipped

    names = list(shipped())
    pairs = [(name, name.removesuffix("-base") + "-small") for name in names if name.endswith("-base")]
    return [pair for pair in pairs if pair[1] in names]


def every_rule() -> list[Rule]:
    """The rules for a chain of guesses."""
    from jaxspec.accept import catalogue

    return [entry.rule for entry in catalogue.CHAINS.values()]


def of_pair(target: str, draft: str, gamma: int, count: int, new_tokens: int, seed: int, doing) -> dict[str, Any]:
    """Every rule at every temperature on held-out prompts."""
    import jax

    from jaxspec import model
    from jaxspec.analysis import rules as sides

    big, small = (model.load(name, dtype="float32") for name in (target, draft))
    prompts, rows = heldout_for(big, count), []
    for temperature in TEMPERATURES:
        doing(f"{target} and {draft} at temperature {temperature:g}")
        options: dict[str, Any] = dict(gamma=gamma, temperature=temperature, max_new_tokens=new_tokens, several=SEVERAL)
        rows += sides.worth(big, small, prompts, every_rule(), key=jax.random.key(seed), **options)
    return {"target": target, "draft": draft, "prompts": len(prompts), "new_tokens": new_tokens, "rules": rows}


def cost_of_all(
    shape: str, vocabs: tuple[int, ...], batches: tuple[int, ...], gamma: int, repeats: int, doing
) -> list[dict[str, Any]]:
    """Microseconds of every rule at every size, and milliseconds of a pass at each batch size."""
    from jaxspec.analysis import rules as sides

    doing(f"making {shape}")
    model, found = random_model(shape, "float32", seed=0), []
    for batch in batches:
        doing(f"{shape}, batch {batch}")
        taken = sides.of_pass(model, random_prompt(model, batch, SOURCE), gamma=gamma, repeats=5)
        for vocab in vocabs:
            doing(f"rules, batch {batch}, vocabulary {vocab}")
            asked: dict[str, Any] = dict(vocab=vocab, batch=batch, gamma=gamma, repeats=repeats, several=SEVERAL)
            usual, alike = (sides.costs(every_rule(), alike=same, **asked) for same in (False, True))
            found.append(_costs(batch, vocab, usual, alike, taken, vocab == model.lm.vocab_size))
    return found


def _costs(
    batch: int, vocab: int, usual: dict[str, np.ndarray], alike: dict[str, np.ndarray], taken: Cost, same: bool
) -> dict[str, Any]:
    passes = {"one_token_ms": taken.target_ms, "verify_ms": taken.verify_ms}
    rows: dict[str, Any] = {}
    for name in usual:
        rows[name] = {"usual_us": spread(1e6 * usual[name]), "all_kept_us": spread(1e6 * alike[name])}
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
        table = tables.table(heads, first="rule", title=title)
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
        heads = ["µs", "min..max", "µs, all kept", "min..max", "of the long pass", "of the short"]
        table = tables.table(heads, first="", title=title)
        for name, row in size["rules"].items():
            cells = [text for what in ("usual_us", "all_kept_us") for text in _spread(row[what])]
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


def _spread(taken: dict[str, float]) -> tuple[str, str]:
    return f"{taken['median']:,.0f}", f"{taken['min']:,.0f}..{taken['max']:,.0f}"
