"""Arrays that Orbax or T5X stored, by name, opened with tensorstore and read one at a time.

    _METADATA                          JSON: the tree, and how its arrays are stored
    manifest.ocdbt, d/, ...            one key-value store (OCDBT) with all arrays, or else
    params.layer_0.kernel/             each array in a folder

Arrays are in zarr, or in zarr3 where `_METADATA` says so. A checkpoint is data, and not trusted:
names that would lead out of the folder are refused.
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights.tensors import ArrayShape, CheckpointError, Stored

METADATA = "_METADATA"
OCDBT = "manifest.ocdbt"


class Location(NamedTuple):
    """An array's name in its folder or store, and its shape if the index says so."""

    name: str
    shape: ArrayShape | None = None


class Index(NamedTuple):
    """The content of a `_METADATA`."""

    locations: dict[tuple[str, ...], Location]  # by the keys that lead through the tree to an array
    driver: str = "zarr"  # or "zarr3"
    # whether the writer left out chunks that are all zero, as earlier versions did in zarr3
    leaves_zeros_out: bool = False


def read_index(path: Path) -> Index:
    """Reads a `_METADATA`. Raises any error if it is damaged."""
    table = json.loads(path.read_text(encoding="utf-8"))
    locations = {}
    for entry in table["tree_metadata"].values():
        keys = tuple(str(step["key"]) for step in entry["key_metadata"])
        # skipped are None and {}
        if not entry["value_metadata"]["skip_deserialize"]:
            locations[keys] = Location(".".join(keys))
    return Index(
        locations,
        "zarr3" if table.get("use_zarr3") else "zarr",
        not table.get("store_array_data_equal_to_fill_value", False),
    )


def open_arrays(
    root: Path,
    locations: Mapping[str, Location],
    driver: str = "zarr",
    leaves_zeros_out: bool = False,
) -> dict[str, Stored]:
    """Opens arrays of one folder.

    Args:
        root: the folder.
        locations: {name for the result: where the array lies}.
        driver, leaves_zeros_out: fields of `Index`. A chunk that a key-value store does not list is
            then zero; a chunk that should be a file is an error always.

    Raises:
        CheckpointError: arrays are absent or damaged, or a name leads out of the folder.
    """
    import tensorstore as ts

    outside = [
        location.name
        for location in locations.values()
        if not all(re.fullmatch(r"\w[\w.-]*", segment) for segment in location.name.split("/"))
    ]
    if outside:
        raise CheckpointError(
            f"{root}: the index names an array {outside[0]!r:.80}, expected a name like target.a.b"
        )
    # All are opened before any is waited for: each takes a round trip to a network disk.
    opening = {
        name: ts.open(_spec(root, location.name, driver, leaves_zeros_out), open=True, read=True)
        for name, location in locations.items()
    }
    opened = {}
    absent = []
    for name, location in locations.items():
        try:
            opened[name] = _opened(root, location, opening[name].result())
        except Exception as error:  # tensorstore's: a ValueError more often than not
            if not str(error).startswith("NOT_FOUND"):
                raise damaged(root / location.name, error) from error
            absent.append(location.name)
    if absent:
        counts = f"of the {len(locations)} arrays that lie apart, {len(absent)} are not there"
        raise CheckpointError(
            f"{root} is incomplete: {counts} ({some(absent)}). Finish the download"
        )
    return opened


def _spec(root: Path, name: str, driver: str, leaves_zeros_out: bool) -> dict[str, Any]:
    """Says where an array lies. A missing chunk is an error where all were written: tensorstore
    would read zeros.
    """
    base = {"driver": "file", "path": f"{root.absolute()}/"}
    is_store = (root / OCDBT).is_file()
    if is_store:
        where = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        where = base | {"path": f"{root.absolute() / name}/"}
    fills = is_store and leaves_zeros_out
    return {"driver": driver, "kvstore": where, "fill_missing_data_reads": fills}


def _opened(root: Path, location: Location, store: Any) -> Stored:
    if location.shape not in (None, store.shape):
        raise ValueError(f"its shape is {list(store.shape)}, the index says {list(location.shape)}")
    dtype = store.dtype.numpy_dtype
    # Version 2 of T5X's layout stores bfloat16 as its bits.
    if dtype == np.uint16:
        dtype = np.dtype(ml_dtypes.bfloat16)

    def read() -> np.ndarray:
        try:
            return np.asarray(store.read().result()).view(dtype)
        except Exception as error:  # as above
            raise damaged(root / location.name, error) from error

    return whole(store.shape, dtype, read)


def whole(shape: ArrayShape, dtype: np.dtype, read: Callable[[], np.ndarray]) -> Stored:
    """Makes an array of one that is read whole: chunks of zarr are compressed, and hold more than a
    few rows.
    """
    return Stored(shape, dtype, lambda start, stop: read()[start:stop])


def most_common_dtype(arrays: Mapping[str, Stored]) -> str:
    """Returns the name of the dtype that most entries of some arrays have."""
    sizes = collections.Counter[str]()
    for x in arrays.values():
        sizes[x.dtype.name] += math.prod(x.shape)
    return sizes.most_common(1)[0][0]


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Makes the error of a file or array that cannot be read."""
    if str(error):
        reason = str(error).splitlines()[0]
    else:
        reason = type(error).__name__
    return CheckpointError(
        f"{path} is damaged, or not what it is taken for: {reason}. Copy the checkpoint again"
    )
