"""`python -m jaxspec.analysis.h200`: runs the stages, and prints what they found."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import jaxspec
from jaxspec.analysis.h200 import decoding, report, stages, training
from jaxspec.analysis.h200.results import Results

LISTED = "\n\n".join(f"  {stage.name} ({stage.group}): {stage.about}, {stage.minutes:g} min" for stage in stages.STAGES)
HELP = f"""Measure the paper's speed-ups at the paper's sizes on this device, train a pair, load a large folder.

Each stage's result is in --out before the next begins; the same command goes on where one was ended, and does again
what failed, or was found on another device, by another jax or under other XLA_FLAGS. Stages, in their order, and what
they should take on an H200 with nothing compiled:

{LISTED}

Other ways to compile are tried from outside, each with an --out and a --work of its own, by XLA_FLAGS in the
environment: --xla_gpu_enable_command_buffer=+WHILE (whole loops as CUDA graphs), --xla_gpu_enable_command_buffer= (no
graphs), --xla_gpu_enable_latency_hiding_scheduler=true. Each result has the flags under which it was found.
"""


def main(
    names: Annotated[str, typer.Option("--stages", help="Of the list above, or groups of them, or all.")] = "all",
    out: Annotated[Path, typer.Option(help="The results, one JSON object.")] = Path("h200.json"),
    minutes: Annotated[float, typer.Option(help="Begin no stage that should not end within so many.")] = 1e9,
    work: Annotated[Path, typer.Option(help="What is compiled, trained, written and traced goes here.")] = Path(
        "h200-work"
    ),
    data: Annotated[Path, typer.Option(help="Folder of the training data.")] = Path("data"),
    recipes: Annotated[str, typer.Option(help="A GPT's recipe and its drafter's.")] = "debian-gpt-97m,debian-gpt-6m",
    train_minutes: Annotated[float, typer.Option(help="For the training of both, about.")] = 8.0,
    shape: Annotated[str, typer.Option(help="The target's published shape.")] = decoding.Settings().shape,
    draft_shape: Annotated[str, typer.Option(help="The drafter's.")] = decoding.Settings().draft_shape,
    dtype: Annotated[str, typer.Option(help="bfloat16, float32, or int8 matrices in float32.")] = "bfloat16",
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=2)] = decoding.Settings().new_tokens,
    seeds: Annotated[int, typer.Option(help="Generations of a timed run.", min=1)] = decoding.Settings().seeds,
    repeats: Annotated[int, typer.Option(help="Timed runs.", min=1)] = decoding.Settings().repeats,
    copy_mb: Annotated[int, typer.Option(help="Size of the copy.", min=1)] = decoding.Settings().copy_mb,
) -> None:
    """Its `--help` is HELP."""
    wanted = stages.chosen(names)
    target, _, draft = recipes.partition(",")
    until = time.time() + 60 * minutes
    models = decoding.Settings(shape, draft_shape, dtype, new_tokens, seeds, repeats, copy_mb)
    pair = training.Settings(str(recipe_file(target)), str(recipe_file(draft)), train_minutes, dtype, repeats=repeats)
    # Read by the processes that the stages run in.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str((work / "programs").resolve()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    stages.run(wanted, stages.Plan(models, pair, data, work, out, until))
    results = Results(out)
    screen = Console(highlight=False)
    screen.width = max(screen.width, report.WIDTH)
    if found := report.rows(results):
        screen.print(report.table(found))
    screen.print(*report.notes(results), sep="\n", markup=False)
    raise typer.Exit(any(results.error(stage.name) for stage in wanted))


def recipe_file(name: str) -> Path:
    """A recipe's file, given as one, or by the name of one that comes with jaxspec.

    Raises:
        FileNotFoundError: there is none.
    """
    package = Path(jaxspec.__file__).resolve().parent
    places = [Path(name), package / "data" / "recipes" / f"{name}.toml", package.parent / "models" / f"{name}.toml"]
    for path in places:
        if path.is_file():
            return path.resolve()
    raise FileNotFoundError(f"no recipe {name!r}: expected a .toml file, or the name of one that comes with jaxspec")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(help=HELP)(main)
    app()
