"""The tokens of a model, without its weights: all that tables and datastores need to know of a
target.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxspec.weights.loading as models
from jaxspec.nets import net_of
from jaxspec.weights import orbax, tokenizers
from jaxspec.weights.tensors import CheckpointError


class Vocabulary(NamedTuple):
    """The tokens that a model reads and writes."""

    folder: Path  # the model's
    tokenizer: Any  # a Hugging Face tokenizer
    size: int  # number of ids: the width of the logits, those that only pad it included
    # the tokens that rows of an encoder-decoder begin with; none for a decoder-only model
    begin: tuple[int, ...]

    @property
    def has_encoder(self) -> bool:
        """Tells whether the model is an encoder-decoder."""
        return bool(self.begin)


def load(source: str | Path) -> Vocabulary:
    """Loads the vocabulary of a jaxspec or T5X checkpoint, a Hugging Face folder, or a hub id.

    Args:
        source: a path, a name or a hub id, for `jaxspec.load`. A model of the hub is downloaded
            whole. A Hugging Face folder may lack its weights.

    Raises:
        CheckpointError: the model or a usable tokenizer is missing.

    Example:
        >>> vocabulary = load("debian-t5-base")
        >>> vocabulary.size, len(vocabulary.tokenizer), vocabulary.begin
        (8192, 8192, (0,))
    """
    # Weights are not read: a table of n-grams needs the ids alone.
    path = models.find(source)
    reader = models.format_of(path).open(path)
    config = reader.config()
    tokenizer = reader.tokenizer()
    if tokenizer is None:
        expected = ", ".join(tokenizers.FILES)
        raise CheckpointError(
            f"{reader.path} has no tokenizer: expected one of {expected} {reader.tokenizer_place}"
        )
    tokenizers.check_size(reader.path, tokenizer, config.vocab_size)
    limits = net_of(config).language_model(config).limits
    return Vocabulary(reader.path, tokenizer, config.vocab_size, limits.first_tokens)


@contextlib.contextmanager
def tokenizer_folder(vocabulary: Vocabulary) -> Iterator[Path]:
    """Yields a folder with the tokenizer as `weights.orbax.save` copies it: a checkpoint's own, or
    a temporary one.
    """
    if orbax.is_folder(vocabulary.folder):
        yield vocabulary.folder
        return
    with written(vocabulary.tokenizer) as words:
        yield words


@contextlib.contextmanager
def written(tokenizer: Any) -> Iterator[Path]:
    """Yields a folder with a tokenizer's files, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as words:
        # a chat template goes into the other file
        tokenizer.save_pretrained(words, save_jinja_files=False)
        yield Path(words)
