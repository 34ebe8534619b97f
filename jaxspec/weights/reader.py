"""A format of model files as one entry of a table, and a model's files, opened, as functions that
read their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxspec.core import Params


class Reader(NamedTuple):
    """A model's files, opened. For damaged files its functions raise CheckpointError."""

    path: Path  # the folder or file that is read
    name: str  # the model's
    config: Callable[[], Any]  # the network's configuration; reads no weights
    tokenizer: Callable[[], Any]  # one of transformers'; None if there is none
    # dtype of matrices, mesh or None -> the parameters, and the configuration, whose dtype is that
    # of the computation
    params: Callable[[str, Mesh | None], tuple[Params, Any]]
    # dtype of the matrices in the files; "float32" where jaxspec writes no such dtype
    stored_dtype: Callable[[], str]
    # ids to which a head is trimmed; None: it is not
    draft_tokens: Callable[[], list[int] | None] = lambda: None
    # the tables that the configuration was read from (`jaxspec.weights.source`); None: none
    source: Callable[[], Mapping[str, Mapping[str, Any]] | None] = lambda: None
    tokenizer_place: str = "in it"  # where a tokenizer is looked for, in words


class ModelFormat(NamedTuple):
    """A format that models come in: an entry of `jaxspec.weights.loading.FORMATS`, made by one
    file.
    """

    name: str  # "jaxspec", "huggingface", "t5x", "gemma" or "gguf"
    # path -> whether a folder or file is of this format, damaged or not
    matches: Callable[[Path], bool]
    open: Callable[[Path], Reader]  # raises CheckpointError
