"""Files of JSON lines, written whole or not at all."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def write_text(path: str | Path, chunks: Iterable[str]) -> None:
    """Writes text through a temporary file beside it, so that no reader ever sees half of it.

    Args:
        path: the file; its folder is created if missing.
        chunks: the text, in pieces. If producing them fails, an older file stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(chunks)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line, as `write_text` does."""
    write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Reads one JSON object per line."""
    with Path(path).open(encoding="utf-8") as file:
        yield from map(json.loads, file)
