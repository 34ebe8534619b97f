"""Finds the models that come with jaxspec, without importing jax."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel; in a checkout.
FOLDERS = (_PACKAGE / "data" / "checkpoints", _PACKAGE.parent / "checkpoints")


def shipped(marker: str = "manifest.toml") -> dict[str, Path]:
    """Lists the checkpoints that come with jaxspec, by name; with another marker, the folders with
    such a file.

    >>> all((folder / "manifest.toml").is_file() for folder in shipped().values())
    True
    """
    by_name: dict[str, Path] = {}
    for folder in FOLDERS:
        for file in sorted(folder.glob(f"*/{marker}")):
            by_name.setdefault(file.parent.name, file.parent)
    return by_name
