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
# seconds after which an unfinished folder is a killed process's, where none can be locked
STALE = 24 * 3600
YOUNG = 1.0  # seconds: between making a folder and locking it
REPLACING = "give overwrite to replace it"  # the advice; a command gives its own option instead
LISTED = 8  # of many similar complaints, as many are printed


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Yields a new folder to write into, which becomes `folder` when the block ends; a failure
    leaves what was there.

    What a killed process left unfinished is deleted by the next one that writes the same folder.

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
    """Yields a new file or folder beside a path, which is locked, and deleted in the end where it
    still is there.
    """
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
    """Has the error of a disk that is full name what was written, and say what became of it.

    >>> with full_disk(Path("model"), "nothing was written"):
    ...     raise ValueError("RESOURCE_EXHAUSTED: ... No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] the disk is full, and nothing was written: 'model'
    """
    try:
        yield
    except Exception as error:
        # libraries have their own errors
        if getattr(error, "errno", None) in FULL or "No space left" in str(error):
            raise OSError(errno.ENOSPC, f"the disk is full, and {outcome}", str(path)) from error
        raise


@contextlib.contextmanager
def locked(folder: Path, program: str, lock: str = LOCK) -> Iterator[None]:
    """Holds a folder for this process, as the operating system does, which ends that with the
    process.

    Args:
        folder: the folder; it is made if it is not there.
        program: the program that uses the folder, in words.
        lock: the name of the lock's file, which stays. Locks of other names do not disturb each
            other.
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
    """Says why so many bytes cannot be written to a folder; empty if there is room.

    >>> no_room(Path("/"), 1), no_room(Path("/"), 2**70).split(" of")[0]
    ('', '/ would take 1.2 ZB')
    """
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    free = shutil.disk_usage(existing).free
    if needed <= free:
        return ""
    return (
        f"{folder} would take {filesize.decimal(needed)} of disk, and {existing} has "
        f"{filesize.decimal(free)} left"
    )


def flush(path: Path) -> None:
    """Has the disk hold what was written to a file, or the names that a folder has, should the
    power fail.
    """
    if os.name == "nt" and path.is_dir():  # Windows opens none
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
    """Renames a folder, over another one if there is one; after a kill on the way `recover` finds
    the one or the other.

    What is new is on the disk before what was there is deleted. Between two renames nothing is in
    place: what was there waits beside, and a reader that comes then puts it back.
    """
    for path in (*new.rglob("*"), new):
        flush(path)
    recover(folder)
    old = _set_aside(folder)
    # it was replaced, and the one that did it killed before this
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
    """Puts back what a killed `put_in_place` set aside and had not replaced. Deletes nothing:
    readers call it, too.
    """
    folder = folder.resolve()  # as in writing; and "." has no name
    if not folder.exists() and _set_aside(folder).is_dir():
        with contextlib.suppress(OSError):  # another process was faster; or it is not ours to mend
            _set_aside(folder).rename(folder)


def sweep(path: Path, ending: str) -> None:
    """Deletes what killed processes left unfinished beside a path; not what another one may be
    writing just now.
    """
    for stale in path.parent.glob(f".{glob.escape(path.name)}.*.{ending}"):
        # another one's, or gone already
        with contextlib.suppress(OSError), in_use(stale, wait=False) as locked:
            age = time.time() - max(inner.stat().st_mtime for inner in (stale, *stale.rglob("*")))
            if age > (YOUNG if locked else STALE):
                _delete(stale)


@contextlib.contextmanager
def in_use(path: Path, wait: bool = True) -> Iterator[bool]:
    """Locks a folder or a file for this process, as the operating system does, which ends that with
    the process.

    Yields whether it is locked: not every file system can. If another process has locked it, this
    waits, or raises a BlockingIOError.
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
        except OSError:  # of a file system on a network
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


def _set_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.jaxspec-old")


def occupied(folder: Path, kind: str, overwrite: bool, marker: str = MANIFEST) -> str:
    """Says why nothing may be written to a folder; empty if it may: one with the file `marker` is
    of the kind.
    """
    recover(folder)
    if not folder.exists():
        return ""
    if not overwrite:
        return f"{folder} exists: {REPLACING}, or choose another name"
    if not (folder / marker).is_file():
        return f"{folder} is no {kind} (it has no {marker}): it will not be overwritten"
    return ""


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """Returns [size in bytes, SHA-256] of every file, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, digests.of_file(path)]
        for path in files
    }


def ill_formed(files: dict[str, Any]) -> str:
    """Says what is wrong with a manifest's fingerprints themselves; empty if nothing."""
    for file, entry in files.items():
        if not (isinstance(entry, list) and [type(item) for item in entry] == [int, str]):
            return f"[files] {file} must be [size, sha256], got {entry!r}"
    return ""


def damage(folder: Path, files: dict[str, list[Any]]) -> str:
    """Says which files are not as their fingerprints say; empty if all are."""
    complaints = []
    for file, (size, digest) in files.items():
        path = folder / file
        if not path.is_file():
            complaints.append(f"{file} is missing")
        elif (got := path.stat().st_size) != size:
            complaints.append(f"{file} has {got} bytes, expected {size}")
        elif (got := digests.of_file(path)) != digest:
            complaints.append(
                f"{file} is altered (SHA-256 {got[:12]}..., expected {digest[:12]}...)"
            )
    return some(complaints)


def some(names: list[str]) -> str:
    """Lists the first few names, and how many more there are."""
    if len(names) > LISTED:
        more = f" and {len(names) - LISTED} more"
    else:
        more = ""
    return ", ".join(names[:LISTED]) + more


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
