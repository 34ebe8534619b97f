"""A recipe's examples, as batches of a few fixed shapes in an order that depends on (seed, step)
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxspec.core.token_ids import frame_of
from jaxspec.files import read_jsonl
from jaxspec.files.corpus import token_rows
from jaxspec.training.recipes import Data, HeadRecipe, Recipe, check_data

ENCODED = 1000  # texts that a tokenizer is given at a time


class Example(NamedTuple):
    """Token ids of one training example; a language model has no source."""

    source: np.ndarray
    target: np.ndarray


Tasks = dict[str, list[Example]]


class TrainingBatch(NamedTuple):
    """Right-padded examples as arrays [batch, length]; for a language model the source has width
    0.
    """

    source: np.ndarray
    source_length: np.ndarray
    target: np.ndarray
    target_length: np.ndarray


class Bucket(NamedTuple):
    """A batch shape: at most `source` and `target` tokens, `rows` examples."""

    source: int
    target: int
    rows: int

    # A language model's row has one more than predictions: its first token predicts.
    width = property(lambda self: self.target + (self.source == 0), doc="Tokens of a target row.")


def read_pairs(
    path: Path,
    tokenizer,
    tasks: Sequence[str],
    max_source: int,
    max_target: int,
    also: Sequence[Path] = (),
) -> list[Example]:
    """Reads examples from JSON lines with `task`, `input` and `output`, `path` first, then `also`.

    An example with a longer target is left out. A longer source loses its end, but not what stands
    around its text.
    """
    rows = [
        row
        for file in (path, *also)
        for row in _read(file, "task", "input", "output")
        if row["task"] in tasks
    ]
    if not rows:
        raise ValueError(f"{path} has no example of the tasks {list(tasks)}")
    sources = token_ids(tokenizer, [row["input"] for row in rows])
    targets = token_rows([row["output"] for row in rows], tokenizer, encoder=True)
    frame = None
    examples = []
    for source, target in zip(sources, targets, strict=True):
        if len(source) > max_source:
            frame = frame or frame_of(tokenizer)
            source = frame.cut(source, max_source, keeps_end=False)
        if source is None or len(target) > max_target:
            continue
        examples.append(Example(np.array(source, np.int32), np.array(target, np.int32)))
    return examples


def token_ids(tokenizer, texts: Sequence[str], **options: bool) -> Iterator[list[int]]:
    """Encodes texts a thousand at a time: tokenizers keep more than ids, of a whole data set
    gigabytes.
    """
    for start in range(0, len(texts), ENCODED):
        yield from tokenizer(texts[start : start + ENCODED], **options)["input_ids"]


def read_texts(path: Path, tokenizer, max_target: int) -> list[Example]:
    """Reads documents from JSON lines with `text`, each begun and ended with a token for that, cut
    into rows.

    A tokenizer without a token for the beginning of a text has its end token stand there.
    """
    end = tokenizer.eos_token_id
    empty = np.zeros((0,), np.int32)
    if tokenizer.bos_token_id is None:
        begin = end
    else:
        begin = tokenizer.bos_token_id
    texts = [row["text"] for row in _read(path, "text")]
    if not texts:
        raise ValueError(f"{path} is empty")
    examples = []
    for ids in token_ids(tokenizer, texts, add_special_tokens=False):
        row = np.array([begin, *ids, end], np.int32)
        starts = range(0, max(1, len(row) - 1), max_target)
        examples += [Example(empty, row[i : i + max_target + 1]) for i in starts]
    return [example for example in examples if len(example.target) > 8]


def _read(path: Path, *fields: str) -> list[dict]:
    if not path.is_file():
        raise FileNotFoundError(
            f"no training data at {path}: `jaxspec train --help` says how it is made"
        )
    return list(read_jsonl(path, *fields))


def buckets(widths: Sequence[tuple[int, int]], tokens: int) -> list[Bucket]:
    """Makes batch shapes of about `tokens` tokens each, source and target counted alike.

    >>> buckets([(16, 16), (0, 64)], tokens=1024)
    [Bucket(source=16, target=16, rows=32), Bucket(source=0, target=64, rows=16)]
    """
    return [
        Bucket(source, target, max(1, tokens // (source + target))) for source, target in widths
    ]


def _assign(examples: Sequence[Example], shapes: Sequence[Bucket]) -> list[np.ndarray]:
    """Finds, for each shape, the indices of the examples that do not fit a smaller one."""
    order = sorted(range(len(shapes)), key=lambda i: shapes[i].source + shapes[i].target)
    chosen: list[list[int]] = [[] for _ in shapes]
    for index, example in enumerate(examples):
        for i in order:
            if len(example.source) <= shapes[i].source and len(example.target) <= shapes[i].width:
                chosen[i].append(index)
                break
        else:
            longest = (len(example.source), len(example.target))
            raise ValueError(
                f"an example of {longest} tokens fits none of the batch shapes {list(shapes)}"
            )
    return [np.array(indices, np.int64) for indices in chosen]


class Batches:
    """An endless sequence of batches; `batches.at(step)` depends on the examples, the seed and the
    step alone.

    Each epoch visits every example once, in a new order, in batches of one shape each. A shape that
    is short of rows at the end of its epoch is filled up from its beginning.
    """

    def __init__(self, examples: Sequence[Example], shapes: Sequence[Bucket], seed: int):
        self.examples = examples
        self.shapes = shapes
        self.seed = seed
        self.members = _assign(examples, shapes)
        self.per_epoch = sum(
            -(-len(m) // s.rows) for m, s in zip(self.members, shapes, strict=True)
        )
        self._epoch = -1
        self._plan = []

    def at(self, step: int) -> TrainingBatch:
        """Returns the batch of a step."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._plan = self._plan_epoch(epoch)
        bucket, rows = self._plan[index]
        return collate([self.examples[i] for i in rows], self.shapes[bucket])

    def once(self) -> Iterator[TrainingBatch]:
        """Yields every example once (the fill-up rows of a shape's last batch have no real tokens),
        for evaluation.
        """
        for members, shape in zip(self.members, self.shapes, strict=True):
            for start in range(0, len(members), shape.rows):
                yield collate(
                    [self.examples[i] for i in members[start : start + shape.rows]], shape
                )

    def _plan_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        random = np.random.default_rng([self.seed, epoch])
        plan = []
        for bucket, (members, shape) in enumerate(zip(self.members, self.shapes, strict=True)):
            if len(members):
                order = random.permutation(members)
                count = -(-len(order) // shape.rows)
                plan += [(bucket, rows) for rows in np.resize(order, (count, shape.rows))]
        random.shuffle(plan)
        return plan


def collate(examples: Sequence[Example], shape: Bucket) -> TrainingBatch:
    """Pads examples to a batch shape; missing rows have length 0. A language model's target is one
    token wider.
    """
    source, source_length = _padded(
        [example.source for example in examples], shape.rows, shape.source
    )
    target, target_length = _padded(
        [example.target for example in examples], shape.rows, shape.width
    )
    return TrainingBatch(source, source_length, target, target_length)


def _padded(rows: Sequence[np.ndarray], count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows as an array [count, width], zeros after each, and their lengths [count]."""
    tokens = np.zeros((count, width), np.int32)
    length = np.zeros((count,), np.int32)
    length[: len(rows)] = [len(row) for row in rows]
    # row by row, as they lie there
    tokens[np.arange(width)[None, :] < length[:, None]] = np.concatenate(rows)
    return tokens, length


def examples(options: Data, encoder: bool, folder: Path, tokenizer, heldout: bool = False) -> Tasks:
    """Reads the examples of each task of a recipe (of the one task "text" for a language model,
    without an encoder).

    Args:
        encoder: whether the model has one.
        folder: holds the files.
        heldout: the held-out examples instead of those to train on.
    """
    check_data(options, encoder)
    path = folder / (options.heldout if heldout else options.train)
    if heldout:
        also = ()
    else:
        also = [folder / name for name in options.also]
    source, target = (max(sizes) for sizes in zip(*options.shapes, strict=True))
    if not encoder:
        return {
            "text": [
                example for file in (path, *also) for example in read_texts(file, tokenizer, target)
            ]
        }
    return {
        task: read_pairs(path, tokenizer, [task], source, target, also) for task in options.tasks
    }


def few(tasks: Tasks, count: int) -> Tasks:
    """Returns about `count` examples of each task, evenly spaced; all of them if a task has
    fewer.
    """
    return {task: rows[:: max(1, len(rows) // max(1, count))] for task, rows in tasks.items()}


def counts(tasks: Tasks, vocab: int) -> Int[np.ndarray, " V"]:
    """Counts each token in the texts that are learnt from."""
    targets = [example.target for rows in tasks.values() for example in rows]
    return np.bincount(np.concatenate(targets), minlength=vocab)


def batches(recipe: Recipe | HeadRecipe, tasks: Tasks, repeat: Sequence[int] = ()) -> Batches:
    """Makes batches of examples, each task's as often as `repeat` has it."""
    times = repeat or (1,) * len(tasks)
    repeated = [
        example for rows, n in zip(tasks.values(), times, strict=True) for example in list(rows) * n
    ]
    shapes = buckets(recipe.data.shapes, recipe.train.batch_tokens)
    return Batches(repeated, shapes, recipe.train.seed)
