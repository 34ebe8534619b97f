"""`jaxspec figures`: the paper's figures, and those of a pair that is measured."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jaxspec import files
from jaxspec.cli import console, drafter_names, names, options
from jaxspec.cli.options import TARGET, Draft, Json, NewTokens, Repeats, Target


def figures(
    out: Annotated[Path, options.text("FOLDER", "Where to write.")] = Path("figures"),
    formats: Annotated[str, options.text("NAMES", "png, svg or both, separated by a comma.", "--format")] = "png,svg",
    target: Target = TARGET,
    draft: Draft = "",
    gamma: options.Gamma = 5,
    count: options.Count = 16,
    max_new_tokens: NewTokens = 48,
    repeats: Repeats = 5,
    theory_only: Annotated[bool, typer.Option("--theory-only", help="Only what needs no models.")] = False,
    as_json: Json = False,
) -> None:
    """Draw the paper's Figures 2 to 5, and a pair's place among them, as PNG and SVG.

    figure-2, -3 and -4 are theory; distribution-distance shows that samples of speculative decoding have the target's
    distribution. Measured, greedily, on held-out prompts: landscape (speed-up over α and γ, with the pair marked),
    decomposition (one position's distribution as accepted and residual mass, at temperature 1) and figure-5 (the passes
    of one generation). Needs matplotlib: pip install ".[figures]" in a checkout.

    \b
        jaxspec figures --theory-only
        jaxspec figures --gamma 3 --out pair
    """
    from jaxspec.analysis.figures import paper, style

    style.canvas()  # refuses at once where matplotlib is absent
    forms, written = tuple(part.strip() for part in formats.split(",")), []
    style.check_formats(forms)
    files.check_writable(out / "figure")
    draft = draft or ("" if theory_only else drafter_names.default_model(target))
    with Console(stderr=True).status("drawing") as status:
        drawn = paper.of_theory()
        if not theory_only:
            asked: dict[str, Any] = {"gamma": gamma, "max_new_tokens": max_new_tokens}
            prepared = names.prepared_pair(target, draft, "float32", None, count, **asked)
            drawn = itertools.chain(drawn, paper.of_pair(prepared, repeats))
        for name, figure in drawn:
            written += style.save(figure, out, name, forms)
            status.update(f"{name} is drawn")
    if as_json:
        return console.print_measured(files=written)
    Console(highlight=False).print(Text("\n".join(map(str, written))), soft_wrap=True)
