"""T5 checkpoints of T5X: T5 1.0, v1.1, FLAN-T5, mT5 and ByT5 as they were published first.

A checkpoint holds arrays and nothing else: what the network is, is read off their names and shapes. Those do not say
which activation is between two matrices (GELU is assumed where it is gated, as in v1.1, and ReLU where not, as in 1.0),
how far the relative biases reach (128), or what the decoder begins with (0). A config.json of transformers' in the
checkpoint's folder, or in that of its run, goes before all this. Beside it may lie a tokenizer, as transformers has it.

Nor can a LongT5 with local attention be told from a T5. Relative biases are read where the layers of a side share
them, or have equal ones (`jaxspec.weights.t5x_names`).
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec import nets
from jaxspec.core import Params
from jaxspec.nets import axes_of, t5
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import huggingface, parameters, quantisation, t5x_arrays, tokenizers
from jaxspec.weights.parameters import Shape
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.t5x_arrays import STEP, Stored, find, is_folder
from jaxspec.weights.t5x_names import Layout, entries, infer
from jaxspec.weights.tensors import CheckpointError

__all__ = ["FORMAT", "find", "is_folder", "name_of", "read_config", "restore", "stored_dtype", "tokenizer"]


def restore(folder: str | Path, dtype: str = "float32", mesh: Mesh | None = None) -> tuple[Params, T5Config]:
    """Reads the parameters of a T5X checkpoint.

    Args:
        folder: a checkpoint, or the folder of a run: of that, the newest complete one is taken.
        dtype: of the matrices, "float32", "bfloat16", "int8" or "int4"; other leaves are float32.
        mesh: what to place the parameters on, as `jaxspec.sharding` says; None for the default device.

    Returns:
        The parameters and the network's configuration.

    Raises:
        CheckpointError: it is unfinished or damaged, or its arrays are not those of a T5; the message lists what is
            missing, unexpected, and of another shape. No weights are read before that is known.
    """
    checkpoint = find(Path(folder))
    arrays = t5x_arrays.arrays(checkpoint)
    config, layout, said_by = _config(checkpoint, arrays)
    config = dataclasses.replace(config, dtype=quantisation.computation(dtype))
    expected = entries(config, layout)
    want, have = ({name: x.shape for name, x in named.items()} for named in (expected, arrays))
    if complaint := parameters.differences(want, have):
        raise CheckpointError(f"{checkpoint}: the arrays are not those of the T5 of {said_by}:{complaint}")
    shapes = parameters.shapes(config)
    params: dict[str, jax.Array] = {}
    biases: dict[str, np.ndarray] = {}
    for name, entry in expected.items():
        x = arrays[name].read()
        for i, path in enumerate(entry.paths):
            part = _ours(path, x[:, i] if entry.stacked else x, shapes[path])
            if path.endswith("table") and not np.array_equal(biases.setdefault(path, part), part):
                raise CheckpointError(
                    f"{checkpoint}: {name} differs from layer to layer, as in umT5. Expected a T5, v1.1, FLAN-T5, mT5 "
                    "or ByT5, whose layers share their relative biases"
                )
            if path not in params:
                params[path] = parameters.place(path, part, axes_of(config), mesh, dtype)
    return parameters.nested(params), config


def read_config(folder: str | Path) -> T5Config:
    """Reads the network of a checkpoint, or of a run's newest, and no weights.

    Raises:
        CheckpointError: as `restore`, of what can be seen without reading weights.
    """
    checkpoint = find(Path(folder))
    config, _, _ = _config(checkpoint, t5x_arrays.arrays(checkpoint))
    return config


def _ours(path: str, x: np.ndarray, shape: Shape) -> np.ndarray:
    """Transposes T5X's kernels, which are [in, out], and its biases, which are [heads, buckets]."""
    return x.reshape(shape[::-1]).T if path.endswith(("weight", "table")) else x


def _config(checkpoint: Path, arrays: dict[str, Stored]) -> tuple[T5Config, Layout, str]:
    """Returns the network, how it is laid out, and what says so."""
    inferred, layout = infer(checkpoint, arrays)
    for place in _places(checkpoint):
        if huggingface.is_folder(place):
            _, config = huggingface.read_config(place)
            if nets.find(config) != t5.NETWORK:
                raise CheckpointError(
                    f"{place / huggingface.CONFIG} is not a T5's, but beside a T5X checkpoint: remove it, or put the "
                    "right one there"
                )
            return _with_head_of(inferred, config), layout, str(place / huggingface.CONFIG)
    return inferred, layout, "their names and shapes"


def _with_head_of(held: T5Config, config: T5Config) -> T5Config:
    """Takes all from config.json but the head: transformers 5 calls each tied, and T5X scales those that are."""
    tied = config.tied_head and held.tied_head
    return dataclasses.replace(config, tied_head=tied, scaled_head=tied)


def name_of(folder: Path) -> str:
    """Names the model "run/checkpoint_N", since the step alone says little.

    Raises:
        CheckpointError: as `find`.
    """
    checkpoint = find(folder).resolve()
    return f"{checkpoint.parent.name}/{checkpoint.name}" if STEP.fullmatch(checkpoint.name) else checkpoint.name


def stored_dtype(folder: Path) -> str:
    """Returns the dtype of most of a checkpoint's numbers; reads no weights.

    Raises:
        CheckpointError: as `restore`, of what can be seen without reading weights.
    """
    sizes: dict[str, int] = {}
    for x in t5x_arrays.arrays(find(folder)).values():
        sizes[x.dtype] = sizes.get(x.dtype, 0) + math.prod(x.shape)
    return max(sizes, key=sizes.__getitem__)


def tokenizer(folder: str | Path) -> Any:
    """Loads the tokenizer that lies in a checkpoint's folder, or in that of its run; None if there is none.

    Raises:
        CheckpointError: there is one, but it cannot be loaded.
    """
    for place in _places(find(Path(folder))):
        if (words := tokenizers.load(place)) is not None:
            return words
    return None


def _places(checkpoint: Path) -> list[Path]:
    """Lists the folders in which what is not T5X's own may lie."""
    checkpoint = checkpoint.resolve()
    return [checkpoint, checkpoint.parent] if STEP.fullmatch(checkpoint.name) else [checkpoint]


def open_model(folder: Path) -> Reader:
    """Opens a checkpoint, or a run's newest, which is found once: the run may add a newer one at any time."""
    checkpoint = find(folder)
    return Reader(
        checkpoint,
        name_of(checkpoint),
        config=lambda: read_config(checkpoint),
        tokenizer=lambda: tokenizer(checkpoint),
        params=lambda dtype, mesh: restore(checkpoint, dtype, mesh),
        stored_dtype=lambda: stored_dtype(checkpoint),
        tokenizer_place="in it, or in its run's folder",
    )


FORMAT = ModelFormat("t5x", is_folder, open_model)
"""A T5X checkpoint: how it is recognised and opened."""
