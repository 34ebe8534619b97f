"""The tensors of a Hugging Face folder by name, one at a time, from any of the three formats its
weights come in.

    model.safetensors       read by rows; needs nothing else
    flax_model.msgpack      read whole, file by file; from before transformers 5
    pytorch_model.bin       read tensor by tensor where it is a zip file; needs PyTorch

Large models lie in several files, which `<file>.index.json` lists. No format is read in a way that
can run code: a pickle (pytorch_model.bin) is opened with `weights_only=True`, which refuses
anything but tensors, from PyTorch 2.6 on (before, it could be got around: CVE-2025-32434). An older
PyTorch is not used.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import mmap
import pickle
import zipfile
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.files.folders import some

ArrayShape = tuple[int, ...]
SAFE_TORCH = "2.6"
CHUNK_BYTES = 2**22  # of a tensor that are in memory twice; they fit a cache
SAFETENSORS_DTYPES = {
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16},
    **{
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
    },
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2},
}


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message has its contents and the expected ones."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor that still lies in its file: `x[a:b]` reads these rows, `np.asarray(x)` reads it
    whole.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    rows: Callable[[int, int], np.ndarray]  # a, b -> rows from a up to b, of the first axis

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(self.shape[0])
        return self.rows(start, stop)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:] if self.shape else self.rows(0, 1).reshape(()), dtype)


def chunks(x: np.ndarray | Stored) -> Iterator[slice]:
    """Yields slices of the first axis, of about `CHUNK_BYTES` each.

    >>> [(part.start, part.stop) for part in chunks(np.zeros((5, 2**19), np.float32))]
    [(0, 2), (2, 4), (4, 5)]
    """
    rows = x.shape[0]
    # Rows of one tensor are alike in size.
    step = max(1, CHUNK_BYTES * rows // max(1, int(np.prod(x.shape)) * x.dtype.itemsize))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


class Shard(NamedTuple):
    """One file of weights."""

    path: Path
    shapes: dict[str, tuple[int, ...]]  # shapes of its tensors, by name, as PyTorch has them
    # names -> (name, array) for each of these tensors; only one need be in memory at a time
    load: Callable[[Collection[str]], Iterator[tuple[str, np.ndarray | Stored]]]
    # names of matrices that the makers of a quantised file did not quantise
    in_full: frozenset[str] = frozenset()
    # {name that was left out: name of the tensor here that it repeats}, as the makers of the file
    # noted
    repeats: Mapping[str, str] = MappingProxyType({})

    def read(self, only: Container[str] | None = None) -> Iterator[tuple[str, np.ndarray | Stored]]:
        """Yields each tensor by its name, or those in `only`."""
        return self.load(
            dict.fromkeys(name for name in self.shapes if only is None or name in only)
        )

    def keep(self, is_read: Callable[[str], bool]) -> Shard:
        """Returns the file as if it held only the tensors with these names."""
        return self._replace(
            shapes={name: shape for name, shape in self.shapes.items() if is_read(name)}
        )

    def under(self, further: Mapping[str, str]) -> Shard:
        """Returns the file as if it held some of its tensors a second time.

        Args:
            further: {second name: the name in the file}. Tensors of other files may be among them,
                and are ignored.
        """
        repeated = {
            name: stored
            for name, stored in further.items()
            if stored in self.shapes and name not in self.shapes
        }
        if not repeated:
            return self

        def load(names: Collection[str]) -> Iterator[tuple[str, np.ndarray | Stored]]:
            for stored, x in self.load({repeated.get(name, name): None for name in names}):
                if stored in names:
                    yield stored, x
                for name in names:
                    if repeated.get(name) == stored:
                        yield name, x

        shapes = self.shapes | {name: self.shapes[stored] for name, stored in repeated.items()}
        in_full = self.in_full | {
            name for name, stored in repeated.items() if stored in self.in_full
        }
        return self._replace(shapes=shapes, load=load, in_full=in_full)


def shards(
    folder: Path, formats: Mapping[str, Callable[[Path], Shard]] | None = None
) -> list[Shard]:
    """Opens the files of a folder's weights.

    An index decides from which file a tensor is read, also where another file has a tensor of the
    same name. Names that repeat a tensor are in `Shard.repeats`, whether the file or the index
    lists them.

    Args:
        formats: names of files, and how each is opened; None for `FORMATS`, a model's.
    """
    if formats is None:
        formats = FORMATS
    for name, open_file in formats.items():
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [open_file(folder / name)]
        if index.is_file():
            table = _index(index)
            weight_map = table["weight_map"]
            files = [open_file(folder / file) for file in sorted(set(weight_map.values()))]
            files = _as_listed(files, weight_map, index)
            noted = {name: kept for file in files for name, kept in file.repeats.items()} | _names(
                table["metadata"]
            )
            return [file._replace(repeats=_repeats(noted, file.shapes)) for file in files]
    raise CheckpointError(
        f"{folder} has no weights: expected {', '.join(formats)}, or the index of several such "
        "files"
    )


def are_in(folder: Path) -> bool:
    """Tells whether a folder has weights in any of the formats, complete or not."""
    return any(
        (folder / name).is_file() or (folder / f"{name}.index.json").is_file() for name in FORMATS
    )


def _names(metadata: Any) -> dict[str, str]:
    """Returns the entries of a file's metadata that are text: other entries name no tensor."""
    table = metadata if isinstance(metadata, dict) else {}
    return {name: kept for name, kept in table.items() if isinstance(kept, str)}


