"""Prompts: from the command line, a file, standard input, or the held-out ones that come with jaxspec."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.base import Model, Prompt


def given(prompt: str | None, file: str | None) -> list[str]:
    """The prompts of the command line or of a file; `-` is standard input. None are none."""
    if prompt is not None and file is not None:
        raise ValueError("got a PROMPT and --prompts: expected one of them")
    if prompt is not None and prompt != "-":
        return [prompt]
    file = prompt if file is None else file
    return [] if file is None else from_file(file)


def from_file(file: str | Path, count: int | None = None) -> list[str]:
    """The first prompts of a file (`-` is standard input): one a line, or the inputs of a .jsonl file."""
    where = "standard input" if str(file) == "-" else str(file)
    try:
        lines = _lines(sys.stdin.read() if str(file) == "-" else Path(file).read_text(encoding="utf-8"))[:count]
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error
    prompts = [json.loads(line)["input"] for line in lines] if where.endswith(".jsonl") else lines
    if not prompts:
        raise ValueError(f"{where} holds no prompt: expected one a line")
    return prompts


def by_task(file: Path, count: int) -> dict[str, list[str]]:
    """The first prompts of each task: what "task" says in the lines of a .jsonl file; without it the file's name."""
    texts, found = from_file(file), dict[str, list[str]]()
    lines = _lines(file.read_text(encoding="utf-8")) if file.suffix == ".jsonl" else []
    tasks = [json.loads(line).get("task", file.stem) for line in lines] or [file.stem] * len(texts)
    for task, text in zip(tasks, texts, strict=True):
        found.setdefault(task, []).append(text)
    return {task: some[:count] for task, some in found.items()}


def as_chat(target: Model, texts: list[str]) -> Prompt:
    """Each text as a user's message to the model, in the tokenizer's chat template.

    The template has the special tokens, so that none are added to it.

    Raises:
        ValueError: the tokenizer has no template.
    """
    from jaxspec import buffers

    if getattr(target.tokenizer, "chat_template", None) is None:
        raise ValueError(f"--chat: {target.name} has no chat template. Leave out --chat, or name a model tuned to chat")
    talks = [[{"role": "user", "content": text}] for text in texts]
    return buffers.pad(target.tokenizer.apply_chat_template(talks, add_generation_prompt=True)["input_ids"])


def _lines(text: str) -> list[str]:
    """Lines that are not empty. Only line feeds end one: JSON may hold U+2028, which `splitlines` takes for an end."""
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def heldout_for(target: Model, count: int) -> list[str]:
    """Held-out prompts of the kind that a model takes."""
    from jaxspec.corpus import tasks_of

    return heldout(tasks_of(target)[0], count)


def heldout(task: str, count: int) -> list[str]:
    """The first prompts of those that come with jaxspec, for a task."""
    from jaxspec import corpus

    if count < 1:
        raise ValueError(f"count is {count}: expected at least 1")
    return [row["input"] for row in corpus.heldout(task)[:count]]


def references(target: Model, skip: int) -> list[str]:
    """The references of the held-out prompts for a model, without the first of each task."""
    from jaxspec import corpus

    return [row["reference"] for task in corpus.tasks_of(target) for row in corpus.heldout(task)[skip:]]
