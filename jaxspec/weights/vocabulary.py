"""What the tokens of a model are, without its weights: all that tables and datastores need to know of a target."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxspec.weights.loading as models
from jaxspec.core import token_ids
from jaxspec.weights import gguf, gguf_tokenizer, huggingface, orbax, t5x
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
    """Loads the vocabulary of a model: of a checkpoint of jaxspec's or of T5X's, a Hugging Face folder, or a hub id.

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
    form = models.format_of(folder)
    if form == models.OURS:
        config, tokenizer = orbax.read_manifest(folder).model, models.tokenizer_of(folder)
    elif form == models.T5X:
        folder = t5x.find(folder)
        config, tokenizer = t5x.read_config(folder), t5x.tokenizer(folder)
    elif form == models.GGUF:
        header = gguf.read(folder)
        _, config, _ = gguf.open_file(folder, header)
        tokenizer = gguf_tokenizer.tokenizer(folder, header.metadata)
    else:
        _, config = huggingface.read_config(folder)
        tokenizer = huggingface.tokenizer(folder)
    if tokenizer is None:
        expected = ", ".join(huggingface.TOKENIZER_FILES)
        where = "in it, or in its run's folder" if form == models.T5X else "in it"
        raise CheckpointError(f"{folder} has no tokenizer: expected one of {expected} {where}")
    if (ids := token_ids.size(tokenizer)) > config.vocab_size:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {ids - 1}, but the model only up to {config.vocab_size - 1}"
        )
    return Vocabulary(folder, tokenizer, config.vocab_size, getattr(config, "start_token", None))


@contextlib.contextmanager
def tokenizer_folder(vocabulary: Vocabulary) -> Iterator[Path]:
    """Yields a folder with the tokenizer as `weights.orbax.save` copies it: a checkpoint's own, or a temporary one."""
    if models.format_of(vocabulary.folder) == models.OURS:
        yield vocabulary.folder
        return
    with written(vocabulary.tokenizer) as words:
        yield words


@contextlib.contextmanager
def written(tokenizer: Any) -> Iterator[Path]:
    """Yields a folder with a tokenizer's files, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as words:
        tokenizer.save_pretrained(words, save_jinja_files=False)  # a chat template goes into the other file
        yield Path(words)
