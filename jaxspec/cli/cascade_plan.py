"""`jaxspec plan --draft cascade=GAMMA:MODEL:INNER`: whether a cascade pays."""

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
    """Whether a cascade pays: each of its levels is measured like a pair."""
    from jaxspec.analysis.bench import cascade_plan
    from jaxspec.cli.drafter_syntax import parse

    pairs, gammas = [(target, draft)], []
    while (written := parse(pairs[-1][1])) is not None and written.kind == "cascade":
        (big, _), (model, inner) = pairs.pop(), written.inner
        pairs += [(big, model), (model, inner)]
        gammas.append((*written.numbers, 3)[0])
    levels = [names.prepared_pair(big, small, dtype, prompts, count, of_models=False, **asked) for big, small in pairs]
    if any(prepared.decoder.trees for prepared in levels[1:]):  # before anything is measured
        raise ValueError(
            f"--draft is {draft!r}: the inner drafter drafts trees, and the theory is of chains; `jaxspec bench` "
            "measures any cascade"
        )
    with console.counting("plan", len(levels)) as advance:
        found = cascade_plan.of_levels(levels, gammas, most=most, repeats=repeats, advance=advance)
    lower = zip(pairs[1:], gammas, strict=True)
    inside = ", ".join(f"{small} drafts {gamma} tokens for {big}" for (big, small), gamma in lower)
    about = f"{target} with {pairs[0][1]}; {inside}; measured here"
    if as_json:
        return console.print_measured(about=about, **found._asdict(), pays=found.pays)
    out, table = Console(highlight=False), console.table(["drafts", "for", "α", "c"])
    for both, alpha, c in zip(pairs, found.alpha, found.c, strict=True):
        table.add_row(*both[::-1], f"{alpha:.3f}", f"{c:.3f}")
    out.print(Text(about, "bold"), table, Text(cascade_plan.sentence(found)), sep="\n")
