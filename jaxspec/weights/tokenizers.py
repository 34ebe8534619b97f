"""Tokenizers that lie in folders as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxspec import optional_imports
from jaxspec.weights.hf_families.common import FamilyError, read_object
from jaxspec.weights.tensors import CheckpointError

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "tokenizer_config.json")


def load(folder: str | Path) -> Any:
    """Loads the tokenizer of a folder, by transformers' AutoTokenizer, chat template included; None if it has none.

    Raises:
        CheckpointError: there is one, but it cannot be loaded. One that brings its own code is never run.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in FILES):
        return None
    optional_imports.import_transformers()
    from transformers import AutoTokenizer

    return read(AutoTokenizer, folder, trust_remote_code=False)


def read(kind: Any, folder: Path, **options: Any) -> Any:
    """Loads a tokenizer of one of transformers' classes.

    Raises:
        CheckpointError: it cannot be loaded; the message names a file that is no JSON.
    """
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # transformers raises anything
        why = _damage(folder) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {why}") from error


def _damage(folder: Path) -> str | None:
    """Says what is wrong with the JSON of a tokenizer, if that is it."""
    for path in [folder / name for name in FILES if name.endswith(".json") and (folder / name).is_file()]:
        try:
            table = read_object(path)
        except (FamilyError, ValueError) as error:
            return f"{path.name} is damaged, {error}; copy or download it again"
        if path.name == "tokenizer.json" and not {"model", "added_tokens"} <= table.keys():
            return f"{path.name} lacks its model or its added_tokens; copy or download it again"
    return None
