"""A job over files: JSON lines in, chunks of JSON lines out, a manifest, and resuming.

A chunk holds the results of a fixed range of the input's lines, in their order, and is written whole or not at all. So
a job that was killed goes on at the first chunk that is missing, and what it writes is what it would have written.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import files
from jaxspec.files import digests, folders
from jaxspec.jobs.many import Completion

SAMPLED = 256  # entries of each array that tell models apart
ITS_OWN = ("shard", "costs")  # of a part, in its manifest; all else is the same for all parts
VERSIONS = ("jaxspec-decoding", "jax", "jaxlib")


class Shard(NamedTuple):
    """A part of the input: of the lines that are not blank, each `count`-th, from number `index` on."""

    index: int = 0
    count: int = 1

    def number(self, place: int) -> int:
        """Returns the number, in the whole input, of this part's line at a place."""
        return place * self.count + self.index

    @property
    def suffix(self) -> str:
        """The part, as it stands in the names of files."""
        return f"{self.index:05}-of-{self.count:05}"


class Source(NamedTuple):
    """The input of a job.

    Attributes:
        paths: text files, one prompt a line, or JSON lines (.jsonl); either also compressed (.gz).
        field: of a JSON line, that has the prompt.
        chat: whether a prompt that is text is a user's message to the model.
        shard: which part to read.
        system: of a `chat`, the message that comes before the user's.
    """

    paths: Sequence[Path]
    field: str = "prompt"
    chat: bool = False
    shard: Shard = Shard()
    system: str | None = None

    def count(self) -> int:
        """Counts the lines of the part."""
        total = sum(1 for _ in self._lines())
        return max(0, -(-(total - self.shard.index) // self.shard.count))

    def prompts(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """Yields prompts as `generate_many` takes them, from a place of the part on.

        What is wrong with a line stands in place of its prompt, and is then the error of its row.
        """
        lines = itertools.islice(self._lines(), self.shard.number(start), None, self.shard.count)
        for place, (is_json, line) in enumerate(lines, start):
            number = self.shard.number(place)
            prompt = {"id": number, "number": number}
            try:
                yield prompt | self._prompt(is_json, line)
            except ValueError as error:
                yield prompt | {"prompt": error}

    def _lines(self) -> Iterator[tuple[bool, bytes]]:
        """Yields every line of every file that is not blank, and whether it is JSON.

        A byte order mark, which Windows' editors put first, is no part of a file's first line.
        """
        for path in self.paths:
            is_json = path.name.removesuffix(".gz").endswith(".jsonl")
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                first = file.readline().removeprefix(codecs.BOM_UTF8)
                yield from ((is_json, line) for line in itertools.chain([first], file) if line.strip())

    def _prompt(self, is_json: bool, line: bytes) -> dict[str, Any]:
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"the line is not UTF-8 ({error.reason} at byte {error.start})") from None
        if not is_json:
            return {"prompt": self._message(text)}
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the line is no JSON ({error})") from None
        if not isinstance(row, Mapping):
            raise ValueError(f"the line is {text[:60]}: expected a JSON object")
        particular = {name: row[name] for name in ("id", "max_new_tokens") if name in row}
        if self.field not in row and "messages" in row:
            return particular | {"messages": row["messages"]}
        if self.field not in row:
            raise ValueError(f"the line has no {self.field!r}, but {sorted(row)}: choose one of these with --field")
        return particular | {"prompt": self._message(row[self.field])}

    def _message(self, prompt: Any) -> Any:
        if not self.chat or not isinstance(prompt, str):
            return prompt
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": prompt}]


class Output(NamedTuple):
    """The folder that a job writes.

    Attributes:
        folder: of the chunks and the manifest.
        shard: which part of the input they are of.
        chunk: lines of the input that a chunk has the results of.
    """

    folder: Path
    shard: Shard
    chunk: int

    def path(self, index: int) -> Path:
        """Returns where a chunk is written."""
        return self.folder / f"part-{self.shard.suffix}-{index:06}.jsonl"

    def done(self) -> int:
        """Counts the chunks that are there, up to the first that is not."""
        return next(index for index in itertools.count() if not self.path(index).exists())

    @property
    def manifest(self) -> Path:
        """The path of this part's manifest."""
        return self.folder / f"manifest-{self.shard.suffix}.json"

    def stored(self, name: str) -> Any:
        """Returns an entry of the manifest that is there; None if there is none."""
        return json.loads(files.read_text(self.manifest)).get(name) if self.manifest.exists() else None

    def begin(self, manifest: Mapping[str, Any], *, resume: bool) -> int:
        """Writes the manifest, or compares it with that of the job to go on with; returns the chunks that are done.

        Raises:
            ValueError: there is a job in the folder and it is not to be resumed, or it is another one.
        """
        path = self.manifest
        if path.exists():
            if not resume:
                raise ValueError(
                    f"{self.folder} holds a job already: give --resume to go on with it, or another folder"
                )
            _compare(json.loads(files.read_text(path)), json.loads(json.dumps(manifest)), path)
            return self.done()
        if others := sorted(self.folder.glob("manifest-*.json")):
            other = json.loads(files.read_text(others[0]))
            its_own = {name: manifest[name] for name in ITS_OWN if name in manifest}
            _compare(other | its_own, json.loads(json.dumps(manifest)), others[0])
        files.write_text(path, [json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"])
        return 0

    def write(
        self, results: Iterable[Completion], done: int, lines: Callable[[], int], record: Callable[[Completion], Any]
    ) -> Iterator[int]:
        """Writes results, which are in the order of the input, into chunks, and yields the number of each.

        Args:
            results: of the lines after those of the chunks that are done.
            done: these chunks.
            lines: says, when there are no more results, how many lines of the part were read; their chunks are written.
            record: makes the JSON object of a result.

        Raises:
            OSError: the disk is full; the chunks before are whole.
        """
        index, rows = done, list[dict[str, Any]]()
        for completion in results:
            of_chunk = completion.number // self.shard.count // self.chunk
            while index < of_chunk:
                yield self._write(index, rows)
                index, rows = index + 1, []
            rows.append(record(completion))
        while index * self.chunk < lines():
            yield self._write(index, rows)
            index, rows = index + 1, []

    def _write(self, index: int, rows: list[dict[str, Any]]) -> int:
        with folders.full_disk(self.folder, f"the chunks before {self.path(index).name} are whole"):
            files.write_jsonl(self.path(index), rows)
        return index


def manifest_of(
    source: Source, output: Output, models: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Describes a job: everything that its texts depend on.

    Args:
        source, output: what is read, and how it is cut into chunks.
        models: name: parameters.
        options: plain values.
    """
    return {
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "models": {name: digest(params) for name, params in models.items()},
        "options": dict(options),
        "input": {path.name: digests.of_file(path) for path in source.paths},
        "field": source.field,
        "chat": source.chat,
        "shard": source.shard.index,
        "num_shards": source.shard.count,
        "lines a chunk": output.chunk,
    }


def digest(params: Any) -> str:
    """Returns a digest of parameters: of the shape of each array, and its first numbers.

    >>> [digest({"a": array}) == digest({"a": np.zeros(3)}) for array in (np.zeros(3), np.zeros(4), np.ones(3))]
    [True, False, False]
    """
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        first = leaf[(0,) * (leaf.ndim - 1)][:SAMPLED] if getattr(leaf, "ndim", 0) else leaf
        hashed.update(f"{jax.tree_util.keystr(path)} {np.shape(leaf)} {np.asarray(first).tolist()}".encode())
    return hashed.hexdigest()


def _compare(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path, within: str = "") -> None:
    """Refuses to go on with a job by another one."""
    for name in {**stored, **wanted}:
        if stored.get(name) == wanted.get(name):
            continue
        if isinstance(stored.get(name), Mapping) and isinstance(wanted.get(name), Mapping):
            _compare(stored[name], wanted[name], path, f"{within}{name}: ")
        raise ValueError(
            f"{path} is of another job ({within}{name} is {stored.get(name)!r} there and {wanted.get(name)!r} here): "
            "resume with what it began with, or choose another folder"
        )


def check_paths(paths: Sequence[Path]) -> None:
    """Refuses input files that are not there.

    Raises:
        OSError: as the operating system says it.
    """
    for path in paths:
        with path.open("rb"):
            pass
