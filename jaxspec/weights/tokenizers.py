"""Tokenizers that lie in folders as transformers writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxspec import optional_imports
from jaxspec.core import token_ids
from jaxspec.weights.hf_families.common import FamilyError, read_object
from jaxspec.weights.tensors import CheckpointError

FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "tokenizer_config.json")


def load(folder: str | Path) -> Any:
    """Loads the tokenizer of a folder, by transformers' AutoTokenizer, chat template included; None
    if it has none.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in FILES):
        return None
    optional_imports.import_transformers()
    from transformers import AutoTokenizer

    return read(AutoTokenizer, folder, trust_remote_code=False)


def read(kind: Any, folder: Path, **options: Any) -> Any:
    """Loads a tokenizer with transformers' classes."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # transformers raises anything
        why = _damage(folder) or f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {why}") from error


def check_size(where: Path, tokenizer: Any, size: int) -> None:
    """Raises CheckpointError for a tokenizer with ids that its model lacks."""
    ids = token_ids.size(tokenizer)
    if ids > size:
        complaint = f"the tokenizer has ids up to {ids - 1}, but the model only up to {size - 1}"
        raise CheckpointError(
            f"{where}: {complaint}: put the tokenizer there that the model was trained with"
        )


def with_template(tokenizer: Any, template: str | Path, name: str) -> Any:
    """Gives a tokenizer another chat template.

    Args:
        tokenizer: transformers' tokenizer; None for models without one.
        template: the text of a Jinja template, or the path of a file with it. A .json file, such as
            transformers' chat_template.json, has it under "chat_template".
        name: the model's, for errors.
    """
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer, so it cannot have a chat template either")
    if not isinstance(template, str | os.PathLike):
        raise TypeError(
            f"chat_template is of type {type(template).__name__}: expected a path, or a template's "
            "text"
        )
    # No template is without a brace, and few paths have one.
    if isinstance(template, os.PathLike) or "{" not in template:
        template = _template_of(Path(template).expanduser())
    from jinja2 import TemplateSyntaxError

    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is wrong in line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # a template may refuse this conversation, and take others
        pass
    return tokenizer


def _template_of(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            text = read_object(file).get("chat_template")
    except (OSError, ValueError) as error:
        expected = "expected the path of a Jinja template, or its text"
        raise ValueError(
            f"chat_template is {str(file)!r}, which cannot be read ({error}): {expected}"
        ) from error
    if not isinstance(text, str):
        raise ValueError(
            f"{file} has no text under 'chat_template': expected a Jinja template there"
        )
    return text


def _damage(folder: Path) -> str | None:
    for path in [
        folder / name for name in FILES if name.endswith(".json") and (folder / name).is_file()
    ]:
        try:
            table = read_object(path)
        except (FamilyError, ValueError) as error:
            return f"{path.name} is damaged, {error}; copy or download it again"
        if path.name == "tokenizer.json" and not {"model", "added_tokens"} <= table.keys():
            return f"{path.name} lacks its model or its added_tokens; copy or download it again"
    return None
