"""A job over files: JSON lines in, chunks of JSON lines out, a manifest, and resuming.

A chunk holds the results of a fixed range of the input's lines, in their order, and is written whole or not at all
(`chunks` says how). What a job that was killed and goes on writes is what it would have written.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxspec import files
from jaxspec.core import BoundDrafter, Model
from jaxspec.files import digests, folders
from jaxspec.jobs import fields, openai
from jaxspec.jobs.prompts import Line
from jaxspec.sampling.params import OPTIONS, Sizes

# Files that are often given, and do not consist of lines of prompts.
OTHER_FILES = (*(".json", ".csv", ".tsv"), *(".parquet", ".arrow"), *(".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz"))
ANOTHER_FOLDER = "put the one back that the job wrote, or choose another folder"
PROMPT = "prompt"  # the usual field of it
VERSIONS = ("jaxspec-decoding", "jax", "jaxlib")


class Shard(NamedTuple):
    """A part of the input: of the lines that are not blank, each `count`-th, from number `index` on."""

    index: int = 0
    count: int = 1

    @property
    def suffix(self) -> str:
        """The part, as it stands in the names of files."""
        return f"{self.index:05}-of-{self.count:05}"


class Survey(NamedTuple):
    """The input of a job, looked through once.

    Attributes:
        lines: how many there are, blank ones left out.
        varying: options of sampling that lines set, each with the largest value; see `generate_many`.
        twice: the message about an id that occurs twice; empty if none does.
    """

    lines: int
    varying: Mapping[str, Any]
    twice: str


class Source(NamedTuple):
    """The input of a job.

    Attributes:
        paths: text files, one prompt a line, or JSON lines (.jsonl, .ndjson); either also compressed (.gz).
        field: the field of a JSON line that has the prompt.
        chat: whether a prompt that is text is a user's message to the model.
        shard: which part to read.
        system: the message that comes before the user's, with `chat`.
    """

    paths: Sequence[Path]
    field: str = PROMPT
    chat: bool = False
    shard: Shard = Shard()
    system: str | None = None

    def survey(self) -> Survey:
        """Looks through all lines of all parts.

        Raises:
            ValueError: a compressed file is damaged, a file is UTF-16, or all are empty.
        """
        total, varying, ids = 0, dict[str, Any](), array.array("q")
        for total, (path, _, line) in enumerate(self._lines(), 1):
            described = self._line(total - 1, "", path, line)
            ids.append(_digest(total - 1 if described.id is None else described.id))
            try:
                sampling = fields.read(described.fields).sampling if isinstance(described.fields, Mapping) else {}
                for name, value in sampling.items():
                    if OPTIONS[name].field == "bias":  # any value will do
                        varying[name] = value
                    else:
                        OPTIONS[name].convert(value, name, Sizes(1, 1, 1))
                        varying[name] = max(varying.get(name, value), value)
            except (ValueError, TypeError):  # the line's own error, when it is decoded
                pass
        if not total:
            raise ValueError(f"{', '.join(map(str, self.paths))} holds no prompt: expected one a line")
        return Survey(total, varying, self._twice(np.frombuffer(ids, np.int64)))

    def count(self, lines: int) -> int:
        """Counts the lines of the part, of so many in all."""
        return max(0, -(-(lines - self.shard.index) // self.shard.count))

    def prompts(self, done: Container[int] = ()) -> Iterator[Line]:
        """Yields prompts as `generate_many` takes them, but those whose number is in `done`."""
        numbered = itertools.islice(enumerate(self._lines()), self.shard.index, None, self.shard.count)
        for number, (path, at, line) in numbered:
            if number not in done:
                yield self._line(number, f"{self._name(path)}: line {at}", path, line)

    def _lines(self) -> Iterator[tuple[Path, int, bytes]]:
        """Yields every line of every file that is not blank, with its file and its place there, from 1.

        A byte order mark, which Windows' editors put first, is no part of a file's first line.
        """
        for path in self.paths:
            with files.opened(path) as file:
                first = file.readline().removeprefix(codecs.BOM_UTF8)
                if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise ValueError(f"{path} is not UTF-8 text but UTF-16: save it as UTF-8")
                lines = enumerate(itertools.chain([first], file), 1)
                yield from ((path, at, line) for at, line in lines if line.strip())

    def _name(self, path: Path) -> str:
        """Names a file in messages, by its folders only where another file has the same name."""
        return path.name if sum(path.name == other.name for other in self.paths) == 1 else str(path)

    def _twice(self, ids: np.ndarray) -> str:
        """Says which lines have the same id: the first two, and how many others there are."""
        order = np.argsort(ids, kind="stable")
        repeated = order[1:][ids[order[1:]] == ids[order[:-1]]]  # of those with one id all but the first
        if not repeated.size:
            return ""
        second = int(repeated.min())
        numbers = int(np.flatnonzero(ids == ids[second])[0]), second
        wheres, name = [], None
        for number, (path, at, line) in itertools.islice(enumerate(self._lines()), second + 1):
            if number in numbers:
                wheres.append(f"{self._name(path)}: line {at}")
                name = self._line(number, "", path, line).id
        more = f" ({len(repeated) - 1:,} more lines repeat an id)" if len(repeated) > 1 else ""
        return (
            f"the id {name!r} stands twice, at {wheres[0]} and {wheres[1]}{more}: results differ by their numbers only"
        )

    def _line(self, number: int, where: str, path: Path, line: bytes) -> Line:
        """Reads a line; what is wrong with it is in place of its fields."""
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            return Line(number, where, ValueError(f"the line is not UTF-8 ({error.reason} at byte {error.start})"))
        if "\0" in text:
            return Line(number, where, ValueError("the line has a NUL character: is the file UTF-16? Save it as UTF-8"))
        if not files.is_json_lines(path.name):
            return Line(number, where, self._messages({PROMPT: text}))
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            return Line(number, where, ValueError(f"the line is no JSON ({error})"))
        if not isinstance(row, Mapping):
            return Line(number, where, ValueError(f"the line is {text[:60]}: expected a JSON object"))
        for name in row:
            try:
                if name == "id" or fields.is_own(name):
                    json.dumps(row[name], allow_nan=False)
            except (ValueError, RecursionError) as error:  # 1e999 is read as infinity, which JSON has not
                return Line(number, where, ValueError(f"the line's {name} cannot be written ({error})"))
        name, row = row.get("id"), {field: value for field, value in row.items() if field != "id"}
        try:
            if openai.is_request(row):
                name = row["custom_id"]
                row = openai.fields_of(row)
            return Line(number, where, *self._content(row), id=name)
        except ValueError as error:
            return Line(number, where, error, id=name)

    def _content(self, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the fields of a line, with the prompt under its usual name, and those that only look like fields.

        Raises:
            ValueError: there is no prompt.
        """
        is_default = self.field == PROMPT  # another one was chosen, whatever else there is
        alike = {"number"} if is_default else {"number", *fields.CONTENT} - {self.field}
        others = {name: row.pop(name) for name in alike & row.keys()}
        if self.field not in row and not (is_default and "messages" in row):
            names = sorted({**row, **others})
            raise ValueError(f"the line has no {self.field!r}, but {names}: choose one of these with --field")
        if not is_default:
            row[PROMPT] = row.pop(self.field)
        return self._messages(row), others

    def _messages(self, row: dict[str, Any]) -> dict[str, Any]:
        """Makes a prompt that is text a message, if that is asked for."""
        if not self.chat or not isinstance(row.get(PROMPT), str) or "messages" in row:
            return row
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        message = {"role": "user", "content": row.pop(PROMPT)}
        return row | {"messages": [*before, message]}


