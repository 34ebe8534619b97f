"""The tensors of a Hugging Face folder by name, one at a time, from any of the three formats its weights come in.

    model.safetensors       read tensor by tensor; needs nothing else
    flax_model.msgpack      read whole, file by file; from before transformers 5
    pytorch_model.bin       read tensor by tensor where it is a zip file; needs PyTorch

Large models lie in several files, which `<file>.index.json` lists. No format is read in a way that can run code: a
pickle (pytorch_model.bin) is opened with `weights_only=True`, which refuses anything but tensors, from PyTorch 2.6 on
(before, it could be got around: CVE-2025-32434). An older PyTorch is not used.
"""

from __future__ import annotations

import gc
import json
import mmap
import pickle
import zipfile
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxspec.folders import some
from jaxspec.weights.orbax import CheckpointError

SAFE_TORCH = "2.6"
MAPPED_BYTES = 2**28  # to read of a safetensors file before it is mapped anew


class Read(Protocol):
    """Reads the tensors of one file."""

    def __call__(self, only: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, array) for each tensor of a file, or for those in `only`, one in memory at a time."""
        ...


class Shard(NamedTuple):
    """One file of weights.

    Attributes:
        path: of the file.
        shapes: of its tensors, by name, as PyTorch has them.
        read: yields each tensor, or each of `only` these names; only one need be in memory at a time.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Read


def shards(folder: Path, formats: Mapping[str, Callable[[Path], Shard]] | None = None) -> list[Shard]:
    """The files of a folder's weights, opened.

    Args:
        folder: where they lie.
        formats: names of files, and how each is opened; None for `FORMATS`, a model's.

    Raises:
        CheckpointError: there are none, some are absent or damaged, or they hold something else than tensors.
    """
    formats = FORMATS if formats is None else formats
    for name, open_file in formats.items():
        if files := _files(folder, name):
            return [open_file(file) for file in files]
    raise CheckpointError(f"{folder} has no weights: expected {', '.join(formats)}, or the index of several such files")


def are_in(folder: Path) -> bool:
    """Whether a folder has weights in any of the formats, complete or not."""
    return any((folder / name).is_file() or (folder / f"{name}.index.json").is_file() for name in FORMATS)


def _files(folder: Path, name: str) -> list[Path]:
    """The file of this name, or those that its index lists; empty if there is neither."""
    index = folder / f"{name}.index.json"
    if (folder / name).is_file():
        return [folder / name]
    if not index.is_file():
        return []
    try:
        listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no index of weights ({error!r}): download it again") from error
    if outside := [file for file in listed if not isinstance(file, str) or Path(file).name != file]:
        raise CheckpointError(f"{index} names {outside[0]!r}: expected files of the same folder")
    if absent := [file for file in listed if not (folder / file).is_file()]:
        raise CheckpointError(
            f"{folder} is incomplete: of the {len(listed)} files that {index.name} lists, {len(absent)} are not there "
            f"({some(absent)}). Finish the download"
        )
    return [folder / file for file in listed]


def _safetensors(path: Path) -> Shard:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise _damaged(path, error) from error

    def read(only: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        file, mapped = safe_open(path, "numpy"), 0
        for name in shapes if only is None else [name for name in shapes if name in only]:
            if mapped > MAPPED_BYTES:  # what was read of a mapping stays resident until it is dropped
                file, mapped = safe_open(path, "numpy"), 0
            x = file.get_tensor(name)
            mapped += x.nbytes
            yield name, x

    return Shard(path, shapes, read)


def _msgpack(path: Path) -> Shard:
    def load() -> dict[str, np.ndarray]:
        from flax import serialization, traverse_util

        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            tree = serialization.msgpack_restore(content)  # type: ignore[arg-type]  # any buffer will do
        flat = traverse_util.flatten_dict(tree, sep=".")
        return dict(torch_name(name, np.asarray(x)) for name, x in flat.items())

    try:
        shapes = {name: x.shape for name, x in load().items()}
    except Exception as error:  # msgpack's, flax's and NumPy's errors have nothing in common
        raise _damaged(path, error) from error

    def read(only: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, x) for name, x in load().items() if only is None or name in only)

    return Shard(path, shapes, read)


def torch_name(name: str, x: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a Flax checkpoint, as PyTorch names and stores it.

    >>> name, x = torch_name("encoder.block.0.layer.1.DenseReluDense.wo.kernel", np.ones((2, 3)))
    >>> name, x.shape
    ('encoder.block.0.layer.1.DenseReluDense.wo.weight', (3, 2))
    """
    stem, _, last = name.rpartition(".")
    if last in ("kernel", "embedding", "scale"):
        return f"{stem}.weight", x.T if last == "kernel" else x
    return name, x


def _pickle(path: Path) -> Shard:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"{path} can only be read with PyTorch, which is not installed: pip install torch, "
            "or get the model as model.safetensors"
        ) from error
    if torch.__version__ < SAFE_TORCH:  # a TorchVersion: numbers are compared, not letters
        raise CheckpointError(
            f"{path} is not read with PyTorch {torch.__version__}, in which a pickle can run code (CVE-2025-32434): "
            f"expected {SAFE_TORCH} or newer. pip install -U torch, or get the model as model.safetensors"
        )

    def load() -> dict[str, Any]:
        # Files written before 2020 are no zip files, and cannot be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))

    try:
        state = load()
        odd = [name for name, x in state.items() if not isinstance(x, torch.Tensor)]
        if odd:
            raise TypeError(f"{odd[0]!r} is no tensor")
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        del state
        gc.collect()
    except pickle.UnpicklingError as error:  # whose words advise to trust the file
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is no file of weights, or damaged: it holds more than tensors, or "
            "not even those, and nothing of it was run. Get the model as model.safetensors, or from whom you know"
        ) from error
    except Exception as error:  # a pickle can fail in any way
        raise _damaged(path, error) from error

    def read(only: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in load().items():
            if only is None or name in only:
                yield name, _numpy(x)
        gc.collect()  # torch.load leaves cycles after that hold the file, all that was read of it being resident

    return Shard(path, shapes, read)


def _numpy(x: Any) -> np.ndarray:
    """A tensor as an array of its own: what is mapped must not be, since the file may change."""
    import ml_dtypes
    import torch

    x = x.detach()  # parameters that were saved as such
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return x.numpy().copy()


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(
        f"{path} ({path.stat().st_size} bytes) is no file of weights, or damaged: {reason}. Download it again"
    )


FORMATS: dict[str, Callable[[Path], Shard]] = {
    "model.safetensors": _safetensors,
    "flax_model.msgpack": _msgpack,
    "pytorch_model.bin": _pickle,
}
OF_DRAFTERS = {  # Medusa's have names of their own
    **FORMATS,
    "medusa_lm_head.safetensors": _safetensors,
    "medusa_lm_head.pt": _pickle,
}