def _repeats(noted: Mapping[str, str], shapes: Container[str]) -> dict[str, str]:
    """Returns the names that a file was written without, and the tensor in it that each of them
    repeats.

    `safetensors.torch.save_model` writes a tensor of several names once, and notes the other names
    in the metadata. Metadata also has entries such as "format", which are left out here.

    >>> _repeats({"format": "pt", "lm_head.weight": "wte.weight"}, {"wte.weight"})
    {'lm_head.weight': 'wte.weight'}
    """
    return {name: kept for name, kept in noted.items() if kept in shapes and name not in shapes}


def _index(index: Path) -> dict[str, Any]:
    """Reads an index: its "weight_map", with files that exist, and its "metadata"."""
    folder = index.parent
    try:
        table = json.loads(index.read_text(encoding="utf-8"))
        weight_map = dict(table["weight_map"])
        listed = sorted(set(weight_map.values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of weights ({error!r}): download it again"
        ) from error
    outside = [file for file in listed if not isinstance(file, str) or Path(file).name != file]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}: expected files of the same folder")
    absent = [file for file in listed if not (folder / file).is_file()]
    if absent:
        counts = f"of the {len(listed)} files that {index.name} lists, {len(absent)} are not there"
        raise CheckpointError(
            f"{folder} is incomplete: {counts} ({some(absent)}). Finish the download"
        )
    return {"weight_map": weight_map, "metadata": table.get("metadata")}


def _as_listed(files: list[Shard], weight_map: Mapping[str, str], index: Path) -> list[Shard]:
    """Leaves each tensor to the file that the index names for it."""
    if index.name.startswith("flax_model."):  # its names are Flax's, with slashes
        weight_map = {
            torch_name(name.replace("/", "."))[0]: file for name, file in weight_map.items()
        }
    holders: dict[str, list[str]] = {}
    for shard in files:
        for name in shard.shapes:
            holders.setdefault(name, []).append(shard.path.name)
    # Overlays replace a tensor of an older file: only the index says which of the two counts.
    for name, held_by in holders.items():
        if len(held_by) > 1 and name not in weight_map:
            both = (
                f"{held_by[0]} and {held_by[1]} both hold {name}, and {index.name} does not list it"
            )
            raise CheckpointError(
                f"{index.parent}: {both}: expected it once. Convert or download the model again"
            )
        if weight_map.get(name, held_by[0]) not in held_by:
            lists = (
                f"{index} lists {name} as a tensor of {weight_map[name]}, and only {held_by[0]} "
                "holds it"
            )
            raise CheckpointError(f"{lists}: download the model again")
    return [
        shard.keep(lambda name, file=shard.path.name: weight_map.get(name, file) == file)
        for shard in files
    ]


def _safetensors(path: Path) -> Shard:
    from safetensors import SafetensorError, safe_open

    try:
        safe_open(path, "numpy")  # checks the header: sizes, offsets and dtypes
    except SafetensorError as error:
        raise damaged(path, error) from error
    # The library maps the file, whose pages would stay resident: rows are read by offset instead.
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    metadata = entries.pop("__metadata__", None)
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}

    def stored(name: str) -> Stored:
        entry = entries[name]
        shape = shapes[name]
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            expected = ", ".join(SAFETENSORS_DTYPES)
            raise CheckpointError(f"{path}: {name} is {entry['dtype']}: expected one of {expected}")
        dtype = np.dtype(SAFETENSORS_DTYPES[entry["dtype"]])
        return from_file(path, 8 + size + entry["data_offsets"][0], shape, dtype)

    repeats = _repeats(_names(metadata), shapes)
    return Shard(
        path, shapes, lambda names: ((name, stored(name)) for name in names), repeats=repeats
    )


