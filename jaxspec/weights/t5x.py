"""T5 checkpoints of T5X: T5 1.0, v1.1, FLAN-T5, mT5 and ByT5 as they were published first.

A checkpoint holds arrays and nothing else: their names and shapes say which network it is. They do
not say these three:

    the activation between two matrices     assumed GELU where it is gated, as in v1.1, and ReLU where not, as in 1.0
    the reach of the relative biases        assumed 128
    the token that the decoder begins with  assumed 0

A config.json of transformers in the checkpoint's folder or its parent takes precedence. Beside it
may lie a tokenizer, as transformers has it. A LongT5 with local attention looks like a T5. Relative
biases are read where the layers of a side share them, or have equal ones
(`jaxspec.weights.t5x_names`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import nets
from jaxspec.nets import t5
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import huggingface, t5x_arrays, t5x_names, tokenizers
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.t5x_arrays import STEP, find, is_folder
from jaxspec.weights.tensors import CheckpointError, Shard, Stored
from jaxspec.weights.tensorstore_arrays import most_common_dtype

__all__ = ["FORMAT", "find", "is_folder", "open_model"]


def open_model(folder: Path) -> Reader:
    """Opens a checkpoint, or a run's newest, which is found once: the run may add a newer one at
    any time.
    """
    checkpoint = find(folder)
    resolved = checkpoint.resolve()
    is_step = STEP.fullmatch(resolved.name) is not None  # in the folder of a run
    if is_step:
        places = [resolved, resolved.parent]
    else:
        places = [resolved]

    def params(dtype: str, mesh: Any) -> Any:
        arrays = t5x_arrays.arrays(checkpoint)
        config, described = _config(checkpoint, places, arrays)
        family = t5x_names.family(config)
        return huggingface.assemble(
            checkpoint, family, config, [_shard(checkpoint, arrays)], dtype, mesh, described
        )

    return Reader(
        checkpoint,
        # the step alone says little
        f"{resolved.parent.name}/{resolved.name}" if is_step else resolved.name,
        config=lambda: _config(checkpoint, places, t5x_arrays.arrays(checkpoint))[0],
        tokenizer=lambda: next(
            (words for candidate in places if (words := tokenizers.load(candidate)) is not None),
            None,
        ),
        params=params,
        stored_dtype=lambda: most_common_dtype(t5x_arrays.arrays(checkpoint)),
        tokenizer_place="in it, or in its run's folder",
    )


def _shard(checkpoint: Path, arrays: dict[str, Stored]) -> Shard:
    """Presents arrays with the names and shapes of T5X's examples/t5, whichever of its networks
    they are of.
    """
    names = {name: t5x_names.unstacked(name, x.shape) for name, x in arrays.items()}
    shapes = {layer_name: shape for parts, shape in names.values() for layer_name in parts}

    def load(only: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name, (parts, shape) in names.items():
            if not any(layer_name in only for layer_name in parts):
                continue
            x = np.asarray(arrays[name])
            # [in, layers, ...] -> [layers, in, ...], so that every layer's part is one of the first
            # axis.
            x = x[None] if parts == [name] else np.moveaxis(x, 1, 0)
            for layer_name, layer in zip(parts, x, strict=True):
                if layer_name in only:
                    yield layer_name, layer.reshape(shape)
            del x, layer

    return Shard(checkpoint, shapes, load)


def _config(
    checkpoint: Path, places: list[Path], arrays: dict[str, Stored]
) -> tuple[T5Config, str]:
    # Shapes say what a config.json beside may get wrong, too: whether there is a head.
    inferred = t5x_names.infer(checkpoint, {name: x.shape for name, x in arrays.items()})
    file = next(
        (
            candidate / huggingface.CONFIG
            for candidate in places
            if huggingface.is_folder(candidate)
        ),
        None,
    )
    if file is None:
        return inferred, "names and shapes"
    _, config = huggingface.read_config(file.parent)
    if nets.find(config) != t5.NETWORK:
        raise CheckpointError(
            f"{file} is not a T5's, but beside a T5X checkpoint: remove it, or put its own there"
        )
    # All but the head is taken from it: transformers 5 calls each tied, and T5X scales those that
    # are.
    tied = config.tied_head and inferred.tied_head
    return dataclasses.replace(config, tied_head=tied, scaled_head=tied), str(file)


FORMAT = ModelFormat("t5x", is_folder, open_model)
"""A T5X checkpoint: how it is recognised and opened."""
