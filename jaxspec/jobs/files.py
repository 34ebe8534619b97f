"""A job over files: JSON lines in, chunks of JSON lines out, a manifest, and resuming.

A chunk holds the results of a fixed range of input lines, in order, and is written whole or not at
all (see `chunks`). A job that was killed and resumed writes the same files.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec import files
from jaxspec.files import digests, folders
from jaxspec.jobs import fields, openai
from jaxspec.jobs.prompts import Line
from jaxspec.sampling.params import OPTIONS, Sizes

ANOTHER_FOLDER = "put the one back that the job wrote, or choose another folder"
PROMPT = "prompt"  # the usual field of it
VERSIONS = ("jaxspec-decoding", "jax", "jaxlib")


class InputShard(NamedTuple):
    """A part of the input: every `count`-th line that is not blank, from number `index` on."""

    index: int = 0
    count: int = 1

    suffix = property(
        lambda self: f"{self.index:05}-of-{self.count:05}",
        doc="The part, as in the names of files.",
    )


class Survey(NamedTuple):
    """The input of a job, looked through once."""

    lines: int  # how many there are, blank ones left out
    # options of sampling that lines set, each with the largest value; see `generate_many`
    varying: Mapping[str, Any]
    twice: str  # the message about an id that occurs twice; empty if none does


class Source(NamedTuple):
    """The input of a job."""

    # text, one prompt a line, or JSON lines (.jsonl, .ndjson); also compressed (.gz)
    paths: Sequence[Path]
    field: str = PROMPT  # the field of a JSON line that has the prompt
    chat: bool = False  # whether a prompt that is text is a user's message to the model
    shard: InputShard = InputShard()  # the part to read
    system: str | None = None  # the message that comes before the user's, with `chat`

    def survey(self) -> Survey:
        """Looks through all lines of all parts."""
        # hashes of ids: 8 bytes a line
        varying = dict[str, Any]()
        ids = array.array("q")
        for line in self.lines():
            name = line.number if line.id is None else line.id
            ids.append(hash(json.dumps(name, sort_keys=True, default=str)))
            try:
                if not isinstance(line.fields, Mapping):
                    continue
                settings = fields.read(line.fields)
                if settings.pattern is not None:
                    varying["regex"] = [None]
                for option, value in settings.sampling.items():
                    if fields.is_neutral(option, value):
                        continue
                    if OPTIONS[option].field == "bias":  # any value will do
                        varying[option] = value
                    else:
                        OPTIONS[option].convert(value, option, Sizes(1, 1, 1))
                        varying[option] = max(varying.get(option, value), value)
            except (ValueError, TypeError):  # becomes the line's error when it is decoded
                pass
        if not ids:
            raise ValueError(
                f"{', '.join(map(str, self.paths))} holds no prompt: expected one a line"
            )
        return Survey(len(ids), varying, self._twice(np.frombuffer(ids, np.int64)))

    def count(self, lines: int) -> int:
        """Counts the lines of this part, given all lines."""
        return max(0, -(-(lines - self.shard.index) // self.shard.count))

    def prompts(self, done: Container[int] = ()) -> Iterator[Line]:
        """Yields this part's prompts as `generate_many` takes them, except numbers in `done`."""
        lines = itertools.islice(self.lines(), self.shard.index, None, self.shard.count)
        return (line for line in lines if line.number not in done)

    def lines(self) -> Iterator[Line]:
        """Reads every line of every file that is not blank.

        Drops the byte order mark that Windows editors put first.
        """
        numbers = itertools.count()
        for path in self.paths:  # name the folder only if two files have one name
            if sum(path.name == sibling.name for sibling in self.paths) == 1:
                name = path.name
            else:
                name = str(path)
            with files.opened(path) as file:
                first = file.readline().removeprefix(codecs.BOM_UTF8)
                if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise ValueError(f"{path} is not UTF-8 text but UTF-16: save it as UTF-8")
                for number, line in enumerate(itertools.chain([first], file), 1):
                    if line.strip():
                        yield self._line(
                            next(numbers),
                            f"{name}: line {number}",
                            files.is_json_lines(path.name),
                            line,
                        )

    def _twice(self, ids: np.ndarray) -> str:
        """Returns a message about lines with the same id; "" without any."""
        order = np.argsort(ids, kind="stable")
        # all but the first line of each id, in the order of hashes
        repeated = order[1:][ids[order[1:]] == ids[order[:-1]]]
        if not repeated.size:
            return ""
        second = int(repeated.min())
        numbers = int(np.flatnonzero(ids == ids[second])[0]), second
        first, later = (
            line for line in itertools.islice(self.lines(), second + 1) if line.number in numbers
        )
        if len(repeated) > 1:
            more = f" ({len(repeated) - 1:,} more lines repeat an id)"
        else:
            more = ""
        name = first.number if first.id is None else first.id
        twice = f"the id {name!r} stands twice, at {first.where} and {later.where}{more}"
        return f"{twice}: results differ by their numbers only"

    def _line(self, number: int, where: str, is_json: bool, line: bytes) -> Line:
        """Reads a line; if it is invalid, its fields are the exception."""
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            return Line(
                number,
                where,
                ValueError(f"the line is not UTF-8 ({error.reason} at byte {error.start})"),
            )
        if "\0" in text:
            return Line(
                number,
                where,
                ValueError("the line has a NUL character: is the file UTF-16? Save it as UTF-8"),
            )
        if not is_json:
            return Line(number, where, self._messages({PROMPT: text}))
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            return Line(number, where, ValueError(f"the line is no JSON ({error})"))
        if not isinstance(row, Mapping):
            return Line(
                number, where, ValueError(f"the line is {text[:60]}: expected a JSON object")
            )
        for name in row:
            try:
                if name == "id" or fields.is_own(name):
                    json.dumps(row[name], allow_nan=False)
            except (ValueError, RecursionError) as error:
                # 1e999 is read as infinity, which JSON does not have
                return Line(
                    number, where, ValueError(f"the line's {name} cannot be written ({error})")
                )
        name = row.get("id")
        row = {field: value for field, value in row.items() if field != "id"}
        try:
            if "custom_id" in row and "body" in row:  # of OpenAI's form
                name = row["custom_id"]
                row = openai.fields_of(row)
            return Line(number, where, *self._content(row), id=name)
        except ValueError as error:
            return Line(number, where, error, id=name)

    def _content(self, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns a line's fields, the prompt as "prompt", and data that only look like fields."""
        # If the caller chose a field, "prompt" and "messages" are data. "number" always is: a
        # line's number is its place.
        is_default = self.field == PROMPT
        if is_default:
            alike = {"number"}
        else:
            alike = {"number", *fields.CONTENT} - {self.field}
        others = {name: row.pop(name) for name in alike & row.keys()}
        if self.field not in row and not (is_default and "messages" in row):
            names = sorted({**row, **others})
            if not names:
                raise ValueError(
                    f"the line is an object without fields: expected {self.field!r} or "
                    f"{fields.CONTENT[1]!r}"
                )
            raise ValueError(
                f"the line has no {self.field!r}, but {names}: choose one of these with --field"
            )
        if not is_default:
            row[PROMPT] = row.pop(self.field)
        return self._messages(row), others

    def _messages(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes a text prompt a user's message if the job is a `chat`."""
        if not self.chat or not isinstance(row.get(PROMPT), str) or "messages" in row:
            return row
        before = []
        if self.system is not None:
            before = [{"role": "system", "content": self.system}]
        message = {"role": "user", "content": row.pop(PROMPT)}
        return row | {"messages": [*before, message]}


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
        """Raises an error if the folder cannot be written, or holds a job without `resume`."""
        files.check_writable(self.manifest)
        if self.manifest.exists() and not resume:
            raise ValueError(
                f"{self.folder} holds a job already: give --resume to go on with it, or another "
                "folder"
            )
        rows = sorted(self.folder.glob(f"*-{self.shard.suffix}-*"))
        if rows and not self.manifest.exists():
            gone = f"{rows[0]} is of a job whose {self.manifest.name} is gone"
            raise ValueError(f"{gone}: put it back, or choose another folder")

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

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest of a new job, or compares it with the resumed job's."""
        expected = json.loads(json.dumps(manifest))
        for path in (
            [self.manifest]
            if self.manifest.exists()
            else sorted(self.folder.glob("manifest-*.json"))[:1]
        ):
            _compare(
                files.read_json(path, ANOTHER_FOLDER) | {"shard": self.shard.index}, expected, path
            )
        if self.manifest.exists():
            self.summary.unlink(missing_ok=True)
        else:
            self._write_whole(self.manifest, manifest, "no chunk was begun")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary of a job whose chunks are all there."""
        self._write_whole(self.summary, summary, "all chunks are whole")

    def _write_whole(self, path: Path, report: Mapping[str, Any], outcome: str) -> None:
        with folders.full_disk(self.folder, outcome):
            # File names may hold bytes that are not text: JSON escapes them as \udc..
            files.write_text(path, [json.dumps(report, indent=2) + "\n"])


def manifest_of(
    source: Source, output: Output, models: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Describes a job by everything that its texts depend on, such as digests of files."""
    return {
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "models": dict(models),
        "options": dict(options),
        # a list, since the order of files is the order of lines
        "input": [[path.name, digests.of_file(path)] for path in source.paths],
        "field": source.field,
        "chat": source.chat,
        "shard": source.shard.index,
        "num_shards": source.shard.count,
        "lines a chunk": output.chunk,
    }


def digests_of(path: Path) -> dict[str, str]:
    """Returns the SHA-256 of a file, or of each file of a folder by its name, except hidden files.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("weights", ".lock"):
    ...     _ = (folder / name).write_text(name)
    >>> digests_of(folder).keys() == {"weights"} and digests_of(folder) == digests_of(
    ...     folder / "weights"
    ... )
    True
    """
    if path.is_file():
        return {path.name: digests.of_file(path)}
    names = {file.relative_to(path): file for file in sorted(path.rglob("*")) if file.is_file()}
    visible = {
        name: file
        for name, file in names.items()
        if not any(component.startswith(".") for component in name.parts)
    }
    return {name.as_posix(): digests.of_file(file) for name, file in visible.items()}


def _compare(
    stored: Mapping[str, Any], expected: Mapping[str, Any], path: Path, within: str = ""
) -> None:
    for name in {**stored, **expected}:
        if stored.get(name) == expected.get(name):
            continue
        if isinstance(stored.get(name), Mapping) and isinstance(expected.get(name), Mapping):
            _compare(stored[name], expected[name], path, f"{within}{name}: ")
        if isinstance(stored.get(name), list) and isinstance(expected.get(name), list):
            by_number = [
                {f"number {i}": x for i, x in enumerate(listed)}
                for listed in (stored[name], expected[name])
            ]
            _compare(by_number[0], by_number[1], path, f"{within}{name}: ")
        raise ValueError(
            f"{path} is of another job ({within}{name} is {stored.get(name)!r} there and "
            f"{expected.get(name)!r} here): resume with what it began with, or choose another "
            "folder"
        )


def check_paths(paths: Sequence[Path]) -> None:
    """Raises an error if an input file does not exist, or does not consist of lines.

    >>> check_paths([Path("prompts.json")])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: prompts.json is no file of lines ...
    """
    for path in paths:
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise ValueError(
                f"{path} is no regular file, and a job reads its input twice: write it to a file "
                "first"
            )
        files.check_lines(path)
        with path.open("rb"):
            pass
