"""The input of a job over files: lines of text or of JSON, as prompts; `resume` has the output."""

from __future__ import annotations

import array
import codecs
import contextlib
import itertools
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec import files
from jaxspec.files import digests
from jaxspec.jobs import fields, openai
from jaxspec.jobs.prompts import Line
from jaxspec.jobs.resume import InputShard
from jaxspec.sampling.params import OPTIONS, Sizes

PROMPT = "prompt"  # the usual field of it


class Survey(NamedTuple):
    """The input of a job, looked through once."""

    lines: int  # number of lines, without blank ones
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
        varying = dict[str, Any]()
        ids = array.array("q")  # hashes: 8 bytes a line
        for line in self.lines():
            name = line.number if line.id is None else line.id
            ids.append(hash(json.dumps(name, sort_keys=True, default=str)))
            # An error becomes the line's when it is decoded.
            with contextlib.suppress(ValueError, TypeError):
                if isinstance(line.fields, Mapping):
                    _add_varying(varying, fields.read(line.fields))
        if not ids:
            raise ValueError(
                f"{', '.join(map(str, self.paths))} holds no prompt: expected one a line"
            )
        return Survey(len(ids), varying, self._twice(np.frombuffer(ids, np.int64)))

    def description(self) -> dict[str, Any]:
        """Describes the input for a job's manifest, its files by their digests."""
        return {
            # a list, since the order of files is the order of lines
            "input": [[path.name, digests.of_file(path)] for path in self.paths],
            "field": self.field,
            "chat": self.chat,
        }

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
        for path in self.paths:
            is_unique = sum(path.name == sibling.name for sibling in self.paths) == 1
            name = path.name if is_unique else str(path)
            is_json = files.is_json_lines(path.name)
            with files.opened(path) as file:
                first = file.readline().removeprefix(codecs.BOM_UTF8)
                if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise ValueError(f"{path} is not UTF-8 text but UTF-16: save it as UTF-8")
                for number, line in enumerate(itertools.chain([first], file), 1):
                    if line.strip():
                        yield self._line(next(numbers), f"{name}: line {number}", is_json, line)

    def _twice(self, ids: np.ndarray) -> str:
        """Returns a message about lines with the same id; "" without any."""
        order = np.argsort(ids, kind="stable")
        # all but the first line of each id, in the order of hashes
        repeated = order[1:][ids[order[1:]] == ids[order[:-1]]]
        if not repeated.size:
            return ""
        second = int(repeated.min())
        numbers = int(np.flatnonzero(ids == ids[second])[0]), second
        # Read the input once more, since only hashes were kept.
        first, later = (
            line for line in itertools.islice(self.lines(), second + 1) if line.number in numbers
        )
        more = ""
        if len(repeated) > 1:
            more = f" ({len(repeated) - 1:,} more lines repeat an id)"
        name = first.number if first.id is None else first.id
        return (
            f"the id {name!r} stands twice, at {first.where} and {later.where}{more}: results "
            "differ by their numbers only"
        )

    def _line(self, number: int, where: str, is_json: bool, line: bytes) -> Line:
        """Reads a line; if it is invalid, its fields are the exception."""
        try:
            text = _decoded(line)
            if not is_json:
                return Line(number, where, self._messages({PROMPT: text}))
            row = _json_row(text)
        except ValueError as error:
            return Line(number, where, error)
        name = row.pop("id", None)
        try:
            if "custom_id" in row and "body" in row:  # OpenAI's form
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
        reserved = {"number"}
        if not is_default:
            reserved = {"number", *fields.CONTENT} - {self.field}
        data = {name: row.pop(name) for name in reserved & row.keys()}
        if self.field not in row and not (is_default and "messages" in row):
            names = sorted({**row, **data})
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
        return self._messages(row), data

    def _messages(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes a text prompt a user's message if the job is a `chat`."""
        if not self.chat or not isinstance(row.get(PROMPT), str) or "messages" in row:
            return row
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        messages.append({"role": "user", "content": row.pop(PROMPT)})
        return row | {"messages": messages}


def _add_varying(varying: dict[str, Any], settings: fields.Settings) -> None:
    """Adds the sampling options of a line to `Survey.varying`, the larger value of each."""
    if settings.pattern is not None:
        varying["regex"] = [None]
    for option, value in settings.sampling.items():
        if fields.is_neutral(option, value):
            continue
        if OPTIONS[option].field == "bias":  # any value will do
            varying[option] = value
        else:
            OPTIONS[option].read(value, option, Sizes(1, 1, 1))  # raises if it is invalid
            varying[option] = max(varying.get(option, value), value)


def _decoded(line: bytes) -> str:
    """Decodes a line without its line break. Raises ValueError if it is not UTF-8 text."""
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 ({error.reason} at byte {error.start})") from None
    if "\0" in text:
        raise ValueError("the line has a NUL character: is the file UTF-16? Save it as UTF-8")
    return text


def _json_row(text: str) -> dict[str, Any]:
    """Reads a JSON object whose data can be written again. Raises ValueError if it is not one."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"the line is {text[:60]}: expected a JSON object")
    for name, value in row.items():
        if name != "id" and not fields.is_own(name):
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (ValueError, RecursionError) as error:
            # 1e999 is read as infinity, which JSON does not have
            raise ValueError(f"the line's {name} cannot be written ({error})") from None
    return row


def check_paths(paths: Sequence[Path]) -> None:
    """Raises an error if an input file does not exist, or does not consist of lines.

    >>> check_paths([Path("prompts.json")])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: prompts.json is not a file of lines ...
    """
    for path in paths:
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise ValueError(
                f"{path} is not a regular file, and a job reads its input twice: write it to a "
                "file first"
            )
        files.check_lines(path)
        with path.open("rb"):
            pass
