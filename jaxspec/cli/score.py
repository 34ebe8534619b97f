"""`jaxspec score`: a file of texts in, their log probabilities out."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from jaxspec import files, sharding
from jaxspec.cli import console, names
from jaxspec.cli.batch import ROWS_FAILED
from jaxspec.cli.console import Record
from jaxspec.cli.options import (
    TARGET,
    ChatTemplate,
    Dtype,
    Languages,
    Mesh,
    Overwrite,
    flag,
    group_of,
    number,
    text,
)
from jaxspec.core import Model
from jaxspec.decode.scoring import Score, outcomes
from jaxspec.jobs.input_files import check_paths

EXPECTED = 'expected {"text": "..."}, or {"prompt": ..., "completion": "..."}, and perhaps an "id"'
FIELDS = {"text", "prompt", "messages", "completion", "id"}


class ScoreSettings(NamedTuple):
    """The options of `score`."""

    input: Annotated[
        list[Path], text("FILE", "Texts, one a line, or .jsonl; also .gz; repeatable.")
    ]
    target: Annotated[str, text("MODEL", "A shipped model, a folder or a hub id.")] = TARGET
    output: Annotated[
        Path | None, text("FILE", "Where the scores are written; by default printed.")
    ] = None
    batch: Annotated[int, number("Texts read at a time.")] = 16
    start: Annotated[str | None, text("TOKEN", "Is put before texts and empty prompts.")] = None
    end: Annotated[bool, flag("Score the end-of-sequence token after each text, too.", "--end")] = (
        False
    )
    tokens: Annotated[bool, flag("Write each token's id and log probability.", "--tokens")] = False
    dtype: Dtype = "float32"
    mesh: Mesh = None
    chat_template: ChatTemplate = None
    languages: Languages = Languages()
    overwrite: Overwrite = False
    as_json: Annotated[bool, flag("Print the totals as one JSON object.", "--json")] = False


@group_of("settings", ScoreSettings)
def score(settings: ScoreSettings) -> None:
    """Compute the log probabilities that a model gives to texts, and its perplexity.

    A line is a text, or {"prompt": ..., "completion": ...}: the completion is scored, after the
    prompt. A prompt may be a list of messages. Each line has a line in the output, with its score
    or its error; where some have errors the exit code is 3.

    \b
        jaxspec score --input answers.jsonl --output scores.jsonl
    """
    s = settings
    output = settings.output
    check_paths(s.input)
    if output is not None:
        files.check_file(output, "--output")
        if output.exists() and not s.overwrite:
            raise ValueError(
                f"{output} exists: give --overwrite to replace it, or choose another name"
            )
    if s.as_json and output is None:
        raise ValueError(
            "--json prints the totals, where the scores would be printed: give --output"
        )
    names.check_model(s.target, s.dtype)
    total = 0
    errors = list[Exception]()
    for _, _, read_text in read(s.input):
        total += 1
        if isinstance(read_text, Exception):
            errors.append(read_text)
    if not total:
        raise ValueError(f"{', '.join(map(str, s.input))} holds no text: expected one a line")
    if len(errors) == total:  # fail before a model is loaded
        raise errors[0]
    devices = None if s.mesh is None else sharding.mesh(s.mesh)
    totals = Totals()
    model = names.model(
        s.target, s.dtype, devices, chat_template=s.chat_template, **s.languages._asdict()
    )
    lines = _scored(s, model, total, totals)
    if output is None:
        for line in lines:
            print(line, end="", flush=True)
    else:
        files.write_text(output, lines)
    if s.as_json:
        console.print_json(totals.to_dict())
    else:
        console.say(console.err() if output is None else console.out(), str(totals))
    if totals.first_error is not None:
        console.note(
            f"{totals.failed:,} of {total:,} lines failed; the first: {totals.first_error}",
        )
        raise typer.Exit(ROWS_FAILED)


def _scored(settings: ScoreSettings, model: Model, total: int, totals: Totals) -> Iterator[str]:
    """Yields a line for each text, and adds its score to the totals."""
    token: int | str | None = settings.start
    if settings.start is not None and settings.start.isdecimal():
        token = int(settings.start)
    # the place and id of each line that is being scored
    lines = collections.deque[tuple[str, Any]]()

    def texts() -> Generator[Any, None, None]:
        for where, line_id, scored in read(settings.input):
            lines.append((where, line_id))
            yield scored

    # `outcomes` reads texts ahead, a batch at a time; `lines` remembers where they come from.
    with contextlib.closing(texts()) as reading, console.counting("scoring", total) as step:
        for outcome in outcomes(model, reading, settings.batch, token, settings.end):
            where, line_id = lines.popleft()
            step("scoring")
            row = {} if line_id is None else {"id": line_id}
            if isinstance(outcome, Exception):
                error = str(outcome)
                if not error.startswith(where):
                    error = f"{where}: {error}"
                totals.add_error(error)
                row |= {"error": error}
            else:
                totals.add(outcome)
                row |= outcome.to_dict(settings.tokens)
            yield files.json_line(row)


def read(paths: Sequence[Path]) -> Generator[tuple[str, Any, Any], None, None]:
    """Yields the place of each line, its id or None, and its text as `jaxspec.score` takes it.

    The text of an unreadable line is the exception instead.
    """
    for path in paths:
        for where, line in files.read_lines(path):
            line_id = None
            scored = line
            if files.is_json_lines(path.name):
                try:
                    row = files.json_object(line, where)
                    line_id = row.get("id")
                    scored = _of_row(where, row)
                except ValueError as error:
                    scored = error
            yield where, line_id, scored


def _of_row(where: str, row: Record) -> Any:
    """Returns the text of a line, or its prompt and completion."""
    fields = set(row)
    unknown = sorted(fields - FIELDS)
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}, which is not read: {EXPECTED}")
    prompt = row.get("messages", row.get("prompt"))
    if "text" in row and prompt is None and "completion" not in row:
        return row["text"]
    if "text" not in row and prompt is not None and "completion" in row:
        return prompt, row["completion"]
    raise ValueError(f"{where} has {', '.join(sorted(fields))}: {EXPECTED}")


class Totals:
    """Sums over the scores of a file.

    Attributes:
        failed: how many lines have an error instead of a score.
        first_error: the first error; None without errors.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.first_error: str | None = None
        # texts, tokens, greedy texts, log probability, bytes (NaN if unknown)
        self._sums = np.zeros(5)

    def add(self, scored: Score) -> None:
        """Counts the score of a text."""
        num_bytes = math.nan if scored.num_bytes is None else scored.num_bytes
        self._sums += [1, len(scored.tokens), scored.is_greedy, scored.log_prob, num_bytes]

    def add_error(self, error: str) -> None:
        """Counts a line that has no score."""
        self.failed += 1
        self.first_error = self.first_error or error

    def to_dict(self) -> Record:
        """Returns the totals as plain values: perplexity per token, bits per byte."""
        texts, num_tokens, greedy, log_prob, num_bytes = self._sums.tolist()
        return {
            "texts": int(texts),
            "tokens": int(num_tokens),
            "log_prob": log_prob,
            "perplexity": math.exp(min(-log_prob / max(num_tokens, 1), 700.0)),
            "bits_per_byte": -log_prob / math.log(2) / num_bytes if num_bytes > 0 else None,
            "greedy": int(greedy),
            "failed": self.failed,
        }

    def __str__(self) -> str:
        t = self.to_dict()
        bits = ""
        if t["bits_per_byte"] is not None:
            bits = f", {t['bits_per_byte']:.3f} bits a byte"
        return (
            f"{t['texts']:,} texts, {t['tokens']:,} tokens: log probability {t['log_prob']:.2f}, "
            f"perplexity {t['perplexity']:.3f}{bits}; greedy decoding would write {t['greedy']:,} "
            "of them"
        )