def from_file(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Stored:
    """Opens a tensor that lies in a file unchanged, in C order; rows that were read do not stay in
    memory.
    """
    row_shape = shape[1:]
    per_row = int(np.prod(row_shape, dtype=np.int64))

    def rows(start: int, stop: int) -> np.ndarray:
        count = (stop - start) * per_row
        x = np.fromfile(path, dtype, count, offset=offset + start * per_row * dtype.itemsize)
        if len(x) != count:
            raise CheckpointError(f"{path} has become shorter while it was read: download it again")
        return x.reshape(stop - start, *row_shape)

    return Stored(shape, dtype, rows)


def _msgpack(path: Path) -> Shard:
    def load() -> dict[str, np.ndarray]:
        from flax import serialization, traverse_util

        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            # Annotated as bytes, but any buffer will do.
            tree = serialization.msgpack_restore(content)  # type: ignore[arg-type]
        flat = traverse_util.flatten_dict(tree, sep=".")
        renamed = ((*torch_name(name), np.asarray(x)) for name, x in flat.items())
        return {name: x.T if is_transposed else x for name, is_transposed, x in renamed}

    try:
        shapes = {name: x.shape for name, x in load().items()}
    except Exception as error:  # msgpack's, flax's and NumPy's errors have nothing in common
        raise damaged(path, error) from error

    return Shard(
        path, shapes, lambda names: ((name, x) for name, x in load().items() if name in names)
    )


def torch_name(name: str) -> tuple[str, bool]:
    """Returns PyTorch's name of a tensor of a Flax checkpoint, and whether it stores the transpose.

    >>> torch_name("encoder.block.0.layer.1.DenseReluDense.wo.kernel")
    ('encoder.block.0.layer.1.DenseReluDense.wo.weight', True)
    """
    stem, _, last = name.rpartition(".")
    return f"{stem}.weight" if last in ("kernel", "embedding", "scale") else name, last == "kernel"


def _pickle(path: Path) -> Shard:
    try:
        import torch
    except ImportError as error:
        install = "which is not installed: pip install torch, or get the model as model.safetensors"
        raise CheckpointError(f"{path} can only be read with PyTorch, {install}") from error
    if torch.__version__ < SAFE_TORCH:  # a TorchVersion: numbers are compared, not letters
        unsafe = (
            f"{path} is not read with PyTorch {torch.__version__}, in which a pickle can run code "
            "(CVE-2025-32434)"
        )
        advice = "pip install -U torch, or get the model as model.safetensors"
        raise CheckpointError(f"{unsafe}: expected {SAFE_TORCH} or newer. {advice}")

    def load() -> dict[str, Any]:
        # Files written before 2020 are no zip files, and cannot be mapped.
        return torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )

    try:
        # Read once for names and shapes, then let go of; tensors of a zip file are mapped, not
        # copied.
        state = load()
        others = [name for name, x in state.items() if not isinstance(x, torch.Tensor)]
        if others:
            raise TypeError(f"{others[0]!r} is not a tensor")
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        del state
        gc.collect()
    except pickle.UnpicklingError:  # whose words advise to trust the file
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is not a file of weights, or damaged: it holds "
            "more than tensors, or not even those, and nothing of it was run. Get the model as "
            "model.safetensors, or from whom you know"
        ) from None  # PyTorch's message says how to run it all the same
    except Exception as error:  # a pickle can fail in any way
        raise damaged(path, error) from error

    def read(names: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in load().items():
            if name in names:
                yield name, of_torch(x)
        # torch.load leaves cycles after that hold the file, all that was read of it being resident
        gc.collect()

    return Shard(path, shapes, read)


def of_torch(x: Any) -> np.ndarray:
    """Copies a tensor of PyTorch into a new array. A mapped one would change with the file."""
    import torch

    x = x.detach()  # parameters that were saved as such
    name = str(x.dtype).removeprefix("torch.")
    if hasattr(ml_dtypes, name):  # NumPy itself has no bfloat16 and no float8
        # The bits go through an integer type of the same width.
        as_integers = x.view({1: torch.uint8, 2: torch.int16}[x.element_size()])
        return as_integers.numpy().view(getattr(ml_dtypes, name)).copy()
    return x.numpy().copy()


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Makes the error of a file that cannot be read."""
    if str(error):
        reason = str(error).splitlines()[0]
    else:
        reason = type(error).__name__
    size = path.stat().st_size
    return CheckpointError(
        f"{path} ({size} bytes) is not a file of weights, or damaged: {reason}. Download it again"
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
