"""The numbers of a model card: held-out loss and quality of both models, acceptance and tokens a
round of the pair.

    python -m benchmarks.model_card data --target debian-t5-base --draft debian-t5-small --count 300

`data` is the folder that `python -m data_prep.debian` fills. Two cores, half an hour for 300
prompts; needs the `train` extra (sacreBLEU, rouge-score).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from rich import box
from rich.table import Table

from benchmarks import quality
from benchmarks.options import parser_of
from jaxspec.analysis import acceptance, environment
from jaxspec.analysis.bench import Config, run
from jaxspec.analysis.result import BenchResult, Task, product
from jaxspec.analysis.table import words
from jaxspec.cli import console, names
from jaxspec.cli.options import TARGET
from jaxspec.core import Model
from jaxspec.decode import batches
from jaxspec.decode.generate import complete
from jaxspec.decode.request import prepare
from jaxspec.files.corpus import heldout, tasks_of
from jaxspec.training import data
from jaxspec.training.loop import evaluate
from jaxspec.training.losses import cross_entropy
from jaxspec.vocab.trim import untrimmed

SCORES = {"translation": ("sacreBLEU", quality.bleu), "synopsis": ("ROUGE-L", quality.rouge_l)}
# files of tasks; of all others t5.heldout.jsonl
DATA = {"text": "gpt.heldout.jsonl", "edit": "edit.heldout.jsonl"}
GAMMAS = (1, 4, 7)
# batch shapes of the held-out loss, source and target tokens
WIDTHS = ((32, 32), (64, 64), (112, 128))
TEXT_WIDTH = 128


class Card(NamedTuple):
    """A task of a pair's card.

    Attributes:
        task: the task of the held-out prompts.
        loss: per token, in nats, of the target and of the drafter.
        metric, quality: the score of their greedy texts; empty and None where there is no score.
        thirds: the same for thirds of the prompts by length: fewest and most characters, the
            target's, the drafter's.
        rows: rows of `bench.run`, untimed: greedy at `GAMMAS`, and at temperature 1.
    """

    task: str
    loss: tuple[float, float]
    metric: str
    quality: tuple[float, float] | None
    thirds: list[tuple[int, int, float, float]]
    rows: list[BenchResult]


def card(
    target: Model,
    draft: Model,
    folder: Path,
    *,
    rows: int = 300,
    new_tokens: int = 128,
    doing: Callable[[str], object] = lambda what: None,
) -> list[Card]:
    """A pair's card, task by task."""
    tasks, pair = tasks_of(target), (target, draft)
    if set(tasks) & set(SCORES):
        quality.check()
    cards = []
    for name in tasks:
        doing(f"{name}: loss")
        loss = (heldout_loss(target, folder, name), heldout_loss(untrimmed(draft), folder, name))
        examples = heldout(name)[:rows]
        prompts, references = (
            [row["input"] for row in examples],
            [row["reference"] for row in examples],
        )
        metric, score = SCORES.get(name, ("", None))
        scored, thirds = None, []
        if score is not None:
            doing(f"{name}: {metric}")
            texts = [decode(model, prompts, new_tokens) for model in pair]
            scored = (score(texts[0], references), score(texts[1], references))
            thirds = by_length(prompts, texts, references, score)
        task = Task(name, prompts, new_tokens)
        settings = product(task=task, drafter=draft, gamma=list(GAMMAS))
        settings += product(
            task=task, drafter=draft, gamma=GAMMAS[-1], sampling={"temperature": 1.0}
        )
        config = Config(quantities=("alpha",))
        rows_ = run(target, settings, config=config, doing=lambda what, share: doing(what))
        cards.append(Card(name, loss, metric, scored, thirds, list(rows_)))
    return cards


def by_length(
    prompts: list[str], texts: list[list[str]], references: list[str], score: Callable
) -> list[tuple[int, int, float, float]]:
    """Scores both models' texts of the shorter, the middle and the longer prompts; see
    `Card.thirds`.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    thirds = []
    for third in np.array_split(np.argsort(lengths, kind="stable"), min(3, len(prompts))):
        wanted = [references[row] for row in third]
        target, draft = (score([decoded[row] for row in third], wanted) for decoded in texts)
        thirds.append((int(lengths[third].min()), int(lengths[third].max()), target, draft))
    return thirds


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


def decode(model: Model, prompts: list[str], new_tokens: int) -> list[str]:
    """Greedy texts."""
    parts = batches.in_batches(prepare(model, prompts, max_new_tokens=new_tokens), acceptance.BATCH)
    return [text for part in parts for text in complete(part.prepared).texts[: part.real]]


def table(cards: list[Card], target: str, draft: str) -> Table:
    """A card for a screen or a document."""
    view = Table(box=box.ROUNDED)
    view.add_column("held-out", no_wrap=True)
    for head in (target, draft, "pair"):
        view.add_column(head, justify="right", vertical="bottom")
    for card in cards:
        drafting = [row for row in card.rows if not row.setting.is_plain]
        view.add_section()
        view.add_row(f"{card.task}, {drafting[0].texts} prompts", style="bold")
        view.add_row("loss per token, nats", *(f"{loss:.3f}" for loss in card.loss))
        if card.quality is not None:
            view.add_row(card.metric, *(f"{score:.1f}" for score in card.quality))
        for fewest, most, *scores in card.thirds:
            view.add_row(
                f"{card.metric}, {fewest} to {most} characters",
                *(f"{score:.1f}" for score in scores),
            )
        for heat in (0.0, 1.0):
            row = next(row for row in drafting if row.setting.temperature == heat)
            view.add_row(f"α, temperature {heat:g}", "", "", words(row.alpha, 3))
        greedy = [row for row in drafting if not row.setting.temperature]
        for row in greedy:
            view.add_row(
                f"tokens per round, γ = {row.setting.gamma}", "", "", words(row.tokens_per_round)
            )
        same, texts = sum(row.same_text or 0 for row in greedy), sum(row.texts for row in greedy)
        view.add_row("greedy texts as plain", "", "", f"{same} of {texts}")
    return view


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures a pair."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="folder of the held-out data")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default="")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--count", type=int, default=300, help="prompts of a task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    pair = options.target, options.draft or names.default_draft_model(options.target)
    target, draft = (names.model(name, options.dtype) for name in pair)
    sizes = {"rows": options.count, "new_tokens": options.max_new_tokens}
    cards = card(
        target,
        draft,
        options.data,
        **sizes,
        doing=lambda what: print(what, file=sys.stderr, flush=True),
    )
    out = console.printer(options.markdown)
    out.print(environment.line(environment.current()))
    view = table(cards, target.name, draft.name)
    view.title = f"{target.name} and {draft.name}"
    console.show(out, view, options.markdown)


if __name__ == "__main__":
    main()
