"""`jaxspec bench`: how fast a model decodes, plainly and speculatively, beside what theory predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxspec.analysis.options import numbers
from jaxspec.analysis.shapes import random_model, random_prompt
from jaxspec.cli import memory, named, results, speeds
from jaxspec.cli.prompts import from_file, heldout_for
from jaxspec.cli.session import DRAFT, TARGET

if TYPE_CHECKING:  # jax takes a second to import, and --help does not need it
    from jaxspec.base import Model, Prompt


def bench(
    target: Annotated[
        str, typer.Option(help="What to decode from: a shipped checkpoint, a folder, a hub id.")
    ] = TARGET,
    draft: Annotated[str, typer.Option(help="The model that guesses.")] = DRAFT,
    shape: Annotated[
        str,
        typer.Option(help="Instead of --target: random weights at a published shape, such as t5-v1_1-base."),
    ] = "",
    draft_shape: Annotated[str, typer.Option(help="The same for the drafter of a --shape.")] = "",
    widen: Annotated[
        int,
        typer.Option(help="Widen the target's feed-forward blocks to this: same text, the cost of the size."),
    ] = 0,
    gamma: Annotated[str, typer.Option("--gamma", "-g", help="Guesses a round, separated by commas.")] = "1,4,7",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt; with --shape, exactly so many.", min=1)] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts, one a line, or .jsonl with inputs; else held-out ones."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Prompts that one timed run decodes.", min=1)] = 8,
    source_tokens: Annotated[int, typer.Option(help="Tokens per random prompt of a --shape.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each way to decode.", min=1)] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or int8 matrices in float32.")] = "float32",
    plain_only: Annotated[bool, typer.Option("--plain-only", help="Plain decoding only, no drafter.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on standard output.")
    ] = False,
) -> None:
    """Measure the speed, latency and memory of plain and speculative decoding, beside what theory predicts.

    Greedy decoding, whole generations on the device; text in and text out are not timed. Published shapes are
    those of `jaxspec models`:

    jaxspec bench --gamma 4 --batch 1,16

    jaxspec bench --shape t5-v1_1-base --plain-only
    """
    gammas = () if plain_only else numbers(gamma, "--gamma")
    ask = speeds.Ask(gammas, numbers(batch, "--batch"), new_tokens, rows, repeats)
    if shape and gammas and not draft_shape:
        raise ValueError(f"--shape {shape} has no drafter: add a --draft-shape, or --plain-only")
    if draft_shape and not shape:
        raise ValueError(f"--draft-shape {draft_shape} is for a --shape: a random drafter guesses nothing right")
    before = memory.process_bytes()
    big, small = _models(target, draft, shape, draft_shape, dtype, drafts=bool(gammas))
    big = named.widened(big, widen)
    needed = max(rows, *ask.batches)
    prompt = random_prompt(big, needed, source_tokens) if shape else _prompts(big, prompts, needed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("bench", total=ask.steps)

        def advance(doing: str) -> None:
            bar.update(task, advance=1, description=doing)

        found = speeds.collect(big, small, prompt, ask, eos_ids=() if shape else None, advance=advance)
    found["process"] = {"before": before, "peak": memory.process_bytes(), "device_peak": memory.device_bytes()}
    if as_json:
        print(json.dumps(found))
        return
    out = Console(highlight=False)
    out.print(results.headline(found), results.speed_table(found), sep="\n")
    if any("ratio" in row for row in found["results"]):
        out.print(results.theory_table(found))
    out.print(results.latency_table(found), results.memory_table(found), *results.notes(found), sep="\n")


def _models(
    target: str, draft: str, shape: str, draft_shape: str, dtype: str, drafts: bool
) -> tuple[Model, Model | None]:
    """Target and drafter, loaded or random."""
    if shape:
        return random_model(shape, dtype, seed=0), random_model(draft_shape, dtype, seed=1) if drafts else None
    from jaxspec import model

    return model.load(target, dtype=dtype), model.load(draft, dtype=dtype) if drafts else None


def _prompts(target: Model, file: Path | None, rows: int) -> Prompt:
    """The first prompts of a file, or of the held-out ones, all padded to one bucket."""
    from jaxspec.decode import request

    texts = heldout_for(target, rows) if file is None else from_file(file, rows)
    return request.encode(target, texts)
