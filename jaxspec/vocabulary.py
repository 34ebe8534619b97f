"""What the tokens of a model are, without its weights: all that tables and datastores need to know of a target."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxspec.model as models
from jaxspec.weights import huggingface, orbax
from jaxspec.weights.orbax import CheckpointError


class Vocabulary(NamedTuple):
    """What a model reads and writes.

    Attributes:
        folder: the model's.
        tokenizer: a Hugging Face tokenizer.
        size: number of ids: the width of the logits, those that only pad it included.
        start_token: what the rows of an encoder-decoder begin with; None for a decoder-only model.
    """

    folder: Path
    tokenizer: Any
    size: int
    start_token: int | None


def load(source: str | Path) -> Vocabulary:
    """The vocabulary of a model: of a checkpoint of jaxspec's, a Hugging Face folder, or a hub id.

    Args:
        source: as `jaxspec.load` takes it. A model of the hub is downloaded whole. A Hugging Face folder may lack its
            weights.

    Raises:
        CheckpointError: there is no such model, or it has no tokenizer that can be used.

    Example:
        >>> found = load("debian-t5-base")
        >>> found.size, len(found.tokenizer), found.start_token
        (8192, 8192, 0)
    """
    folder = models.find(source)
    if _is_ours(folder):
        config, tokenizer = orbax.read_manifest(folder).model, models.tokenizer_of(folder)
    else:
        _, config = huggingface.read_config(folder)
        tokenizer = huggingface.tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(
            f"{folder} has no tokenizer: expected one of {', '.join(huggingface.TOKENIZER_FILES)} beside its "
            f"{huggingface.CONFIG}"
        )
    if len(tokenizer) > config.vocab_size:
        raise CheckpointError(f"{folder}: the tokenizer has {len(tokenizer)} ids, the model only {config.vocab_size}")
    return Vocabulary(folder, tokenizer, config.vocab_size, getattr(config, "start_token", None))


@contextlib.contextmanager
def tokenizer_folder(vocabulary: Vocabulary) -> Iterator[Path]:
    """A folder with the tokenizer as `weights.orbax.save` copies it: a checkpoint's own, or one made for the moment."""
    if _is_ours(vocabulary.folder):
        yield vocabulary.folder
        return
    with tempfile.TemporaryDirectory() as words:
        vocabulary.tokenizer.save_pretrained(words, save_jinja_files=False)
        yield Path(words)


def _is_ours(folder: Path) -> bool:
    """Whether a folder is to be read as a checkpoint of jaxspec's; so is one that is of neither kind, for the error."""
    return (folder / orbax.MANIFEST).is_file() or not huggingface.is_folder(folder)
