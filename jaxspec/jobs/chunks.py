"""The chunks of a job while they are filled: no finished row is lost.

Rows end in any order. Each is appended to the journal of its chunk, a file beside the chunks. When
all rows of a chunk are in its journal, the chunk is written, whole, and the journal deleted. So a
killed job loses only the rows that were being decoded, and a resumed one decodes no other row
again.
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
Rows = Sequence[dict[str, Any]]  # the rows of one line: one for each text, none if it is skipped


class Chunks:
    """The chunks of a part of a job. Holds the rows of unfinished chunks in memory.

    Args:
        output: the folder to write. Its files belong to this job.
        total: lines of the part.

    Attributes:
        num_done: lines whose rows are in a file, and skipped lines.
    """

    def __init__(self, output: Output, total: int):
        self._output = output
        self._total = total
        self.num_done = 0
        self._whole = set[int]()
        # rows of unfinished chunks, by line
        self._rows = collections.defaultdict[int, dict[int, Rows]](dict)
        self._files = dict[int, BinaryIO]()  # open journals
        names = {path.name for path in output.folder.iterdir()}
        for index in range(-(-total // output.chunk)):
            path = output.path(index)
            journal = output.journal(index)
            if path.name in names:
                self._whole.add(index)
                self.num_done += self._size(index)
                journal.unlink(missing_ok=True)  # a kill came between writing and deleting
            elif journal.name in names:
                self._rows[index] = _journaled(journal)
                self.num_done += len(self._rows[index])
                self._write_if_full(index)

    @property
    def is_complete(self) -> bool:
        """Returns whether all chunks are written."""
        return len(self._whole) == -(-self._total // self._output.chunk)

    def __contains__(self, number: int) -> bool:
        """Returns whether a line is done, by its number in the whole input."""
        index = self._index(number)
        return index in self._whole or number in self._rows.get(index, ())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all rows on disk, in the order of the input."""
        for index in sorted(self._whole):
            yield from files.read_jsonl(self._output.path(index))
        for index in sorted(self._rows):
            yield from self._in_order(index)

    def add(self, *rows: dict[str, Any]) -> None:
        """Appends the rows of a line, all at once, to the journal of their chunk."""
        number = _number(rows)
        if number in self:
            raise ValueError(f"the row of number {number} is in {self._output.folder} already")
        index = self._index(number)
        with folders.full_disk(self._output.folder, KEPT):
            # unbuffered, so that a kill loses no finished line
            if index not in self._files:
                self._files[index] = self._output.journal(index).open("ab", buffering=0)
            append(self._files[index], json.dumps(rows).encode() + b"\n")
        self._end(number, rows)

    def skip(self, number: int) -> None:
        """Counts a line that has no row."""
        self._end(number, ())

    def close(self) -> None:
        """Closes all journals."""
        for file in self._files.values():
            file.close()

    def _end(self, number: int, rows: Rows) -> None:
        index = self._index(number)
        self._rows[index][number] = rows
        self.num_done += 1
        self._write_if_full(index)

    def _index(self, number: int) -> int:
        return number // self._output.shard.count // self._output.chunk

    def _size(self, index: int) -> int:
        return min(self._output.chunk, self._total - index * self._output.chunk)

    def _in_order(self, index: int) -> Iterator[dict[str, Any]]:
        return itertools.chain.from_iterable(rows for _, rows in sorted(self._rows[index].items()))

    def _write_if_full(self, index: int) -> None:
        """Writes a chunk if all of its lines are done, and deletes its journal."""
        if len(self._rows[index]) < self._size(index):
            return
        with folders.full_disk(self._output.folder, KEPT):
            files.write_jsonl(self._output.path(index), self._in_order(index))
        if index in self._files:
            self._files.pop(index).close()
        self._output.journal(index).unlink(missing_ok=True)
        del self._rows[index]
        self._whole.add(index)


def _number(rows: Rows) -> int:
    return openai.rows_of(rows[0])[0]["number"]


def append(file: BinaryIO, line: bytes) -> None:
    """Writes a whole line to an unbuffered file, whose `write` may write only a part."""
    while line:
        line = line[file.write(line) :]


def _journaled(journal: Path) -> dict[int, Rows]:
    r"""Reads a journal, by the numbers of lines, and cuts off an unfinished line at its end.

    Skips other damaged lines, which a loss of power may leave.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "journal"
    >>> _ = path.write_bytes(b'[{"number": 2}]\n[{"number": 7')
    >>> _journaled(path), path.read_bytes()
    ({2: [{'number': 2}]}, b'[{"number": 2}]\n')
    """
    written = journal.read_bytes()
    entries = dict[int, Rows]()
    os.truncate(journal, written.rfind(b"\n") + 1)
    for line in written.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            rows = json.loads(line)
            entries[_number(rows)] = rows
    return entries
