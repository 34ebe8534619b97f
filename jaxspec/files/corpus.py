"""Texts and their token rows, for n-gram tables and datastores; the held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from jaxspec.core import token_ids
from jaxspec.core.checks import one_of
from jaxspec.files import check_lines, is_json_lines, read_jsonl, read_text

if TYPE_CHECKING:
    from jaxspec.core import Model

CHUNK = 2048  # texts to tokenise between two reports of progress
HELDOUT = Path(__file__).resolve().parents[1] / "data" / "heldout"
TASKS = ("translation", "synopsis", "edit", "text")


def read_texts(path: str | Path, field: str = "text", tasks: Sequence[str] = ()) -> list[str]:
    """Reads the texts of a file.

    Args:
        path: JSON lines (`.jsonl`, `.ndjson`) with the text in one field; any other file is plain
            text, with blank lines between texts. Either may be compressed (`.gz`).
        field: the field of JSON lines to read.
        tasks: read only lines whose `task` is in this list; by default, all lines.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "texts.txt"
        >>> _ = path.write_text("one text\\nof two lines\\n\\n\\nanother\\n")
        >>> read_texts(path)
        ['one text\\nof two lines', 'another']
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no text at {path}: expected a .jsonl file or a text file")
    check_lines(path)
    if is_json_lines(path.name):
        texts = [
            row[field] for row in read_jsonl(path, field) if not tasks or row.get("task") in tasks
        ]
    else:
        texts = [text.strip("\n") for text in read_text(path).split("\n\n")]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError(f"{path} has no text" + (f" of the tasks {list(tasks)}" if tasks else ""))
    return texts


def token_rows(
    texts: Sequence[str],
    tokenizer: Any,
    advance: Callable[[int], object] = lambda count: None,
    *,
    encoder: bool = False,
) -> list[Int[np.ndarray, " tokens"]]:
    """Tokenises each text as a model with `tokenizer` would write it, with an end token.

    Args:
        texts: the texts.
        tokenizer: a Hugging Face tokenizer.
        advance: called with the number of texts in each chunk that was tokenised.
        encoder: whether the model has an encoder. Its tokenizer may use other pieces for the target
            text (Marian's does).
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    rows = []
    for first in range(0, len(texts), CHUNK):
        chunk = list(texts[first : first + CHUNK])
        for index, text in enumerate(chunk, first):
            token_ids.check_unicode(text, f"text {index}")
        if encoder:
            encoded = tokenizer(text_target=chunk, **options)
        else:
            encoded = tokenizer(chunk, **options)
        rows += [np.array([*row, *end], np.int32) for row in encoded["input_ids"]]
        advance(len(chunk))
    return rows


def tasks_of(target: Model) -> tuple[str, ...]:
    """Returns the held-out tasks that suit a model, by its name or its kind.

    >>> from jaxspec.testing import table_model
    >>> import jax
    >>> tasks_of(table_model(jax.random.key(0), vocab=3))
    ('text',)
    """
    if target.name.endswith("-edit"):
        return ("edit",)
    if target.lm.limits.start_token is None:
        return ("text",)
    return ("translation", "synopsis")


def heldout(task: str) -> list[dict[str, str]]:
    """Reads the held-out examples of a task: "input", and "reference".

    >>> len(heldout("text")), sorted(heldout("text")[0])[:1]
    (300, ['input'])
    """
    one_of(task, "task", TASKS)
    return list(read_jsonl(HELDOUT / f"{task}.jsonl"))
