"""`jaxspec bench`: how fast a model decodes, plainly and speculatively, beside what theory predicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from jaxspec.cli import bench_tables, console
from jaxspec.cli.options import DRAFT, TARGET, Draft, Dtype, Json, Target, Widen, integers, widened
from jaxspec.cli.prompts import from_file, heldout_for

if TYPE_CHECKING:
    from jaxspec.base import Model


def bench(
    target: Target = TARGET,
    draft: Draft = DRAFT,
    shape: Annotated[
        str,
        typer.Option(help="Instead of --target: random weights at a published shape, such as t5-v1_1-base."),
    ] = "",
    draft_shape: Annotated[str, typer.Option(help="The same for the drafter of a --shape.")] = "",
    widen: Widen = 0,
    gamma: Annotated[str, typer.Option("--gamma", "-g", help="Draft tokens a round, separated by commas.")] = "1,4,7",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt; with --shape, exactly so many.", min=1)] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts, one a line, or .jsonl with inputs; else held-out ones."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Prompts that one timed run decodes.", min=1)] = 8,
    source_tokens: Annotated[int, typer.Option(help="Tokens per random prompt of a --shape.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.", min=1)] = 5,
    dtype: Dtype = "float32",
    plain_only: Annotated[bool, typer.Option("--plain-only", help="Plain decoding only, no drafter.")] = False,
    as_json: Json = False,
) -> None:
    """Measure the speed, latency and memory of plain and speculative decoding, beside what theory predicts.

    Greedy decoding, whole generations on the device; text in and text out are not timed. Published shapes are
    those of `jaxspec models`:

    jaxspec bench --gamma 4 --batch 1,16

    jaxspec bench --shape t5-v1_1-base --plain-only
    """
    from jaxspec.analysis.bench import throughput
    from jaxspec.analysis.measure import memory
    from jaxspec.analysis.measure.synthetic import random_prompt
    from jaxspec.decode.request import prepare

    gammas = () if plain_only else integers(gamma, "--gamma")
    settings = throughput.Settings(gammas, integers(batch, "--batch"), rows, repeats)
    if shape and gammas and not draft_shape:
        raise ValueError(f"--shape {shape} has no drafter: add a --draft-shape, or --plain-only")
    if draft_shape and not shape:
        raise ValueError(f"--draft-shape {draft_shape} is for a --shape: a random drafter predicts nothing right")
    before = memory.process_bytes()
    big, small = _models(target, draft, shape, draft_shape, dtype, drafts=bool(gammas))
    big = widened(big, widen)
    needed = max(rows, *settings.batches)
    texts = random_prompt(big, needed, source_tokens) if shape else _texts(big, prompts, needed)
    job = prepare(big, texts, drafter=small, max_new_tokens=new_tokens, eos_ids=() if shape else None)
    with console.progress() as bar:
        task = bar.add_task("bench", total=settings.steps)

        def advance(doing: str) -> None:
            bar.update(task, advance=1, description=doing)

        found = throughput.measure(job, settings, advance=advance)
    found["process"] = {"before": before, "peak": memory.process_bytes(), "device_peak": memory.device_bytes()}
    if as_json:
        print(json.dumps(found))
        return
    out = Console(highlight=False)
    out.print(bench_tables.headline(found), bench_tables.speed_table(found), sep="\n")
    if any("ratio" in row for row in found["results"]):
        out.print(bench_tables.theory_table(found))
    out.print(bench_tables.latency_table(found), bench_tables.memory_table(found), *bench_tables.notes(found), sep="\n")


def _models(
    target: str, draft: str, shape: str, draft_shape: str, dtype: str, drafts: bool
) -> tuple[Model, Model | None]:
    """Target and drafter, loaded or random."""
    from jaxspec.analysis.measure.synthetic import random_model

    if shape:
        return random_model(shape, dtype, seed=0), random_model(draft_shape, dtype, seed=1) if drafts else None
    from jaxspec import model

    return model.load(target, dtype=dtype), model.load(draft, dtype=dtype) if drafts else None


def _texts(target: Model, file: Path | None, rows: int) -> list[str]:
    """The first prompts of a file, or of the held-out ones."""
    return heldout_for(target, rows) if file is None else from_file(file, rows)
