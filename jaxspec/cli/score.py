"""`jaxspec score`: a file of texts in, their log probabilities out."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from jaxspec import files, sharding
from jaxspec.cli import console, names
from jaxspec.cli.options import TARGET, ChatTemplate, flag, number, text
from jaxspec.decode import inputs
from jaxspec.decode.scoring import Score, iterate
from jaxspec.jobs.files import check_paths

EXPECTED = 'expected {"text": "..."}, or {"prompt": ..., "completion": "..."}, and perhaps an "id"'
FIELDS = {"text", "prompt", "messages", "completion", "id"}


def score(
    input: Annotated[list[Path], text("FILE", "Texts, one a line, or .jsonl; also .gz; repeatable.", "--input")],
    target: Annotated[str, text("MODEL", "A shipped model, a folder or a hub id.")] = TARGET,
    output: Annotated[Path | None, text("FILE", "Where the scores are written; by default printed.")] = None,
    batch: Annotated[int, number("Texts read at a time.")] = 16,
    start: Annotated[str | None, text("TOKEN", "Is put before texts and empty prompts.")] = None,
    end: Annotated[bool, flag("Score the end-of-sequence token after each text, too.", "--end")] = False,
    tokens: Annotated[bool, flag("Write each token's id and log probability.", "--tokens")] = False,
    dtype: Annotated[str, text("DTYPE", "float32, bfloat16, int8, int4, int8/bfloat16.")] = "float32",
    mesh: Annotated[str | None, text("MESH", "Devices to split over: data=2,model=4.")] = None,
    chat_template: ChatTemplate = None,
    overwrite: Annotated[bool, flag("Replace what is there.", "--overwrite")] = False,
    as_json: Annotated[bool, flag("Print the totals as one JSON object.", "--json")] = False,
) -> None:
    """Compute the log probabilities that a model gives to texts, and its perplexity.

    A line is a text, or {"prompt": ..., "completion": ...}: the completion is scored, after the prompt. A prompt may be
    a list of messages. Each line has a line in the output.

    \b
        jaxspec score --input answers.jsonl --output scores.jsonl
    """
    check_paths(input)
    if output is not None and output.exists() and not overwrite:
        raise ValueError(f"{output} exists: give --overwrite to replace it, or choose another name")
    if as_json and output is None:
        raise ValueError("--json prints the totals, where the scores would be printed: give --output")
    names.check_model(target, dtype)
    total = sum(1 for _ in read(input))  # what is wrong with a line is said before a model is loaded
    if not total:
        raise ValueError(f"{', '.join(map(str, input))} holds no text: expected one a line")
    model = names.model(target, dtype, None if mesh is None else sharding.mesh(mesh), chat_template=chat_template)
    totals, token = Totals(), int(start) if start is not None and start.isdecimal() else start

    where = ""

    def texts(rows: Iterable[tuple[str, Any, Any]]) -> Iterator[Any]:
        nonlocal where
        for line_place, _, scored in rows:
            where = line_place
            yield scored

    def scores(rows: Iterable[tuple[str, Any, Any]]) -> Iterator[Score]:
        try:
            yield from iterate(model, texts(rows), batch, token, end)
        except inputs.NotEnoughMemory:
            raise
        except (ValueError, TypeError) as error:  # of the line that was read last
            raise ValueError(f"{where}: {error}" if where else str(error)) from error

    def lines() -> Iterator[str]:
        with (
            contextlib.closing(read(input)) as rows,
            contextlib.closing(read(input)) as ahead,
            console.counting("scoring", total) as step,
        ):
            for (_, line_id, _), scored in zip(rows, scores(ahead), strict=True):
                totals.add(scored)
                step("scoring")
                row = ({} if line_id is None else {"id": line_id}) | scored.to_dict(tokens)
                yield json.dumps(row, ensure_ascii=False) + "\n"

    if output is None:
        for line in lines():
            print(line, end="", flush=True)
    else:
        files.write_text(output, lines())
    if as_json:
        console.print_json(totals.to_dict())
    else:
        console.say(Console(stderr=output is None, highlight=False), str(totals))


def read(paths: Sequence[Path]) -> Generator[tuple[str, Any, Any], None, None]:
    """Yields the place of each line, its id, None if it has none, and its text as `jaxspec.score` takes it."""
    for path in paths:
        with files.opened(path) as file, io.TextIOWrapper(file, files.ENCODING) as lines:
            for where, line in files.numbered(lines, path):
                line_id, scored = _of_line(where, line) if files.is_json_lines(path.name) else (None, line)
                yield where, line_id, scored


def _of_line(where: str, line: str) -> tuple[Any, Any]:
    row = files.json_object(line, where)
    fields = set(row)
    if unknown := sorted(fields - FIELDS):
        raise ValueError(f"{where} has {unknown[0]!r}, which is not read: {EXPECTED}")
    prompt = row.get("messages", row.get("prompt"))
    if "text" in row and prompt is None and "completion" not in row:
        return row.get("id"), row["text"]
    if "text" not in row and prompt is not None and "completion" in row:
        return row.get("id"), (prompt, row["completion"])
    raise ValueError(f"{where} has {', '.join(sorted(fields))}: {EXPECTED}")


class Totals:
    """Sums over the scores of a file."""

    def __init__(self) -> None:
        self.texts = self.tokens = self.num_bytes = self.greedy = 0
        self.log_prob = 0.0
        self._has_bytes = True

    def add(self, scored: Score) -> None:
        """Counts the score of a text."""
        self.texts += 1
        self.tokens += len(scored.tokens)
        self.greedy += scored.is_greedy
        self.log_prob += scored.log_prob
        self._has_bytes &= scored.num_bytes is not None
        self.num_bytes += scored.num_bytes or 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals as plain values: perplexity is per token, bits are per byte of all texts."""
        bits = -self.log_prob / math.log(2) / self.num_bytes if self._has_bytes and self.num_bytes else None
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "log_prob": self.log_prob,
            "perplexity": math.exp(min(-self.log_prob / max(self.tokens, 1), 700.0)),
            "bits_per_byte": bits,
            "greedy": self.greedy,
        }

    def __str__(self) -> str:
        totals = self.to_dict()
        bits = "" if totals["bits_per_byte"] is None else f", {totals['bits_per_byte']:.3f} bits a byte"
        return (
            f"{self.texts:,} texts, {self.tokens:,} tokens: log probability {self.log_prob:.2f}, perplexity "
            f"{totals['perplexity']:.3f}{bits}; greedy decoding would write {self.greedy:,} of them"
        )
