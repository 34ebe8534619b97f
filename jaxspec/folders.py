"""Folders of files and a manifest.toml, written whole or not at all, and refused when damaged.

Checkpoints and datastores are such folders. The manifest holds size and SHA-256 of every other file.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.toml"
STALE = 24 * 3600  # seconds after which an unfinished folder that nobody has touched is a killed process's
LISTED = 8  # of many similar complaints, as many are printed


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `folder` when the block ends; a failure leaves what was there.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "new"
    >>> with whole(folder) as beside:
    ...     _ = (beside / "file").write_text("text")
    ...     folder.exists()
    False
    >>> [path.name for path in folder.parent.iterdir()], (folder / "file").read_text()
    (['new'], 'text')
    """
    folder = folder.resolve()
    _sweep(folder)
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.partial")
    beside.mkdir(parents=True)
    try:
        yield beside
        put_in_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def put_in_place(new: Path, folder: Path) -> None:
    """Renames a folder, over another one if there is one; a kill on the way leaves the one or the other.

    Both change places in one step where the system has such a step (Linux and macOS, on most file systems). Elsewhere
    there is a moment at which nothing is in place: what was there then waits beside, for `recover` to put it back.
    """
    recover(folder)
    old = _set_aside(folder)
    if old.exists():
        shutil.rmtree(old)  # it was replaced, and the one that did it killed before this
    if not folder.exists():
        new.rename(folder)
    elif _exchange(new, folder):
        shutil.rmtree(new)
    else:
        folder.rename(old)
        try:
            new.rename(folder)
        except BaseException:
            recover(folder)
            raise
        shutil.rmtree(old)


def recover(folder: Path) -> None:
    """Puts back what a killed `put_in_place` set aside and had not replaced. Deletes nothing: readers call it, too."""
    folder = folder.resolve()  # as in writing; and "." has no name
    if not folder.exists() and _set_aside(folder).is_dir():
        with contextlib.suppress(OSError):  # another process was faster; or it is not ours to mend
            _set_aside(folder).rename(folder)


def _sweep(folder: Path) -> None:
    """Deletes what killed processes left unfinished beside a folder; not what another one may be writing just now."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
        with contextlib.suppress(OSError):  # another process was faster
            if time.time() - max(path.stat().st_mtime for path in (left, *left.rglob("*"))) > STALE:
                shutil.rmtree(left)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.jaxspec-old")


def _exchange(a: Path, b: Path) -> bool:
    """Has two folders change places, in one step; whether that could be done."""
    if os.name != "posix":
        return False
    libc, (first, second), swap = ctypes.CDLL(None), map(os.fsencode, (a, b)), 2
    if hasattr(libc, "renameat2"):  # Linux; -100 is the working directory
        return libc.renameat2(-100, first, -100, second, swap) == 0
    return hasattr(libc, "renamex_np") and libc.renamex_np(first, second, swap) == 0  # macOS


def occupied(folder: Path, kind: str, overwrite: bool, marker: str = MANIFEST) -> str:
    """Why nothing may be written to a folder; empty if it may.

    Args:
        folder: where to write.
        kind: what would be written.
        overwrite: whether one of that kind may be replaced.
        marker: a file that only folders of that kind have.
    """
    recover(folder)
    if not folder.exists():
        return ""
    if not overwrite:
        return f"{folder} exists: pass overwrite=True to replace it, or choose another name"
    if not (folder / marker).is_file():
        return f"{folder} is no {kind} (it has no {marker}): it will not be overwritten"
    return ""


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """[size in bytes, SHA-256] of every file, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): [path.stat().st_size, _sha256(path)] for path in files}


def ill_formed(files: dict[str, Any]) -> str:
    """What is wrong with a manifest's fingerprints themselves; empty if nothing."""
    for file, entry in files.items():
        if not (isinstance(entry, list) and [type(item) for item in entry] == [int, str]):
            return f"[files] {file} must be [size, sha256], got {entry!r}"
    return ""


def damage(folder: Path, files: dict[str, list[Any]]) -> str:
    """Which files are not as their fingerprints say; empty if all are."""
    complaints = []
    for file, (size, digest) in files.items():
        path = folder / file
        if not path.is_file():
            complaints.append(f"{file} is missing")
        elif (got := path.stat().st_size) != size:
            complaints.append(f"{file} has {got} bytes, expected {size}")
        elif (got := _sha256(path)) != digest:
            complaints.append(f"{file} is altered (SHA-256 {got[:12]}..., expected {digest[:12]}...)")
    return some(complaints)


def some(names: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def to_toml(table: dict[str, Any]) -> str:
    """A table of plain values, and of tables of plain values, as TOML.

    Raises:
        ValueError: another kind of value.

    >>> table = {"name": 'a "b"', "model": {"dim": 4, "rates": [0.5, 1e-05], "tied head": True}}
    >>> print(to_toml(table), end="")
    name = "a \\"b\\""
    <BLANKLINE>
    [model]
    dim = 4
    rates = [0.5, 1e-05]
    "tied head" = true
    """
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(value, key)}" for key, value in plain.items()]
    for name, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(key)} = {_value(value, f'{name}.{key}')}" for key, value in inner.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quoted(key)


def _value(value: Any, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):  # float.__repr__: a NumPy float64 is one too, but prints its type
        return float.__repr__(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, where) for item in value)}]"
    raise ValueError(f"{where} is {value!r}: a manifest holds strings, ints, floats, booleans and lists of these")


def _quoted(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which only TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