def _digest(name: Any) -> int:
    """A number of 64 bits that tells ids apart."""
    spelled = json.dumps(name, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(spelled.encode(), digest_size=8).digest(), "little", signed=True)


class Output(NamedTuple):
    """The folder that a job writes.

    Attributes:
        folder: the folder of the chunks and the manifest.
        shard: which part of the input they are of.
        chunk: lines of the input that a chunk has the results of.
    """

    folder: Path
    shard: Shard
    chunk: int

    def path(self, index: int) -> Path:
        """Returns where a chunk is written."""
        return self.folder / f"part-{self.shard.suffix}-{index:06}.jsonl"

    def journal(self, index: int) -> Path:
        """Returns where the rows of a chunk are that is not whole."""
        return self.folder / f"journal-{self.shard.suffix}-{index:06}"

    @property
    def manifest(self) -> Path:
        """The path of this part's manifest."""
        return self.folder / f"manifest-{self.shard.suffix}.json"

    @property
    def summary(self) -> Path:
        """The path of this part's summary, which is there when all chunks are."""
        return self.folder / f"summary-{self.shard.suffix}.json"

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Holds this part for this process; see `folders.locked`.

        Raises:
            OSError: another process holds it.
        """
        part = f"a process that decodes part {self.shard.index} of {self.shard.count}"
        return folders.locked(self.folder, part, f".lock-{self.shard.suffix}")

    def check(self, *, resume: bool) -> None:
        """Refuses a folder that cannot be written, or holds a job that is not to be resumed.

        Raises:
            ValueError, OSError: the one or the other.
        """
        files.check_writable(self.manifest)
        if self.manifest.exists() and not resume:
            raise ValueError(f"{self.folder} holds a job already: give --resume to go on with it, or another folder")
        rows = sorted(self.folder.glob(f"*-{self.shard.suffix}-*"))
        if rows and not self.manifest.exists():
            raise ValueError(
                f"{rows[0]} is of a job whose {self.manifest.name} is not there: put it back, or choose another folder"
            )

    def costs(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the costs of passes that all parts of the job go on with: the first that were measured.

        What is drafted depends on them, and with it texts that are drawn.
        """
        path = self.folder / "costs.json"
        if not path.exists():
            measured = json.dumps(measure()) + "\n"
            with folders.full_disk(self.folder, "no chunk was begun"):
                files.write_text(path, [measured], overwrite=False)  # another part may have been first
        return files.read_json(path, ANOTHER_FOLDER)

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest, or compares it with that of the job to go on with.

        Raises:
            ValueError: the job in the folder is another one.
        """
        wanted = json.loads(json.dumps(manifest))
        for path in [self.manifest] if self.manifest.exists() else sorted(self.folder.glob("manifest-*.json"))[:1]:
            _compare(files.read_json(path, ANOTHER_FOLDER) | {"shard": self.shard.index}, wanted, path)
        if self.manifest.exists():
            self.summary.unlink(missing_ok=True)
        else:
            self._write_whole(self.manifest, manifest, "no chunk was begun")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the summary of a job whose chunks are all there.

        Raises:
            OSError: the disk is full.
        """
        self._write_whole(self.summary, summary, "all chunks are whole")

    def _write_whole(self, path: Path, report: Mapping[str, Any], outcome: str) -> None:
        with folders.full_disk(self.folder, outcome):
            files.write_text(path, [json.dumps(report, indent=2, ensure_ascii=False) + "\n"])


