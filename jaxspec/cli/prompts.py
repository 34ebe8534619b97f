"""Prompts: from the command line, a file or standard input, or jaxspec's held-out ones."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec import files

EXAMPLES = 3  # prompts of the first screen
LONGEST = 100  # characters of a sentence there

if TYPE_CHECKING:
    from jaxspec.core import Model
    from jaxspec.decode.request import Prepared


def from_arguments(prompt: str | None, file: str | None, count: int | None = None) -> list[str]:
    """Returns the prompts of the command line or of a file; `-` is standard input."""
    if prompt is not None and file is not None:
        raise ValueError("got a PROMPT and --prompts: expected one of them")
    if prompt == "":  # most likely an unset shell variable
        raise ValueError("the PROMPT is empty: expected text, or leave it out for held-out prompts")
    if prompt is not None and prompt != "-":
        if count is not None:
            raise ValueError(
                f"--count is {count}, and the PROMPT is one: give prompts as a file, or leave "
                "--count out"
            )
        return [prompt]
    if file is None:
        file = prompt
    if file is None:
        return []
    return from_file(file, count)


def from_file(file: str | Path, count: int | None = None) -> list[str]:
    """Reads the first prompts of a file (`-`: standard input): lines, or inputs of JSON lines."""
    return [row["input"] for row in _rows(file, count)]


def by_task(file: Path, count: int) -> dict[str, list[str]]:
    """Reads the first prompts of each task, which is a JSON line's "task" or the file's name."""
    prompts = dict[str, list[str]]()
    for row in _rows(file):
        prompts.setdefault(row.get("task", file.stem), []).append(row["input"])
    return {task: inputs[:count] for task, inputs in prompts.items()}


def _rows(file: str | Path, count: int | None = None) -> list[dict[str, str]]:
    """Reads the first non-blank lines of a file, each as an "input" and an optional "task"."""
    if str(file) == "-":
        # read UTF-8, like a file, whatever the terminal's encoding
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding=files.ENCODING, errors="strict")
        where = "standard input"
        lines = files.numbered(sys.stdin, "standard input")
    else:
        files.check_lines(Path(file))
        where = str(file)
        lines = files.read_lines(file)
    if files.is_json_lines(where):
        # `lines` leaves out empty lines; JSON also ignores no-break spaces
        written = ((line_place, line) for line_place, line in lines if line.strip())
        rows = [_object(line, line_place) for line_place, line in itertools.islice(written, count)]
    else:
        rows = [{"input": line} for _, line in itertools.islice(lines, count)]
    if not rows:
        raise ValueError(f"{where} holds no prompt: expected one a line")
    return rows


def _object(line: str, where: str) -> dict[str, str]:
    """Reads a JSON line; its "input" may be called "prompt", as in the files of `jaxspec batch`."""
    try:
        names = set(json.loads(line))
    except (ValueError, RecursionError, TypeError):  # `json_object` reports it
        names = set()
    name = "prompt" if "prompt" in names and "input" not in names else "input"
    row = files.json_object(line, where, [name], ["task"])
    return {"input": row[name], **row}


def heldout_for(target: Model, count: int) -> list[str]:
    """Returns held-out prompts of a model's first task."""
    from jaxspec.files.corpus import tasks_of

    return heldout(tasks_of(target)[0], count)


def examples_for(target: Model) -> list[str]:
    """Returns the three held-out prompts of the first screen, short enough to read at a glance.

    For translation: the first sentences that begin with "This package" and have at most 100
    characters, a rule made before any output was seen. Other tasks have their first prompts.
    """
    from jaxspec.files import corpus

    task = corpus.tasks_of(target)[0]
    rows = [row["input"] for row in corpus.heldout(task)]
    if task == "translation":
        sentences = [(text, text.partition(": ")[2]) for text in rows]
        rows = [
            text
            for text, source in sentences
            if source.startswith("This package") and len(source) <= LONGEST
        ]
    return rows[:EXAMPLES]


def heldout(task: str, count: int) -> list[str]:
    """Returns the first held-out prompts of a task."""
    from jaxspec.core.checks import at_least
    from jaxspec.files import corpus

    at_least(1, count=count)
    return [row["input"] for row in corpus.heldout(task)[:count]]


def references(target: Model, skip: int) -> list[str]:
    """Returns the references of a model's held-out prompts, except the first `skip` of a task."""
    from jaxspec.files import corpus

    return [
        row["reference"] for task in corpus.tasks_of(target) for row in corpus.heldout(task)[skip:]
    ]


def prepared_pair(
    target: str,
    draft: str,
    dtype: str,
    prompts: Path | None,
    count: int,
    seed: int = 0,
    **options: Any,
) -> Prepared:
    """Prepares two models on prompts of a file or held-out ones, with `options` of `generate`."""
    from jaxspec.cli import pair as pairs
    from jaxspec.core import Model
    from jaxspec.decode.request import prepare
    from jaxspec.draft_heads import by_name

    wrong = ValueError(
        f"--draft is {draft!r}: expected a model here; `jaxspec bench` measures other drafters"
    )
    if draft == "none" or by_name.is_call(draft):
        raise wrong
    texts = None if prompts is None else from_file(prompts, count)
    pair, generation = pairs.checked(pairs.Pair(target, draft, dtype=dtype, seed=seed), options)
    target_model, drafter = pairs.load(pair)
    if not isinstance(drafter, Model):  # a head
        raise wrong
    texts = texts or heldout_for(target_model, count)
    return prepare(target_model, texts, drafter=drafter, **generation)
