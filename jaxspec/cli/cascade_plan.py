"""`jaxspec plan --draft cascade=GAMMA:MODEL:INNER`: whether a cascade of two models pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxspec.cli import console, names


def show(
    target: str,
    draft: str,
    dtype: str,
    prompts: Path | None,
    count: int,
    asked: dict[str, Any],
    most: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Whether a cascade of two models pays: each pair is measured like any."""
    from jaxspec.analysis.bench import cascade_plan

    kind, *levels = draft.split(":")
    given = kind.partition("=")[2] or "3"
    if len(levels) != 2 or not given.isdecimal():
        raise ValueError(f"--draft is {draft!r}: expected cascade=3:MODEL:INNER, INNER a model here")
    model, inner = levels
    upper = names.pair_job(target, model, dtype, prompts, count, **asked)
    lower = names.pair_job(model, inner, dtype, prompts, count, **asked)
    with console.counting("plan", cascade_plan.STEPS) as advance:
        found = cascade_plan.of_pairs(upper, lower, int(given), most=most, repeats=repeats, advance=advance)
    about = f"{target} with {model}, which {inner} drafts {given} tokens for; measured here"
    if as_json:
        return console.print_measured(about=about, **found._asdict(), pays=found.pays)
    out, table = Console(highlight=False), console.table(["drafts", "for", "α", "c"])
    for both, alpha, c in zip(((model, target), (inner, model)), found.alpha, found.c, strict=True):
        table.add_row(*both, f"{alpha:.3f}", f"{c:.3f}")
    out.print(Text(about, "bold"), table, Text(cascade_plan.sentence(found)), sep="\n")
