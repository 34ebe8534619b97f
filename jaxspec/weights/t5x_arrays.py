"""The arrays of a T5X checkpoint by name, one at a time: both layouts, read with tensorstore.

A run's folder holds a checkpoint_N for each step that was saved. In the layout that the public
checkpoints have, it is

    checkpoint_N/checkpoint                      msgpack: the tree, whose leaves are small arrays, and specs of others
    checkpoint_N/target.encoder.....kernel/      an array of the model, in zarr
    checkpoint_N/state.param_states...../        an array of the optimizer, which is not read

and in the one that T5X writes through Orbax

    checkpoint_N/state/_METADATA                 JSON: the tree
    checkpoint_N/state/manifest.ocdbt, d/, ...   a key-value store with target.encoder.....kernel/ and so on in it

or, by early versions of Orbax, folders of zarr as above, of which "checkpoint" says
"PLACEHOLDER://target....kernel".

A checkpoint is data, and not trusted. Nothing is unpickled. Only the name of an array's location is
used, so that nothing is read from outside the folder, or from a network. What is absent or cut
short is found out in either layout; a flipped bit, only where gzip's checksum covers it, as it does
in the first.

Reference: Roberts et al., arXiv 2203.17189; the layouts are described in t5x/checkpoints.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights import orbax_layouts, tensors
from jaxspec.weights.tensors import ArrayShape, CheckpointError, Stored

STEP = re.compile(r"checkpoint_(\d+)")
# T5X's and Orbax's names of what is still being written
UNFINISHED = re.compile(r"checkpoint_\d+\..*tmp.*")
MSGPACK = "checkpoint"
METADATA = "_METADATA"
STATE = "state"
OCDBT = "manifest.ocdbt"
SPEC = {"driver", "kvstore", "metadata"}  # keys of a leaf that stands for an array of its own
PLACEHOLDER = "PLACEHOLDER://"
TENSORFLOW = b"model_checkpoint_path"  # how the file "checkpoint" of TensorFlow begins


def is_folder(folder: Path) -> bool:
    """Tells whether a folder is a T5X checkpoint or run, finished or not, without Hugging Face's
    weights beside it.
    """
    names = []
    if folder.is_dir():
        names = [folder.resolve().name, *(child.name for child in folder.iterdir())]
    steps = any(STEP.fullmatch(name) or UNFINISHED.fullmatch(name) for name in names)
    return (steps or _index(folder) is not None) and not tensors.are_in(folder)


def find(folder: Path) -> Path:
    """Finds the checkpoint that a folder is, or else its newest complete checkpoint_N."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: expected a folder that T5X wrote")
    if UNFINISHED.fullmatch(folder.resolve().name):
        raise CheckpointError(
            f"{folder} was never finished: a whole one is called checkpoint_N. Load an earlier one"
        )
    if _index(folder) is not None:
        return folder
    steps = [
        child
        for child in folder.iterdir()
        if STEP.fullmatch(child.name) and _index(child) is not None
    ]
    if steps:
        return max(steps, key=lambda step: int(step.name.rpartition("_")[2]))
    files = [
        child.name for child in folder.iterdir() if STEP.fullmatch(child.name) and child.is_file()
    ]
    if files:
        text = (
            f"{folder} has {some(files)}, a file as flax.training.checkpoints writes it, and T5X's "
            "are folders"
        )
        advice = (
            "restore it with flax, and give its arrays to jaxspec.nets.adapters.from_linen with "
            "their module"
        )
        raise CheckpointError(f"{text}: {advice}")
    names = sorted(child.name for child in folder.iterdir())
    expected = (
        f"a file {MSGPACK} or {STATE}/{METADATA}, which is written last, or a checkpoint_N with "
        "either"
    )
    listing = f"there is {some(names) or 'nothing'}"
    raise CheckpointError(
        f"{folder} has no complete T5X checkpoint: expected {expected}; {listing}"
    )


def arrays(checkpoint: Path) -> dict[str, Stored]:
    """Opens the model's arrays, by T5X's names, such as "encoder/layers_0/mlp/wo/kernel"."""
    index = _index(checkpoint)
    assert index is not None, "find() gave it"
    try:
        leaves = dict((_msgpack_leaves if index.name == MSGPACK else _metadata_leaves)(index))
    except CheckpointError:
        raise
    except Exception as error:  # msgpack's, flax's, JSON's and our own have nothing in common
        raise _damaged(index, error) from error
    if not leaves:
        # Other programs, too, write folders of Orbax that are called checkpoint_N, or have a
        # _METADATA.
        if index.name == METADATA:
            complaint = orbax_layouts.complaint(checkpoint)
        else:
            complaint = None
        expected = "expected those of a model of T5X's, below the name target"
        raise CheckpointError(complaint or f"{index} lists no parameters: {expected}")
    opened = _open_all(
        index.parent, {name: leaf for name, leaf in leaves.items() if isinstance(leaf, _Apart)}
    )
    inside = {name: x for name, x in leaves.items() if isinstance(x, np.ndarray)}
    return opened | {name: _stored(x.shape, x.dtype, lambda x=x: x) for name, x in inside.items()}


def _stored(shape: ArrayShape, dtype: np.dtype, read: Callable[[], np.ndarray]) -> Stored:
    """Makes an array of one that is read whole: chunks of zarr are compressed, and hold more than a
    few rows.
    """
    return Stored(shape, dtype, lambda start, stop: read()[start:stop])


class _Apart(NamedTuple):
    """A leaf that lies outside the index: its name there, and its shape if the index says so."""

    name: str
    shape: ArrayShape | None = None


