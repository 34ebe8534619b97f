"""Arrays into and out of Orbax's files, a few at a time, so that the host never holds a model besides the devices.

Orbax on its own copies a tree to the host before it writes any of it, and reads all of it before it gives any back.
Here a leaf is made, copied and written when its turn comes, each process writing what lies on its own devices; and what
was read is placed before the next is read. The files are those of a tree of NumPy arrays: they say nothing of devices,
and plain Orbax reads them on any, without a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import sharding
from jaxspec.core import Params

BATCH_BYTES = 2**26  # what the host has at a time, where one array is not more


class Later:
    """A leaf that is made when it is written, perhaps twice.

    Attributes:
        shape, dtype: of it.
        make: gives it, on whatever devices.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, make: Callable[[], jax.Array]):
        self.shape, self.dtype, self.make = shape, np.dtype(dtype), make

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: Path, tree: Params) -> None:
    """Writes a tree whose leaves are `Later`; under `jax.distributed` all processes call it, with the same folder."""
    import orbax.checkpoint as ocp  # here and below: slow to import, and needed only where files are touched
    from orbax.checkpoint import type_handlers

    class Handler(type_handlers.ArrayHandler):
        def typestr(self) -> str:
            return "np.ndarray"

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            for batch in batches([x.nbytes for x in values]):
                arrays = [_global(values[i].make()) for i in batch]
                chosen = [[details[i] for i in batch] for details in (infos, args)]
                for written in await super().serialize(arrays, *chosen):
                    written.result()
            return []

    handler = Handler(use_replica_parallel=False, enable_write_sharding_file=False)
    registry = type_handlers.create_type_handler_registry((Later, handler))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(tree))


def read(
    folder: Path,
    check: Callable[[Params], None],
    place: Callable[[tuple[Any, ...], np.ndarray], Any],
    modules: Sequence[str] | None = None,
) -> Params:
    """Reads a tree.

    Args:
        folder: what `write` wrote.
        check: called with the tree, whose leaves have only a shape and a dtype yet.
        place: makes of each leaf, and its path as `jax.tree_util` has it, what is to be in its place.
        modules: the entries of the tree to read; None for all.
    """
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        part = tree if modules is None else {name: x for name, x in tree.items() if name in modules}
        check(part)
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        read = [i for i, (path, _) in enumerate(leaves) if modules is None or path[0].key in modules]
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        placed: list[Any] = [None] * len(leaves)
        sizes = [math.prod(leaves[i][1].shape) * np.dtype(leaves[i][1].dtype).itemsize for i in read]
        for batch in ([read[i] for i in indices] for indices in batches(sizes)):
            wanted = [x if i in batch else ocp.PLACEHOLDER for i, (_, x) in enumerate(leaves)]
            item = jax.tree.unflatten(structure, wanted)
            arrays = jax.tree.leaves(
                checkpointer.restore(folder, ocp.args.PyTreeRestore(item=item, restore_args=arguments))
            )
            for i in batch:
                placed[i], arrays[i] = place(leaves[i][0], arrays[i]), None
    params = jax.tree.unflatten(structure, placed)
    return params if modules is None else {name: params[name] for name in part}


def batches(sizes: Iterable[int]) -> Iterator[range]:
    """Groups arrays that are on their way together, by their sizes in bytes: at least one, and at most `BATCH_BYTES`.

    >>> [list(batch) for batch in batches([2**25, 2**25, 1, 2**27, 1])]
    [[0, 1], [2], [3], [4]]
    """
    start, total, end = 0, 0, 0
    for end, size in enumerate(sizes):
        if end > start and total + size > BATCH_BYTES:
            yield range(start, end)
            start, total = end, 0
        total += size
    yield range(start, end + 1)


def _global(x: jax.Array) -> jax.Array:
    """Makes an array one that all processes know of, as Orbax wants it; each must have the same values."""
    if jax.process_count() > 1 and x.is_fully_addressable:
        return sharding.put(x, NamedSharding(sharding.mesh(f"data={jax.device_count()}"), PartitionSpec()))
    return x