def manifest_of(
    source: Source, output: Output, models: Mapping[str, tuple[str, Model | BoundDrafter]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Describes a job: everything that its texts depend on.

    Args:
        source, output: what is read, and how it is cut into chunks.
        models: target and drafter, each with its name.
        options: plain values.
    """
    return {
        "versions": {name: importlib.metadata.version(name) for name in VERSIONS},
        "models": {role: [name, digest(model)] for role, (name, model) in models.items()},
        "options": dict(options),
        "input": [[path.name, digests.of_file(path)] for path in source.paths],  # whose order is that of the lines
        "field": source.field,
        "chat": source.chat,
        "shard": source.shard.index,
        "num_shards": source.shard.count,
        "lines a chunk": output.chunk,
    }


def digest(model: Model | BoundDrafter) -> str:
    """Returns a digest of all that tells models apart: every bit of the parameters, configurations, tokenizers.

    It is the same on any mesh, and parameters stay where they are.

    >>> from jaxspec.testing import table_model
    >>> table = table_model(jax.random.key(1), vocab=5)
    >>> [digest(table) == digest(table._replace(params=p)) for p in (table.params + 0, table.params.at[-1, -1].add(1))]
    [True, False]
    """
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        summed = digests.of_arrays([leaf]) if isinstance(leaf, np.ndarray) else np.asarray(_checksum(leaf)).tolist()
        hashed.update(f"{jax.tree_util.keystr(path)} {jnp.result_type(leaf)} {np.shape(leaf)} {summed}\n".encode())
    for part in (model,) if isinstance(model, Model) else model.models:
        hashed.update(f"{part.config} {_spelled(part.tokenizer)}\n".encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


@jax.jit
def _checksum(array: Array) -> Array:
    """Sums an array's entries, each mixed with its place: two numbers, as integers are added in any order."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype in (jnp.bool_, jnp.int4, jnp.uint4):
        array = array.astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * min(array.dtype.itemsize, 4)}").astype(jnp.uint32)
    place = jnp.zeros_like(bits)
    for axis, size in enumerate(bits.shape):  # not by reshaping, which would move what lies on several devices
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    mixed = (_mixed(bits ^ _mixed(place + jnp.uint32(seed))) for seed in (1, 2**31))
    return jnp.stack([jnp.sum(numbers, dtype=jnp.uint32) for numbers in mixed])


def _mixed(bits: Array) -> Array:
    """The last steps of MurmurHash3: any bit that differs changes about half of the result's."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ (bits >> jnp.uint32(16))


def _spelled(tokenizer: Any) -> str:
    """Writes down what a tokenizer does; none is an empty text."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Calls may change what is cut off or padded; they are no part of it.
    how = json.loads(backend.to_str()) | {"truncation": None, "padding": None} if backend else tokenizer.get_vocab()
    special = getattr(tokenizer, "special_tokens_map", None), getattr(tokenizer, "chat_template", None)
    return json.dumps([how, repr(special)], sort_keys=True)


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
    """Refuses input files that are not there, or would be read as lines and are something else.

    Raises:
        OSError: as the operating system says it.
        ValueError: by its name a file is none of lines.

    >>> check_paths([Path("prompts.json")])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: prompts.json is no file of lines ...
    """
    for path in paths:
        if str(path) == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
            raise ValueError(
                f"{path} is no regular file, and a job reads its input more than once, to count it, and to go on where "
                "it was stopped: write it to a file first"
            )
        if path.name.lower().removesuffix(".gz").endswith(OTHER_FILES):
            raise ValueError(
                f"{path} is no file of lines by its name: expected text with a prompt a line, or JSON lines (.jsonl), "
                "either also compressed by gzip (.gz)"
            )
        with path.open("rb"):
            pass
