"""Text files: read as people's editors save them, written whole or not at all."""

import codecs
import contextlib
import gzip
import io
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from jaxspec import optional_imports
from jaxspec.files import folders

# Extensions of files that users often give, and that do not consist of lines.
OTHER_FILES = (
    *(".json", ".csv", ".tsv"),
    *(".parquet", ".arrow"),
    *(".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz"),
)
# UTF-8 without the byte order mark that Windows editors put first
ENCODING = "utf-8-sig"


def read_text(path: str | Path) -> str:
    """Reads the text of a file, perhaps compressed.

    >>> path = Path(tempfile.mkdtemp()) / "text"
    >>> _ = path.write_bytes(codecs.BOM_UTF8 + b"text")
    >>> read_text(path)
    'text'
    """
    try:
        with opened(Path(path)) as file, io.TextIOWrapper(file, ENCODING) as text:
            return text.read()
    except UnicodeDecodeError as error:
        raise no_utf8(path, error) from error


def no_utf8(where: str | Path, error: UnicodeDecodeError) -> ValueError:
    """Makes the error for a text that is not UTF-8."""
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return ValueError(f"{where} is not UTF-8 text but UTF-16: save it as UTF-8")
    return ValueError(f"{where} is not UTF-8 text ({error}): save it as UTF-8")


def is_json_lines(name: str) -> bool:
    """Returns whether a file holds JSON lines, perhaps compressed, by its name.

    >>> [is_json_lines(name) for name in ("a.jsonl", "A.JSONL.gz", "a.ndjson", "a.txt", "jsonl")]
    [True, True, True, False, False]
    """
    return name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def check_lines(path: Path) -> None:
    """Raises ValueError if a file's extension says that it does not consist of lines.

    >>> check_lines(Path("prompts.csv"))
    Traceback (most recent call last):
    ValueError: prompts.csv is not a file of lines by its name: expected text or .jsonl, perhaps with a .gz
    """
    if path.name.lower().removesuffix(".gz").endswith(OTHER_FILES):
        raise ValueError(
            f"{path} is not a file of lines by its name: expected text or .jsonl, perhaps with a "
            ".gz"
        )


def read_json(path: Path, advice: str) -> Any:
    """Reads a file that a program has written.

    Args:
        path: the file.
        advice: the end of the message about a damaged file.
    """
    try:
        return json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): {advice}") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for its bytes, which gzip may have compressed (.gz)."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield cast(IO[bytes], file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is cut off or damaged, or is not compressed by gzip ({error})"
        ) from None


def read_lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yields the non-blank lines of a file, perhaps compressed, each with its place for messages.

    >>> path = Path(tempfile.mkdtemp()) / "text"
    >>> _ = path.write_text("one\\n\\ntwo\\n")
    >>> [(where.removeprefix(str(path)), line) for where, line in read_lines(path)]
    [(': line 1', 'one'), (': line 3', 'two')]
    """
    with opened(Path(path)) as file, io.TextIOWrapper(file, ENCODING) as lines:
        yield from numbered(lines, path)


def numbered(lines: Iterable[str], name: str | Path) -> Iterator[tuple[str, str]]:
    """Yields lines from another source as `read_lines` does."""
    try:
        for number, line in enumerate(lines, 1):
            if line.strip(" \t\r\n"):  # not `strip()`: a no-break space is a character of a prompt
                yield f"{name}: line {number}", line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise no_utf8(name, error) from error


def read_jsonl(path: str | Path, *fields: str) -> Iterator[dict[str, Any]]:
    """Reads one JSON object per line.

    Args:
        path: the file.
        fields: fields that each object must have as text.
    """
    for where, line in read_lines(path):
        if line.strip():
            yield json_object(line, where, fields)


def json_object(
    line: str, where: str, fields: Iterable[str] = (), optional: Iterable[str] = ()
) -> dict[str, Any]:
    """Reads the JSON object of a line.

    Args:
        line, where: a line and its place, from `read_lines`.
        fields: fields that it must have as text.
        optional: fields that must be text if it has them, and they are not null.

    >>> json_object('{"text": 3}', "texts.jsonl: line 2", ["text"])
    Traceback (most recent call last):
    ValueError: texts.jsonl: line 2 has 'text': 3: expected {"text": "..."}
    """
    expected = "expected an object"
    if fields:
        expected = "expected {" + ", ".join(f'"{name}": "..."' for name in fields) + "}"
    expected += "".join(f', and perhaps a "{name}": "..."' for name in optional)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): {expected}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {line.strip()[:60]}: {expected}")
    present = [name for name in optional if row.get(name) is not None]
    for name in (*fields, *present):
        if isinstance(row.get(name), str):
            continue
        got = f"no {name!r}, but {sorted(row)}"
        if name in row:
            got = f"{name!r}: {json.dumps(row[name])[:60]}"
        raise ValueError(f"{where} has {got}: {expected}")
    return row


def write_text(path: str | Path, chunks: Iterable[str], *, overwrite: bool = True) -> None:
    """Writes text through a temporary file beside it, so that no reader sees half a file.

    Args:
        path: the file; its folder is created if missing.
        chunks: the text, in pieces. If producing them fails, an older file stays as it was.
        overwrite: whether to replace an existing file; if not, that file stays.
    """
    with (
        whole(Path(path), overwrite=overwrite) as beside,
        beside.open("w", encoding="utf-8", newline="\n") as file,
    ):
        file.writelines(chunks)


@contextlib.contextmanager
def whole(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yields a new file, which becomes `path` when the block ends; a failure leaves the old.

    By then it is flushed to disk, and survives a loss of power. As with `folders.whole`, the next
    process that writes the same file deletes the leftovers of a killed one.
    """
    with folders.unfinished(path, "tmp", Path.touch) as beside:
        yield beside
        folders.flush(beside)
        if overwrite:
            os.replace(beside, path)
        else:
            _link_if_absent(beside, path)
        folders.flush(path.parent)


def _link_if_absent(beside: Path, path: Path) -> None:
    """Puts a file in place, unless another file is there.

    On a file system without links, a file that another process wrote meanwhile is replaced.
    """
    try:
        os.link(beside, path)  # unlike a rename, this fails if the path exists
    except FileExistsError:
        pass
    except OSError:
        os.replace(beside, path)


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one JSON object per line, as `write_text` does."""
    write_text(path, map(json_line, rows))


def json_line(row: Mapping[str, Any]) -> str:
    """Writes a JSON object as a line.

    Surrogates, which UTF-8 cannot encode, are escaped.

    >>> json_line({"id": "\\ud800"})
    '{"id": "\\\\ud800"}\\n'
    """
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace").decode()


def check_file(path: Path, option: str) -> None:
    """Raises an error, before the work, if an option names a file that could not be written.

    >>> check_file(Path(), "--output")
    Traceback (most recent call last):
    ValueError: --output is .: expected a file, and this is a folder
    """
    if path.is_dir():
        raise ValueError(f"{option} is {path}: expected a file, and this is a folder")
    check_writable(path)


def check_writable(path: str | Path) -> None:
    """Raises OSError, before the work, if a file or folder could not be written."""
    path = Path(path).expanduser().absolute()
    existing = next(parent for parent in path.parents if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


__getattr__ = optional_imports.submodules(__name__)
