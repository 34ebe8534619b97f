"""Debian's package-description indices: fetching them with apt-get and reading their records.

An index is a list of blank-line separated records. Each has a package name, a checksum that joins
the languages, a one-line synopsis, and a body whose paragraphs are separated by a line holding only
``.``::

    Package: vim
    Description-md5: 59e8b8f7757db8b53566d5d119872de8
    Description-de: Vi IMproved - verbesserter vi-Editor
     Vim ist eine fast kompatible Version des UNIX-Editors »Vi«.
     .
     Dieses Paket enthält eine Version mit vielen Standardfeatures.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxspec import optional_imports
from jaxspec.files import write_text

LANGUAGES = ("en", "de")
MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"  # of the package debian-archive-keyring

# "+" and "o" are rarer bullets; a digit list ("1. ") reads well as running text and is left alone.
_BULLET = re.compile(r"^\s*(?:[*•·+-]|o(?=\s))\s+(?=\S)")


class Record(NamedTuple):
    """One package description in one language; ``paragraphs`` are the body's, one line of text
    each.
    """

    package: str
    md5: str
    language: str
    synopsis: str
    paragraphs: tuple[str, ...]


def fetch(
    lists_dir: str | Path, languages: Sequence[str] = LANGUAGES, releases: Sequence[str] = ()
) -> list[Path]:
    """Downloads the description indices of this machine's Debian release, or of others, with
    ``apt-get update``.
    """
    if shutil.which("apt-get") is None:
        raise OSError(
            "apt-get was not found: the description indices come from a Debian mirror. Run this "
            "on Debian or Ubuntu (a Colab or Cloud VM is one), or copy *_i18n_Translation-*.lz4 "
            "files into a directory and pass that."
        )
    lists_dir = Path(lists_dir).resolve()
    # apt-get refuses to start without it
    (lists_dir / "partial").mkdir(parents=True, exist_ok=True)
    options = [f"Acquire::Languages={','.join(languages)}", f"Dir::State::Lists={lists_dir}"]
    if releases:
        sources = lists_dir / "sources.list"
        write_text(
            sources,
            [f"deb [signed-by={KEYRING}] {MIRROR} {release} main\n" for release in releases],
        )
        options += [f"Dir::Etc::sourcelist={sources}", "Dir::Etc::sourceparts=-"]
    command = ["apt-get", "update", *(part for option in options for part in ("-o", option))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(
            f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()}"
        )
    return [path for language in languages for path in index_files(lists_dir, language)]


def index_files(lists_dir: str | Path, language: str) -> list[Path]:
    """Lists the description indices of one language in a directory, by name."""
    pattern = f"*i18n_Translation-{language}"
    files = sorted([*Path(lists_dir).glob(pattern), *Path(lists_dir).glob(pattern + ".lz4")])
    if not files:
        raise FileNotFoundError(
            f"no {pattern}[.lz4] in {lists_dir}. Call fetch({str(lists_dir)!r}); if that brought "
            "nothing, check that the sources in /etc/apt name a reachable Debian or Ubuntu mirror "
            "with translations."
        )
    return files


def read_records(path: str | Path) -> Iterator[Record]:
    """Reads an index file, ``.lz4`` or plain text, record by record."""
    path = Path(path)
    if path.suffix != ".lz4":
        with path.open(encoding="utf-8") as lines:
            yield from parse_records(lines)
        return
    try:
        import lz4.frame  # here, so that plain indices need no lz4
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            optional_imports.missing("lz4", "train"), name=error.name
        ) from error

    with lz4.frame.open(path, "rt", encoding="utf-8") as lines:
        yield from parse_records(lines)


def parse_records(lines: Iterable[str]) -> Iterator[Record]:
    r"""Parses the lines of an index into records; records without a description are passed over.

    >>> text = "Package: vim\nDescription-md5: 5\nDescription-en: it\n Vim is an\n editor.\n .\n It edits.\n"
    >>> next(parse_records(text.splitlines())).paragraphs
    ('Vim is an editor.', 'It edits.')
    """
    block: list[str] = []
    for line in lines:
        line = line.rstrip("\r\n")
        if line:
            block.append(line)
        elif block:
            yield from _parse_block(block)
            block = []
    if block:
        yield from _parse_block(block)


def _parse_block(block: list[str]) -> Iterator[Record]:
    fields = dict(
        line.split(": ", 1) for line in block if not line.startswith(" ") and ": " in line
    )
    body = [line[1:] for line in block if line.startswith(" ")]
    described = [
        key for key in fields if key.startswith("Description-") and key != "Description-md5"
    ]
    if described and "Package" in fields and "Description-md5" in fields:
        key = described[0]
        synopsis = " ".join(fields[key].split())
        language = key.removeprefix("Description-")
        yield Record(
            fields["Package"], fields["Description-md5"], language, synopsis, _paragraphs(body)
        )


def _paragraphs(body: list[str]) -> tuple[str, ...]:
    paragraphs: list[list[str]] = [[]]
    for line in body:
        if line.strip() == ".":
            paragraphs.append([])
        else:
            paragraphs[-1].append(line)
    return tuple(text for lines in paragraphs if (text := join_lines(lines)))


def join_lines(lines: Iterable[str]) -> str:
    """Joins the physical lines of a paragraph into one; each list item begins with ``*``.

    >>> join_lines(["It brings:", "  - a fast", "    editor", "  - fonts"])
    'It brings: * a fast editor * fonts'
    """
    return " ".join(" ".join(_BULLET.sub("* ", line) for line in lines).split())
