"""How good a pair is, on held-out data: the numbers of its model card.

    python -m jaxspec.analysis.report --target debian-t5-base --draft debian-t5-small --data DIR --json OUT

For both models the held-out loss per token, sacreBLEU of their translations and ROUGE-L of their synopses;
for the pair the acceptance rate at temperatures 0 and 1 and the tokens per round of greedy decoding. DIR is a
folder that `jaxspec.training.debian` (or, for edits, `debian.edits`) has filled; the prompts ship with jaxspec.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxspec import corpus
from jaxspec.analysis.measure import acceptance, environment, jobs, quality
from jaxspec.analysis.measure.statistics import with_error
from jaxspec.base import Model
from jaxspec.decode.generate import complete
from jaxspec.decode.request import Job, prepare
from jaxspec.files import write_text
from jaxspec.model import load
from jaxspec.training import data
from jaxspec.training.loop import evaluate
from jaxspec.training.losses import cross_entropy
from jaxspec.weights import int8

SCORES = {"translation": ("sacreBLEU", quality.bleu), "synopsis": ("ROUGE-L", quality.rouge_l)}
DATA = {"text": "gpt.heldout.jsonl", "edit": "edit.heldout.jsonl"}  # files of tasks; of all others t5.heldout.jsonl
GAMMAS = (1, 4, 7)
WIDTHS = ((32, 32), (64, 64), (112, 128))  # batch shapes of the held-out loss, source and target tokens
TEXT_WIDTH = 128


def report(
    target: Model,
    draft: Model,
    folder: Path,
    *,
    rows: int = 300,
    max_new_tokens: int = 128,
    advance: Callable[[str, int], object] = lambda doing, rows: None,
) -> dict[str, Any]:
    """All numbers of a pair.

    Args:
        target, draft: two T5s or two GPTs with one tokenizer.
        folder: where `t5.heldout.jsonl`, `edit.heldout.jsonl` or `gpt.heldout.jsonl` is.
        rows: held-out prompts per task, at most 300.
        max_new_tokens: most tokens to generate per prompt.
        advance: called with what is being done and the number of rows done, for a progress bar.

    Returns:
        "environment", "target" and "draft" (name, parameters), "loss" by task and side in nats per token, and
        "tasks", by task: rows, quality by side, alpha by temperature, and tokens per round by gamma.

    Raises:
        FileNotFoundError: the folder lacks the held-out data.
        ImportError: the `train` extra is not installed.
    """
    tasks = corpus.tasks_of(target)
    if set(tasks) & set(SCORES):
        quality.check()
    sides = {"target": target, "draft": draft}
    found: dict[str, Any] = {"environment": environment.current()}
    for side, model in sides.items():
        size = int8.count(model.params)
        found[side] = {"name": model.name, "parameters": size, "dtype": model.config.dtype}
    found["loss"] = {task: {} for task in tasks}
    for task in tasks:
        for side, model in sides.items():
            found["loss"][task][side] = heldout_loss(model, folder, task)
            advance(f"{task}: loss", 0)
    found["tasks"] = {}
    for task in tasks:
        chosen = corpus.heldout(task)[:rows]
        found["tasks"][task] = _of_task(task, chosen, target, draft, max_new_tokens, advance)
    return found


def heldout_loss(model: Model, folder: Path, task: str) -> float:
    """Loss per token, in nats, over a task's held-out examples ("text": a language model's)."""
    file = folder / DATA.get(task, "t5.heldout.jsonl")
    if task == "text":
        width = min(TEXT_WIDTH, model.config.max_positions - 1)
        examples = data.read_texts(file, model.tokenizer, width)
        shapes = data.buckets([(0, width)], tokens=2048)
    else:
        source, width = max(WIDTHS)
        examples = data.read_pairs(file, model.tokenizer, [task], source, width)
        shapes = data.buckets(WIDTHS, tokens=2048)
    batches = data.Batches(examples, shapes, seed=0)
    return evaluate(jax.jit(cross_entropy(model.config)), model.params, batches.once())


def decode(job: Job, advance: Callable[[int], object] = lambda rows: None) -> tuple[list[str], float]:
    """The texts of all prompts, in batches of one shape, and the tokens per round (0 if plain)."""
    texts: list[str] = []
    emitted, rounds = 0, 0
    for part in jobs.in_batches(job, acceptance.BATCH):
        out = complete(part.job)
        texts += out.texts[: part.real]
        emitted += int(np.sum(out.stats.emitted[: part.real] - 1))
        rounds += int(np.sum(out.stats.rounds[: part.real]))
        advance(part.real)
    return texts, emitted / max(rounds, 1)


def table(found: dict[str, Any]) -> Table:
    """The report for a screen."""
    view = Table(box=box.ROUNDED)
    view.add_column("held-out", no_wrap=True)
    for side in ("target", "draft"):
        name, size = found[side]["name"], found[side]["parameters"]
        view.add_column(f"{name}\n{size / 1e6:.1f}M parameters", justify="right", vertical="bottom")
    view.add_column("pair", justify="right", vertical="bottom")
    for task, loss in found["loss"].items():
        rest = found["tasks"][task]
        view.add_section()
        view.add_row(f"{task}, {rest['rows']} prompts", style="bold")
        view.add_row("loss per token, nats", f"{loss['target']:.3f}", f"{loss['draft']:.3f}")
        if "quality" in rest:
            got = rest["quality"]
            view.add_row(got["metric"], f"{got['target']:.1f}", f"{got['draft']:.1f}")
        for temperature, alpha in rest["alpha"].items():
            view.add_row(f"α, temperature {temperature}", "", "", with_error(alpha["alpha"], alpha["stderr"]))
        for gamma, tokens in rest["tokens_per_round"].items():
            view.add_row(f"tokens per round, γ = {gamma}", "", "", f"{tokens:.2f}")
        view.add_row("greedy texts as plain", "", "", f"{rest['same_text']} of {rest['compared']}")
    return view


def steps(target: Model, rows: int) -> int:
    """Rows that `report` will have done in the end."""
    passes = len(GAMMAS) + 2 + 1  # rounds, the two temperatures, plain text of the target
    return rows * sum(passes + (task in SCORES) for task in corpus.tasks_of(target))


def _of_task(
    task: str,
    chosen: Sequence[dict[str, str]],
    target: Model,
    draft: Model,
    max_new_tokens: int,
    advance: Callable[[str, int], object],
) -> dict[str, Any]:
    prompts, references = [row["input"] for row in chosen], [row["reference"] for row in chosen]
    found: dict[str, Any] = {"rows": len(chosen)}
    job = prepare(target, prompts, drafter=draft, max_new_tokens=max_new_tokens)

    def doing(what: str) -> Callable[[int], object]:
        return lambda rows: advance(f"{task}: {what}", rows)

    plain, _ = decode(job.plain(), doing("target"))
    if task in SCORES:
        metric, score = SCORES[task]
        small, _ = decode(prepare(draft, prompts, max_new_tokens=max_new_tokens), doing("draft"))
        found["quality"] = {
            "metric": metric,
            "target": score(plain, references),
            "draft": score(small, references),
        }
    found["alpha"] = {}
    for temperature in (0, 1):
        sampled = job.replace(temperature=float(temperature), key=jax.random.key(0))
        measured = acceptance.measure(sampled, advance=doing(f"alpha at temperature {temperature}"))
        found["alpha"][str(temperature)] = measured.to_dict()
    found["tokens_per_round"], same = {}, 0
    for gamma in GAMMAS:
        texts, tokens = decode(job.replace(gamma=gamma), doing(f"gamma {gamma}"))
        found["tokens_per_round"][str(gamma)] = tokens
        same += sum(a == b for a, b in zip(texts, plain, strict=True))
    return found | {"same_text": same, "compared": len(GAMMAS) * len(chosen)}


def main(
    target: Annotated[str, typer.Option(help="The larger model: a shipped checkpoint's name, or a folder.")],
    draft: Annotated[str, typer.Option(help="The smaller model.")],
    data: Annotated[Path, typer.Option(help="Folder with the held-out data of `jaxspec.training.debian`.")],
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    rows: Annotated[int, typer.Option(help="Held-out prompts per task.", min=1)] = 300,
    new_tokens: Annotated[int, typer.Option(help="Most tokens to generate per prompt.", min=1)] = 128,
) -> None:
    """Measures a pair on held-out data and prints the numbers of its model card."""
    big, small = load(target), load(draft)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=steps(big, min(rows, 300)))
        found = report(
            big,
            small,
            data,
            rows=rows,
            max_new_tokens=new_tokens,
            advance=lambda doing, done: bar.update(task, advance=done, description=doing),
        )
    Console(highlight=False).print(Text(environment.line(found["environment"]), "bold"), table(found), sep="\n")
    if json_out is not None:
        write_text(json_out, [json.dumps(found, indent=2), "\n"])


if __name__ == "__main__":
    typer.run(main)
