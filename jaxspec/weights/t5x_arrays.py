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

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.files.folders import some
from jaxspec.weights import orbax_layouts, tensors
from jaxspec.weights.tensors import CheckpointError, Stored
from jaxspec.weights.tensorstore_arrays import (
    METADATA,
    Location,
    damaged,
    open_arrays,
    read_index,
    whole,
)

STEP = re.compile(r"checkpoint_(\d+)")
# T5X's and Orbax's names of what is still being written
UNFINISHED = re.compile(r"checkpoint_\d+\..*tmp.*")
MSGPACK = "checkpoint"
STATE = "state"
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
        raise damaged(index, error) from error
    if not leaves:
        # Other programs, too, write folders of Orbax that are called checkpoint_N, or have a
        # _METADATA.
        complaint = orbax_layouts.complaint(checkpoint)
        expected = "expected those of a model of T5X's, below the name target"
        raise CheckpointError(complaint or f"{index} lists no parameters: {expected}")
    opened = open_arrays(
        index.parent, {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Location)}
    )
    inside = {name: x for name, x in leaves.items() if isinstance(x, np.ndarray)}
    return opened | {name: whole(x.shape, x.dtype, lambda x=x: x) for name, x in inside.items()}


def _index(checkpoint: Path) -> Path | None:
    """Finds the file that lists a checkpoint's arrays; it is written last."""
    # T5X through Orbax has a folder of items; the older layout has none.
    for root in (checkpoint / STATE, checkpoint):
        for name in (MSGPACK, METADATA):
            if (root / name).is_file():
                return root / name
    return None


def _msgpack_leaves(index: Path) -> Iterator[tuple[str, np.ndarray | Location]]:
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


def _apart(name: str, leaf: Any) -> Location:
    """Reads the name and the shape in a placeholder or a tensorstore spec; other leaves are left
    alone.
    """
    if isinstance(leaf, str) and leaf.startswith(PLACEHOLDER):
        return Location(leaf.removeprefix(PLACEHOLDER))
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
    return Location(path.rstrip("/").rpartition("/")[2], None if shape is None else tuple(shape))


def _metadata_leaves(index: Path) -> Iterator[tuple[str, Location]]:
    for keys, location in read_index(index).locations.items():
        # A path through the tree, from the state down: target/encoder/...
        if keys[0] == "target":
            yield "/".join(keys[1:]), location
