"""Folders of files and a manifest.toml, written whole or not at all, and refused when damaged.

Checkpoints and datastores are such folders. The manifest holds size and SHA-256 of every other
file.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tomli_w
from rich import filesize

from jaxspec.files import digests

try:
    import fcntl
except ImportError:
    fcntl = None

MANIFEST = "manifest.toml"
LOCK = ".lock"
FULL = (errno.ENOSPC, errno.EDQUOT)
# seconds after which an unlocked leftover belongs to a killed process, on file systems without
# locks
STALE = 24 * 3600
YOUNG = 1.0  # seconds that a process may take from making a folder to locking it
REPLACING = "give overwrite to replace it"  # the advice; commands replace it with their option
LISTED = 8  # most complaints to print


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Yields a new folder, which becomes `folder` when the block ends; a failure leaves the old.

    The next process that writes the same folder deletes the leftovers of a killed one.

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
    with (
        unfinished(folder, "partial", Path.mkdir) as beside,
        full_disk(folder, "nothing was written"),
    ):
        yield beside
        put_in_place(beside, folder)


@contextlib.contextmanager
def unfinished(path: Path, ending: str, create: Callable[[Path], None]) -> Iterator[Path]:
    """Yields a new, locked file or folder beside a path; deletes it unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path, ending)
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.{ending}")
    try:
        create(beside)
        with in_use(beside):
            yield beside
    finally:
        _delete(beside)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def full_disk(path: Path, outcome: str) -> Iterator[None]:
    """Turns the error of a full disk into one that names the path and the outcome.

    >>> with full_disk(Path("model"), "nothing was written"):
    ...     raise ValueError("RESOURCE_EXHAUSTED: ... No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] the disk is full, and nothing was written: 'model'
    """
    try:
        yield
    except Exception as error:
        # libraries raise other types
        if getattr(error, "errno", None) in FULL or "No space left" in str(error):
            raise OSError(errno.ENOSPC, f"the disk is full, and {outcome}", str(path)) from error
        raise


@contextlib.contextmanager
def locked(folder: Path, program: str, lock: str = LOCK) -> Iterator[None]:
    """Locks a folder for this process; the operating system unlocks it when the process ends.

    Args:
        folder: the folder, which is created if missing.
        program: the name of the program that uses the folder, for the message.
        lock: the name of the lock's file, which stays. Locks with different names are independent.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / lock
    file.touch()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(in_use(file, wait=False))
        except BlockingIOError:
            process = file.read_text().strip() or "unknown"
            raise OSError(
                errno.EBUSY, f"{program} is using this folder (process {process})", str(folder)
            ) from None
        file.write_text(str(os.getpid()))
        yield


def no_room(folder: Path, needed: int) -> str:
    """Returns a message if a folder's disk lacks the needed bytes, else "".

    >>> no_room(Path("/"), 1), no_room(Path("/"), 2**70).split(" of")[0]
    ('', '/ would take 1.2 ZB')
    """
    candidates = (folder.absolute(), *folder.absolute().parents)
    existing = next(path for path in candidates if path.exists())
    free = shutil.disk_usage(existing).free
    if needed <= free:
        return ""
    return (
        f"{folder} would take {filesize.decimal(needed)} of disk, and {existing} has "
        f"{filesize.decimal(free)} left"
    )


def flush(path: Path) -> None:
    """Flushes a file, or the names in a folder, to disk, so that a loss of power keeps them."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not every file system can
            raise
    finally:
        os.close(descriptor)


def put_in_place(new: Path, folder: Path) -> None:
    """Renames a folder, replacing an existing one, so that `recover` works after a kill.

    The new folder is flushed to disk before the old one is deleted. Between the two renames no
    folder is in place: the old one waits beside it, and a reader at that moment puts it back.
    """
    for path in (*new.rglob("*"), new):
        flush(path)
    recover(folder)
    old = _set_aside(folder)
    # a leftover: a process was killed after it had put the new folder in place
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        recover(folder)
        raise
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Puts back a folder that a killed `put_in_place` set aside. Deletes nothing, since readers
    call it, too.
    """
    folder = folder.resolve()  # as in writing; and "." has no name
    if not folder.exists() and _set_aside(folder).is_dir():
        with contextlib.suppress(OSError):  # another process did it, or this one may not
            _set_aside(folder).rename(folder)


def sweep(path: Path, ending: str) -> None:
    """Deletes the leftovers of killed processes beside a path, but nothing that may be in use."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.{ending}"):
        # An OSError means that it is in use, or already gone.
        with contextlib.suppress(OSError), in_use(stale, wait=False) as is_locked:
            age = time.time() - max(inner.stat().st_mtime for inner in (stale, *stale.rglob("*")))
            if age > (YOUNG if is_locked else STALE):
                _delete(stale)


@contextlib.contextmanager
def in_use(path: Path, wait: bool = True) -> Iterator[bool]:
    """Locks a folder or a file for this process, at most until the process ends.

    Yields whether it is locked, since not every file system can. If another process holds the lock,
    this waits, or raises BlockingIOError.
    """
    if fcntl is None:  # Windows has no such locks
        yield False
        return
    descriptor = os.open(path, os.O_RDONLY)
    is_locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a network file system without locks
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.jaxspec-old")


def occupied(folder: Path, kind: str, overwrite: bool, marker: str = MANIFEST) -> str:
    """Returns a message if a folder may not be written, else "". `marker` is a file of its kind."""
    recover(folder)
    if not folder.exists():
        return ""
    if not overwrite:
        return f"{folder} exists: {REPLACING}, or choose another name"
    if not (folder / marker).is_file():
        return f"{folder} is not a {kind} (it has no {marker}): it will not be overwritten"
    return ""


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """Returns [size in bytes, SHA-256] of every file, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, digests.of_file(path)]
        for path in files
    }


def ill_formed(files: dict[str, Any]) -> str:
    """Returns a message about malformed fingerprints in a manifest; "" if they are well-formed."""
    for file, entry in files.items():
        if not isinstance(entry, list) or [type(item) for item in entry] != [int, str]:
            return f"[files] {file} must be [size, sha256], got {entry!r}"
    return ""


def damage(folder: Path, files: dict[str, list[Any]]) -> str:
    """Returns a message about files that differ from their fingerprints; "" if none do."""
    complaints = []
    for file, (size, digest) in files.items():
        path = folder / file
        if not path.is_file():
            complaints.append(f"{file} is missing")
            continue
        stored_size = path.stat().st_size
        if stored_size != size:
            complaints.append(f"{file} has {stored_size} bytes, expected {size}")
            continue
        stored_digest = digests.of_file(path)
        if stored_digest != digest:
            complaints.append(
                f"{file} is altered (SHA-256 {stored_digest[:12]}..., expected {digest[:12]}...)"
            )
    return some(complaints)


def some(names: list[str]) -> str:
    """Lists the first few names, and the number of the others."""
    listed = ", ".join(names[:LISTED])
    if len(names) > LISTED:
        listed += f" and {len(names) - LISTED} more"
    return listed


def to_toml(table: dict[str, Any]) -> str:
    """Writes a manifest as TOML.

    >>> print(to_toml({"name": 'a "b"', "model": {"dim": 4, "tied head": True}}), end="")
    name = "a \\"b\\""
    <BLANKLINE>
    [model]
    dim = 4
    "tied head" = true
    """
    try:
        return tomli_w.dumps(table)
    except TypeError as error:
        raise ValueError(
            f"a manifest holds strings, numbers, booleans, lists and tables of these: {error}"
        ) from None
