"""The chunks of a job while they are filled: no finished row is lost.

Rows end in any order. Each is appended to the journal of its chunk, a file beside the chunks. When all rows of a chunk
are in its journal, the chunk is written, whole, and the journal deleted. So a killed job loses only the rows that were
being decoded, and a resumed one decodes no other row again.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxspec import files
from jaxspec.files import folders
from jaxspec.jobs import openai
from jaxspec.jobs.files import Output

KEPT = "the rows that were done before are kept"
Rows = Sequence[dict[str, Any]]  # of one line: one for each of its texts


class Chunks:
    """The chunks of a part of a job: those that are there, and those that are being filled.

    Args:
        output: where they are written. The files there belong to this job.
        total: lines of the part.

    Attributes:
        num_done: lines whose rows are in a file, and skipped lines.
    """

    def __init__(self, output: Output, total: int):
        self._output, self._total, self.num_done = output, total, 0
        self._whole, self._done = set[int](), collections.defaultdict[int, set[int]](set)  # lines of the other chunks
        self._skipped = collections.Counter[int]()  # by chunk: how many of its done lines have no row
        self._files = dict[int, BinaryIO]()  # open journals
        names = {path.name for path in output.folder.iterdir()}
        for index in range(-(-total // output.chunk)):
            path, journal = output.path(index), output.journal(index)
            if path.name in names:
                self._whole.add(index)
                self.num_done += self._size(index)
                journal.unlink(missing_ok=True)  # a kill came between the two
            elif journal.name in names:
                _cut_off_unfinished(journal)
                self._done[index] = set(self._journaled(index))
                self.num_done += len(self._done[index])
                self._write_if_full(index)

    @property
    def is_complete(self) -> bool:
        """Says whether all chunks are there."""
        return len(self._whole) == -(-self._total // self._output.chunk)

    def __contains__(self, number: int) -> bool:
        """Says whether a line is done, by its number in the whole input."""
        index = self._index(number)
        return index in self._whole or number in self._done.get(index, ())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all rows that are in files."""
        for index in sorted(self._whole):
            yield from files.read_jsonl(self._output.path(index))
        for index in sorted(self._done):
            yield from itertools.chain.from_iterable(self._journaled(index).values())

    def add(self, *rows: dict[str, Any]) -> None:
        """Appends the rows of a line, all of them together, to the journal of their chunk."""
        number = _number(rows)
        if number in self:
            raise ValueError(f"the row of number {number} is in {self._output.folder} already")
        index = self._index(number)
        with folders.full_disk(self._output.folder, KEPT):
            if index not in self._files:  # without a buffer: no kill of the process takes back a line
                self._files[index] = self._output.journal(index).open("ab", buffering=0)
            append(self._files[index], json.dumps(rows).encode() + b"\n")
        self._end(number)

    def skip(self, number: int) -> None:
        """Counts a line that has no row."""
        self._skipped[self._index(number)] += 1
        self._end(number)

    def close(self) -> None:
        """Closes all journals."""
        for file in self._files.values():
            file.close()

    def _end(self, number: int) -> None:
        index = self._index(number)
        self._done[index].add(number)
        self.num_done += 1
        self._write_if_full(index)

    def _index(self, number: int) -> int:
        return number // self._output.shard.count // self._output.chunk

    def _size(self, index: int) -> int:
        """Counts the lines of a chunk."""
        return min(self._output.chunk, self._total - index * self._output.chunk)

    def _journaled(self, index: int) -> dict[int, Rows]:
        """Returns what the journal of a chunk holds, by the numbers of the lines, in their order.

        A line that is damaged, by a machine that lost its power, is left out.
        """
        entries, journal = dict[int, Rows](), self._output.journal(index)
        for line in journal.read_bytes().splitlines() if journal.exists() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                rows = json.loads(line)
                entries[_number(rows)] = rows
        return dict(sorted(entries.items()))

    def _write_if_full(self, index: int) -> None:
        """Writes a chunk whose lines are all done; its journal is then of no more use."""
        if len(self._done[index]) < self._size(index):
            return
        path, entries = self._output.journal(index), self._journaled(index)
        if len(entries) + self._skipped[index] != self._size(index):
            raise ValueError(f"{path} was changed while it was used: does another process run this job?")
        with folders.full_disk(self._output.folder, KEPT):
            files.write_jsonl(self._output.path(index), itertools.chain.from_iterable(entries.values()))
        if index in self._files:
            self._files.pop(index).close()
        path.unlink(missing_ok=True)
        del self._done[index]
        self._whole.add(index)


def _number(rows: Rows) -> int:
    """Returns the number of the line that some rows belong to."""
    return openai.rows_of(rows[0])[0]["number"]


def append(file: BinaryIO, line: bytes) -> None:
    """Writes all of a line to a file without a buffer, which may take less at a time."""
    while line:
        line = line[file.write(line) :]


def _cut_off_unfinished(journal: Path) -> None:
    r"""Cuts off the line that a kill or a full disk left unfinished at the end of a journal.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "journal"
    >>> _ = path.write_bytes(b"[{}]\n[{")
    >>> _cut_off_unfinished(path)
    >>> path.read_bytes()
    b'[{}]\n'
    """
    os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