def _index(checkpoint: Path) -> Path | None:
    """Finds the file that lists a checkpoint's arrays; it is written last."""
    # T5X through Orbax has a folder of items; the older layout has none.
    for root in (checkpoint / STATE, checkpoint):
        for name in (MSGPACK, METADATA):
            if (root / name).is_file():
                return root / name
    return None


def _msgpack_leaves(index: Path) -> Iterator[tuple[str, np.ndarray | _Apart]]:
    from flax import serialization, traverse_util

    def is_array(path: Any, node: Any) -> bool:
        return not isinstance(node, dict) or node.keys() >= SPEC

    content = index.read_bytes()
    if content.startswith(TENSORFLOW):
        raise CheckpointError(
            f"{index} belongs to a TensorFlow checkpoint: convert it, by convert_tf_checkpoint.py"
        )
    tree = serialization.msgpack_restore(content)
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a value of type {type(tree).__name__}, expected a tree")
    version = tree.get("version", 3)
    if version not in (2, 3):
        raise CheckpointError(f"{index} is of version {version!r}, expected 2 or 3")
    # Version 2 and 3 of the legacy layout nest the model in the optimizer; Orbax does not.
    state = tree.get("optimizer", tree)
    if isinstance(state, dict):
        target = state.get("target")
    else:
        target = None
    flat = traverse_util.flatten_dict(target or {}, sep="/", is_leaf=is_array)
    for name, leaf in flat.items():
        if leaf is not None:
            yield name, leaf if isinstance(leaf, np.ndarray) else _apart(name, leaf)


def _apart(name: str, leaf: Any) -> _Apart:
    """Reads the name and the shape in a placeholder or a tensorstore spec; other leaves are left
    alone.
    """
    if isinstance(leaf, str) and leaf.startswith(PLACEHOLDER):
        return _Apart(leaf.removeprefix(PLACEHOLDER))
    if not isinstance(leaf, dict) or leaf["driver"] != "zarr":
        raise ValueError(
            f"{name} is {leaf!r:.80}, expected an array, {PLACEHOLDER}name, or the spec of a zarr "
            "array"
        )
    where = leaf["kvstore"]
    shape = leaf["metadata"].get("shape")
    # before tensorstore 0.1.14, apart
    if isinstance(where, dict):
        path = where.get("path", leaf.get("path"))
    else:
        path = None
    if not isinstance(path, str):
        raise ValueError(f"the spec of {name} has no path: {leaf!r:.80}")
    # The last part alone: the folders before it are of the machine that wrote the file.
    return _Apart(path.rstrip("/").rpartition("/")[2], None if shape is None else tuple(shape))


def _metadata_leaves(index: Path) -> Iterator[tuple[str, _Apart]]:
    for entry in json.loads(index.read_text(encoding="utf-8"))["tree_metadata"].values():
        # A path through the tree, from the state down: target/encoder/...
        keys = [str(step["key"]) for step in entry["key_metadata"]]
        # skipped are None and {}
        if keys[0] == "target" and not entry["value_metadata"]["skip_deserialize"]:
            yield "/".join(keys[1:]), _Apart(".".join(keys))


def _open_all(root: Path, leaves: dict[str, Any]) -> dict[str, Stored]:
    import tensorstore as ts

    outside = [leaf.name for leaf in leaves.values() if not re.fullmatch(r"\w[\w.-]*", leaf.name)]
    if outside:
        raise CheckpointError(
            f"{root}: the index names an array {outside[0]!r:.80}, expected a name like target.a.b"
        )
    # All are opened before any is waited for: each takes a round trip to a network disk.
    opening = {
        name: ts.open(_spec(root, leaf.name), open=True, read=True) for name, leaf in leaves.items()
    }
    opened = {}
    absent = []
    for name, leaf in leaves.items():
        try:
            opened[name] = _apart_array(root, leaf, opening[name].result())
        except Exception as error:  # tensorstore's: a ValueError more often than not
            if not str(error).startswith("NOT_FOUND"):
                raise _damaged(root / leaf.name, error) from error
            absent.append(leaf.name)
    if absent:
        counts = f"of the {len(leaves)} arrays that lie apart, {len(absent)} are not there"
        raise CheckpointError(
            f"{root} is incomplete: {counts} ({some(absent)}). Finish the download"
        )
    return opened


def _spec(root: Path, name: str) -> dict[str, Any]:
    """Says where an array lies. A missing chunk is an error: tensorstore would read zeros."""
    base = {"driver": "file", "path": f"{root.absolute()}/"}
    if (root / OCDBT).is_file():
        where = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    else:
        where = base | {"path": f"{root.absolute() / name}/"}
    return {"driver": "zarr", "kvstore": where, "fill_missing_data_reads": False}


def _apart_array(root: Path, leaf: _Apart, store: Any) -> Stored:
    if leaf.shape not in (None, store.shape):
        raise ValueError(f"its shape is {list(store.shape)}, the index says {list(leaf.shape)}")
    dtype = store.dtype.numpy_dtype
    # Version 2 of the layout stores bfloat16 as its bits.
    if dtype == np.uint16:
        dtype = np.dtype(ml_dtypes.bfloat16)

    def read() -> np.ndarray:
        try:
            return np.asarray(store.read().result()).view(dtype)
        except Exception as error:  # as above
            raise _damaged(root / leaf.name, error) from error

    return _stored(store.shape, dtype, read)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    if str(error):
        reason = str(error).splitlines()[0]
    else:
        reason = type(error).__name__
    return CheckpointError(
        f"{path} is damaged, or not what it is taken for: {reason}. Copy the checkpoint again"
    )
