"""The chunks of a job while they are filled: no row that is done is lost.

Rows are done in any order. Each is appended to the journal of its chunk, a file beside the chunks; when all rows of a
chunk are in its journal, the chunk is written, whole, and the journal deleted. So a job that is killed loses the rows
that were being decoded, and when it goes on no other is decoded again.
"""

from __future__ import annotations

import collections
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxspec import files
from jaxspec.files import folders
from jaxspec.jobs import openai
from jaxspec.jobs.files import Output

KEPT = "the rows that were done before are kept"


class Journal:
    """The rows of a chunk that are done, one a line, each after its checksum, in the order in which they were done.

    A line that is damaged (half-written at a kill or on a full disk, lost with the power) is dropped when the journal
    is opened. Lines are not kept in memory, only where each begins.

    Args:
        path: of the file, which is made with the first row.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "journal"
        >>> journal = Journal(path)
        >>> for number in (7, 3):
        ...     journal.append({"number": number, "text": "a"})
        >>> journal.close()
        >>> size = path.write_bytes(path.read_bytes()[:-1])  # a kill before the last byte
        >>> list(Journal(path).lines())
        ['{"number": 7, "text": "a"}\\n']
    """

    def __init__(self, path: Path):
        self._path = path
        self._places = dict[int, tuple[int, int]]()  # by the row's number: where its line begins, and its bytes
        self._file: BinaryIO | None = None
        self._is_torn, start = False, 0
        if path.exists():
            with path.open("rb") as file:
                for line in file:
                    if (text := _checked(line)) is not None:
                        self._places[_number(json.loads(text))] = start, len(line)
                    start, self._is_torn = start + len(line), not line.endswith(b"\n")

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Appends the row of a prompt, or its rows together, which a kill of the process cannot take back."""
        text = (files.json_line(rows[0]) if len(rows) == 1 else json.dumps(rows) + "\n").encode()
        line = b"%08x " % zlib.crc32(text) + text
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
            append(self._file, b"\n" * self._is_torn)
        append(self._file, line)
        self._places[_number(rows)] = self._file.tell() - len(line), len(line)

    def lines(self) -> Iterator[str]:
        """Yields the rows in the order of their numbers, as they are written into the chunk.

        Raises:
            ValueError: the file has changed since it was opened.
        """
        if not self._places:
            return
        with self._path.open("rb") as file:
            for number in sorted(self._places):
                start, size = self._places[number]
                file.seek(start)
                text = _checked(file.read(size))
                if text is None:
                    raise ValueError(f"{self._path} was changed while it was used: does another process run this job?")
                if text.startswith("["):
                    yield from map(files.json_line, json.loads(text))
                else:
                    yield text

    def close(self, *, delete: bool = False) -> None:
        """Closes the file, and perhaps deletes it."""
        if self._file is not None:
            self._file.close()
        if delete:
            self._path.unlink(missing_ok=True)


def _number(entry: Any) -> int:
    """Returns the number of the prompt that an entry is of: one row or several."""
    row = entry[0] if isinstance(entry, list | tuple) else entry
    return openai.rows_of(row)[0]["number"]


def append(file: BinaryIO, line: bytes) -> None:
    """Writes all of a line to a file without a buffer, which may take less at a time."""
    while line:
        line = line[file.write(line) :]


def _checked(line: bytes) -> str | None:
    """Returns what a journal's line has after the checksum, the line break included; None if it is damaged."""
    text = line[9:]
    return text.decode() if line[:9] == b"%08x " % zlib.crc32(text) else None


class Chunks:
    """The chunks of a part of a job: those that are there, and those that are being filled.

    Args:
        output: where they are written; what is there is of this job.
        total: lines of the part.

    Attributes:
        num_done: lines whose row is in a file, and those that are skipped.
    """

    def __init__(self, output: Output, total: int):
        self.num_done = 0
        self._output, self._total = output, total
        self._whole, self._journals = set[int](), dict[int, Journal]()
        self._skipped = collections.Counter[int]()  # by chunk
        names = {path.name for path in output.folder.iterdir()}
        for index in range(-(-total // output.chunk)):
            path, journal = output.path(index), output.journal(index)
            if path.name in names:
                self._whole.add(index)
                self.num_done += self._size(index)
                journal.unlink(missing_ok=True)  # a kill came between the two
            elif journal.name in names:
                self._journals[index] = Journal(journal)
                self.num_done += len(self._journals[index])
        for index in list(self._journals):
            self._write_if_full(index)

    @property
    def is_complete(self) -> bool:
        """Says whether all chunks are there."""
        return len(self._whole) == -(-self._total // self._output.chunk)

    def __contains__(self, number: int) -> bool:
        """Says whether the row of a line, by its number in the whole input, is in a file."""
        index = self._index(number)
        return index in self._whole or number in self._journals.get(index, ())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all rows that are in files."""
        for index in sorted(self._whole):
            yield from files.read_jsonl(self._output.path(index))
        for journal in self._journals.values():
            yield from map(json.loads, journal.lines())

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Puts the rows of a line into a file, when all of them are done.

        Raises:
            OSError: the disk is full.
        """
        number = _number(rows)
        if number in self:
            raise ValueError(f"the row of number {number} is in {self._output.folder} already")
        index = self._index(number)
        with folders.full_disk(self._output.folder, KEPT):
            self._journal(index).append(*rows)
        self.num_done += 1
        self._write_if_full(index)

    def skip(self, number: int) -> None:
        """Counts a line that has no row."""
        index = self._index(number)
        self._skipped[index] += 1
        self.num_done += 1
        self._write_if_full(index)

    def close(self) -> None:
        """Closes all journals."""
        for journal in self._journals.values():
            journal.close()

    def _index(self, number: int) -> int:
        return number // self._output.shard.count // self._output.chunk

    def _size(self, index: int) -> int:
        """Counts the lines of a chunk."""
        return min(self._output.chunk, self._total - index * self._output.chunk)

    def _journal(self, index: int) -> Journal:
        if index not in self._journals:
            self._journals[index] = Journal(self._output.journal(index))
        return self._journals[index]

    def _write_if_full(self, index: int) -> None:
        """Writes a chunk whose lines are all done; its journal is then of no more use."""
        journal = self._journal(index)
        if len(journal) + self._skipped[index] == self._size(index):
            with folders.full_disk(self._output.folder, KEPT):
                files.write_text(self._output.path(index), journal.lines())
            journal.close(delete=True)
            del self._journals[index]
            self._whole.add(index)
