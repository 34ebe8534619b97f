"""The held-out prompts that come with jaxspec, and which of their tasks a model is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec.training.jsonl import read_jsonl

if TYPE_CHECKING:
    from jaxspec.base import Model

FOLDER = Path(__file__).resolve().parents[1] / "data" / "heldout"
TASKS = ("translation", "synopsis", "edit", "text")


def tasks_of(target: Model) -> tuple[str, ...]:
    """The tasks of the held-out prompts that a model is for: by its name, else by its kind.

    >>> from jaxspec.testing import table_model
    >>> import jax
    >>> tasks_of(table_model(jax.random.key(0), vocab=3))
    ('text',)
    """
    if target.name.endswith("-edit"):
        return ("edit",)
    return ("text",) if target.lm.start_token is None else ("translation", "synopsis")


def rows(task: str) -> list[dict[str, str]]:
    """The held-out examples of a task: "input", and "reference".

    Raises:
        ValueError: there is no such task.

    >>> len(rows("text")), sorted(rows("text")[0])[:1]
    (300, ['input'])
    """
    if task not in TASKS:
        raise ValueError(f"no held-out prompts for {task!r}: expected one of {', '.join(TASKS)}")
    return list(read_jsonl(FOLDER / f"{task}.jsonl"))
