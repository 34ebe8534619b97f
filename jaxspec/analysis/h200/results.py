"""What the stages found, in one JSON file that is whole at every moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxspec.files import write_text

Found = dict[str, Any]


class Results:
    """The results of stages by name, written to a file as they come.

    Args:
        file: of an earlier run, or to be made.

    Raises:
        ValueError: the file holds something else.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "h200.json"
    >>> Results(file).put("copy", {"seeds": 8}, {"bytes_per_second": 4e12})
    >>> Results(file).done("copy", {"seeds": 8}), Results(file).done("copy", {"seeds": 1})
    (True, False)
    """

    def __init__(self, file: Path):
        self._file = file
        self._stages: dict[str, Found] = {}
        if file.exists():
            try:
                self._stages = dict(json.loads(file.read_text(encoding="utf-8"))["stages"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file} holds no results of this script: give another file") from error

    def done(self, name: str, settings: Found) -> bool:
        """Whether a stage has ended well, with these settings."""
        found = self._stages.get(name)
        return found is not None and "error" not in found and found["settings"] == settings

    def get(self, name: str) -> Found | None:
        """What a stage found; None if it has not ended well."""
        found = self._stages.get(name)
        return None if found is None or "error" in found else found

    def error(self, name: str) -> str | None:
        """Why a stage failed, if it did."""
        return self._stages.get(name, {}).get("error")

    def put(self, name: str, settings: Found, found: Found) -> None:
        """Adds what a stage found, or {"error": why it failed}; it is on disk before this returns."""
        self._stages[name] = {"settings": settings, **found}
        self._write()

    def drop(self, name: str) -> None:
        """Takes back what was put."""
        del self._stages[name]
        self._write()

    def _write(self) -> None:
        write_text(self._file, [json.dumps({"stages": self._stages}, indent=1, ensure_ascii=False), "\n"])
