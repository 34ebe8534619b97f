"""Orbax folders of other programs, in words for an error: which layout they have, and what their
tree begins with.

    _METADATA, manifest.ocdbt, d/        one tree of arrays, in a key-value store
    _METADATA, params.layer_0.kernel/    one tree of arrays, each a folder of zarr
    _CHECKPOINT_METADATA, default/       items of one step, each a tree
    5/, 10/                              the steps of a CheckpointManager

jaxspec knows no network with the names in such a folder, so it does not read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxspec.files.folders import some
from jaxspec.weights.tensorstore_arrays import METADATA, OCDBT, read_index

CHECKPOINT = "_CHECKPOINT_METADATA"
READ = (
    "Expected a tree with embedder and layer_0, as Gemma's have, one with target, as T5X's have, "
    "or a folder of jaxspec.weights.orbax.save"
)
ADVICE = (
    "Restore this one with orbax.checkpoint. jaxspec.from_arrays takes its arrays if you map their "
    "names to those of a Hugging Face folder; jaxspec.nets.adapters.from_linen or from_nnx takes "
    "them with their module"
)


def complaint(folder: Path) -> str | None:
    """Explains a folder that Orbax wrote, and how to use it; None for any other folder."""
    layout = _tree(folder) or _items(folder) or _steps(folder)
    if layout is None:
        return None
    return f"{folder} is an Orbax checkpoint of another program: {layout}. {READ}. {ADVICE}"


def _tree(folder: Path) -> str | None:
    """Describes a folder with the arrays of one tree."""
    index = folder / METADATA
    if not index.is_file():
        return None
    if (folder / OCDBT).is_file():
        stored = "in one key-value store (OCDBT)"
    else:
        stored = "each a folder of zarr"
    try:
        paths = list(read_index(index).locations)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"a tree of arrays, {stored}, whose {METADATA} cannot be read"
    names = list(dict.fromkeys(path[0] for path in paths if path))
    return f"a tree of {len(paths)} arrays, {stored}, that begins with {some(names) or 'nothing'}"


def _items(folder: Path) -> str | None:
    """Describes a folder with several trees, as one step of a `CheckpointManager`."""
    if not (folder / CHECKPOINT).is_file():
        return None
    trees = {child.name: tree for child in _folders(folder) if (tree := _tree(child)) is not None}
    if not trees:
        return "a step without trees of arrays"
    first = next(iter(trees))
    return f"a step with {some(list(trees))}, of which {first} is {trees[first]}"


def _steps(folder: Path) -> str | None:
    """Describes a folder of steps."""
    numbered = [child for child in _folders(folder) if child.name[-1].isdigit()]
    steps = [
        child
        for child in numbered
        if (child / CHECKPOINT).is_file() or (child / METADATA).is_file()
    ]
    if not steps:
        return None
    newest = max(steps, key=lambda step: (len(step.name), step.name))  # 10 is after 9
    described = _tree(newest) or _items(newest)
    return (
        f"the folder of a CheckpointManager, with {some([step.name for step in steps])}; "
        f"{newest.name} is {described}"
    )


def _folders(folder: Path) -> Iterator[Path]:
    return (child for child in sorted(folder.iterdir()) if child.is_dir())
