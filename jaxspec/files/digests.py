"""SHA-256 of files and of arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def of_file(path: Path) -> str:
    """Returns the digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_files(path: Path) -> dict[str, str]:
    """Returns the SHA-256 of a file, or of each file of a folder by its name, except hidden files.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("weights", ".lock"):
    ...     _ = (folder / name).write_text(name)
    >>> of_files(folder).keys() == {"weights"} and of_files(folder) == of_files(folder / "weights")
    True
    """
    if path.is_file():
        return {path.name: of_file(path)}
    names = {file.relative_to(path): file for file in sorted(path.rglob("*")) if file.is_file()}
    visible = {
        name: file
        for name, file in names.items()
        if not any(component.startswith(".") for component in name.parts)
    }
    return {name.as_posix(): of_file(file) for name, file in visible.items()}


def of_arrays(arrays: Iterable[Any]) -> str:
    """Returns the digest of the bytes of arrays, fetched to the host one at a time.

    >>> of_arrays([np.zeros(2), np.ones(3)]) == of_arrays([np.array([0.0, 0.0, 1.0, 1.0, 1.0])])
    True
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
