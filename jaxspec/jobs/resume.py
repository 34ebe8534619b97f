"""Resuming a job: the folder of its results, whose manifest says which job it is.

From top to bottom, as a command goes:

1. `Output.check` asks whether the folder can be written, before a model is loaded.
2. `manifest_of` describes the job by everything that its texts depend on.
3. `Output.begun` locks the folder. A new job writes its manifest. A resumed one is compared with the
   stored manifest, and the first difference is an error.
4. `Chunks` holds the results: a chunk has those of a fixed range of lines, in order, and is written
   whole or not at all. Rows end in any order. Each is appended to the journal of its chunk, a file
   beside the chunks. When all rows of a chunk are in its journal, the chunk is written and the
   journal deleted.
5. `Output.finish` writes the summary when all chunks are there.

So a killed job loses only the rows that were being decoded, a resumed one decodes no other row
again, and both write the same files. `jaxspec batch` and `jaxspec transcribe` are such jobs.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxspec import files
from jaxspec.files import folders
from jaxspec.jobs import openai

VERSIONS = ("jaxspec-decoding", "jax", "jaxlib")
ANOTHER_FOLDER = "put the one back that the job wrote, or choose another folder"
KEPT = "the rows that were done before are kept"
Rows = Sequence[dict[str, Any]]  # the rows of one line: one for each text, none if it is skipped


class InputShard(NamedTuple):
    """A part of the input: every `count`-th line that is not blank, from number `index` on."""

    index: int = 0
    count: int = 1

    suffix = property(
        lambda self: f"{self.index:05}-of-{self.count:05}",
        doc="The part, as in the names of files.",
    )


class Output(NamedTuple):
    """The folder that a job writes."""

    folder: Path  # the folder of the chunks and the manifest
    shard: InputShard  # the part of the input that they come from
    chunk: int  # lines of the input that a chunk has the results of

    manifest = property(
        lambda self: self.folder / f"manifest-{self.shard.suffix}.json", doc="This part's manifest."
    )
    summary = property(
        lambda self: self.folder / f"summary-{self.shard.suffix}.json",
        doc="This part's summary, which is there when all chunks are.",
    )

    def path(self, index: int) -> Path:
        """Returns where a chunk is written."""
        return self.folder / f"part-{self.shard.suffix}-{index:06}.jsonl"

    def journal(self, index: int) -> Path:
        """Returns the journal of a chunk: its finished rows until the chunk is complete."""
        return self.folder / f"journal-{self.shard.suffix}-{index:06}"

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Holds this part for this process; see `folders.locked`."""
        holder = f"a process that decodes part {self.shard.index} of {self.shard.count}"
        return folders.locked(self.folder, holder, f".lock-{self.shard.suffix}")

    def check(self, *, resume: bool) -> None:
        """Raises an error if the folder cannot be written or is in use, or holds a job without
        `resume`. Commands ask before they load a model.
        """
        files.check_writable(self.manifest)
        if self.manifest.exists():
            with self.locked():  # raises OSError if another process decodes this part
                pass
        self._check_job(resume)

    def _check_job(self, resume: bool) -> None:
        if self.manifest.exists() and not resume:
            raise ValueError(
                f"{self.folder} holds a job already: give --resume to go on with it, or another "
                "folder"
            )
        rows = sorted(self.folder.glob(f"*-{self.shard.suffix}-*"))
        if rows and not self.manifest.exists():
            gone = f"{rows[0]} is of a job whose {self.manifest.name} is gone"
            raise ValueError(f"{gone}: put it back, or choose another folder")

    @contextlib.contextmanager
    def begun(
        self,
        manifest: Mapping[str, Any],
        total: int,
        *,
        resume: bool,
        renewed: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> Iterator[Chunks]:
        """Begins a job or goes on with it, and yields its chunks of `total` lines.

        The folder is locked until the block ends. `renewed` spells a stored manifest as this
        version does.
        """
        with self.locked():
            self._check_job(resume)  # another process may have begun the job since `check`
            self.begin(manifest, renewed)
            with contextlib.closing(Chunks(self, total)) as chunks:
                yield chunks

    def begin(
        self,
        manifest: Mapping[str, Any],
        renewed: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        """Writes the manifest of a new job, or compares it with the resumed job's."""
        expected = json.loads(json.dumps(manifest))  # lists in place of tuples
        is_resumed = self.manifest.exists()
        # A new part is compared with another part of the job, if any has begun.
        stored_paths = [self.manifest]
        if not is_resumed:
            stored_paths = sorted(self.folder.glob("manifest-*.json"))[:1]
        for path in stored_paths:
            stored = files.read_json(path, ANOTHER_FOLDER) | {"shard": self.shard.index}
            _compare(renewed(stored), expected, path)
        if is_resumed:
            self.summary.unlink(missing_ok=True)
        else:
            self._write_whole(self.manifest, manifest, "no chunk was begun")

    def costs(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the costs of passes for all parts of the job: those that the first part measured.

        Draft lengths depend on the costs, and sampled texts on draft lengths.
        """
        path = self.folder / "costs.json"
        if not path.exists():
            measured = json.dumps(measure()) + "\n"
            with folders.full_disk(self.folder, "no chunk was begun"):
                # another part may have been first
                files.write_text(path, [measured], overwrite=False)
        return files.read_json(path, ANOTHER_FOLDER)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary of a job whose chunks are all there."""
        self._write_whole(self.summary, summary, "all chunks are whole")

    def _write_whole(self, path: Path, report: Mapping[str, Any], outcome: str) -> None:
        with folders.full_disk(self.folder, outcome):
            # File names may hold bytes that are not text: JSON escapes them as \udc..
            files.write_text(path, [json.dumps(report, indent=2) + "\n"])


def manifest_of(
    output: Output, models: Mapping[str, Any], options: Mapping[str, Any], **inputs: Any
) -> dict[str, Any]:
    """Describes a job by everything that its texts depend on, such as digests of files.

    Args:
        output: the folder, which has the job's part and the size of its chunks.
        models: each model's name and the digests of its files, by its role.
        options: the options of the job.
        inputs: descriptions of what is read.
    """
    return {
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "models": dict(models),
        "options": dict(options),
        **inputs,
        "shard": output.shard.index,
        "num_shards": output.shard.count,
        "lines a chunk": output.chunk,
    }


def _compare(
    stored: Mapping[str, Any], expected: Mapping[str, Any], path: Path, within: str = ""
) -> None:
    """Raises ValueError that names the innermost value in which two manifests differ."""
    for name in {**stored, **expected}:
        old = stored.get(name)
        new = expected.get(name)
        if old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            _compare(old, new, path, f"{within}{name}: ")
        if isinstance(old, list) and isinstance(new, list):
            _compare(_numbered(old), _numbered(new), path, f"{within}{name}: ")
        raise ValueError(
            f"{path} is of another job ({within}{name} is {old!r} there and {new!r} here): resume "
            "with what it began with, or choose another folder"
        )


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {f"number {index}": value for index, value in enumerate(values)}


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
