"""Finished results in a file of JSON lines, so that a long run that was interrupted goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any


def fingerprint(settings: dict[str, Any]) -> str:
    """A name for settings, the same in any order.

    >>> fingerprint({"a": 1, "b": [2.0]}) == fingerprint({"b": [2.0], "a": 1}) != fingerprint({"a": 1, "b": [3.0]})
    True
    """
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """Results by the fingerprint of their settings; in memory only, if there is no file.

    Args:
        file: of an earlier run, or to be made.

    Raises:
        ValueError: a line of the file is no result. The last one may be cut: the run ended while it was written.
    """

    def __init__(self, file: Path | None):
        self._file = file
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._whole: int | None = None  # bytes of a file that stay whose last line was cut
        self._end = b""  # what a last line lacks that is whole but for its end
        if file is None or not file.exists():
            return
        lines = file.read_bytes().split(b"\n")
        self._end = b"\n" if lines[-1] else b""
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line) if line.strip() else None
                if row is not None:
                    self._rows.setdefault(row["fingerprint"], []).append(row)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                if number < len(lines):
                    raise ValueError(f"{file}: line {number} is no measurement; give another file") from error
                self._whole, self._end = sum(len(whole) + 1 for whole in lines[:-1]), b""

    def get(self, settings: dict[str, Any], group: str = "") -> dict[str, Any] | None:
        """The result that these settings had, if they have been measured: the latest, or the one of a group."""
        found = [row["result"] for row in self._rows.get(fingerprint(settings), [])]
        return next((result for result in reversed(found) if group == result.get("group")), (found or [None])[-1])

    def put(self, settings: dict[str, Any], result: dict[str, Any], environment: dict[str, Any]) -> None:
        """Adds a result; it is on disk before this returns."""
        name = fingerprint(settings)
        row = {"fingerprint": name, "settings": settings, "result": result, "environment": environment}
        self._rows.setdefault(name, []).append(row)
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._whole is not None:
            os.truncate(self._file, self._whole)
            self._whole = None
        with open(self._file, "ab") as out:
            out.write(self._end + json.dumps(row, ensure_ascii=False).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        self._end = b""
