"""A format of model files as one entry of a table, and a model's files, opened, as functions that read their parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxspec.core import Params


class Reader(NamedTuple):
    """A model's files, opened; what a function raises for damaged files is a CheckpointError.

    Attributes:
        path: the folder or file that is read.
        name: of the model.
        config: () -> the network's configuration; reads no weights.
        tokenizer: () -> the tokenizer, as one of transformers'; None if there is none.
        params: (dtype of matrices, mesh or None) -> the parameters, and the configuration, whose dtype is that of the
            computation.
        stored_dtype: () -> the dtype of the matrices in the files; "float32" where it is none that jaxspec writes.
        draft_tokens: () -> the ids that a drafter's head is to be trimmed to; None: to none.
        tokenizer_place: where a tokenizer is looked for, in words.
    """

    path: Path
    name: str
    config: Callable[[], Any]
    tokenizer: Callable[[], Any]
    params: Callable[[str, Mesh | None], tuple[Params, Any]]
    stored_dtype: Callable[[], str]
    draft_tokens: Callable[[], list[int] | None] = lambda: None
    tokenizer_place: str = "in it"


class ModelFormat(NamedTuple):
    """A format that models come in: an entry of `jaxspec.weights.loading.FORMATS`, made by one file.

    Attributes:
        name: "jaxspec", "huggingface", "t5x" or "gguf".
        matches: path -> whether a folder or file is of this format, damaged or not.
        open: such a path -> its reader. Raises CheckpointError.
    """

    name: str
    matches: Callable[[Path], bool]
    open: Callable[[Path], Reader]
