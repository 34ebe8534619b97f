"""Arrays into and out of Orbax's files, a few at a time, so that the host never holds a model
besides the devices.

Orbax alone copies a tree to the host before it writes any of it, and reads all of it before it
gives any back. Here a leaf is made, copied and written when its turn comes, each process writing
the parts on its devices; and a leaf that was read is placed before the next is read. The files are
as for a tree of NumPy arrays: without devices, so that plain Orbax reads them on any, without a
warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec import sharding
from jaxspec.core import Params
from jaxspec.nets.quantised import is_quantised
from jaxspec.weights import parameters

BATCH_BYTES = 2**26  # what the host has at a time, where one array is not more


class _Later:
    """A leaf that `make` gives when it is written, perhaps twice; Orbax asks for shape and dtype
    before that.
    """

    def __init__(self, abstract: jax.ShapeDtypeStruct, make: Callable[[], jax.Array]):
        self.shape = abstract.shape
        self.dtype = np.dtype(abstract.dtype)
        self.make = make


def write(folder: Path, params: Params, store: Callable[[str, Any], Any]) -> None:
    """Writes a tree of parameters; under `jax.distributed` all processes call it, with the same
    folder.

    Args:
        params: the tree; its matrices may be quantised.
        store: (path, parameter) -> its stored form, an array or a dict of arrays.
    """
    # here and below: slow to import, and needed only where files are touched
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    class Handler(type_handlers.ArrayHandler):
        def typestr(self) -> str:
            return "np.ndarray"

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            # Orbax hands over all leaves at once: each batch is made and written before the next is
            # made.
            for batch in parameters.batches(
                range(len(values)), lambda i: _nbytes(values[i]), BATCH_BYTES
            ):
                arrays = [_global(values[i].make()) for i in batch]
                chosen = [[details[i] for i in batch] for details in (infos, args)]
                for written in await super().serialize(arrays, *chosen):
                    written.result()
            return []

    def later(path: str, x: Any) -> Any:
        def make() -> Any:
            return store(path, jax.tree.map(parameters.apart, x))

        abstract = jax.eval_shape(lambda x: store(path, x), x)
        if not isinstance(abstract, dict):
            return _Later(abstract, make)
        # Entries and scales of a matrix are written apart, so it is quantised once for each.
        return {
            name: _Later(shape, lambda name=name: make()[name]) for name, shape in abstract.items()
        }

    handler = Handler(use_replica_parallel=False, enable_write_sharding_file=False)
    registry = type_handlers.create_type_handler_registry((_Later, handler))
    tree = parameters.map_by_path(later, params, is_leaf=is_quantised)
    with ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    ) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(tree))
    # It says where the folder was written, which is nobody's business; no local file system needs
    # it.
    (folder / "commit_success.txt").unlink(missing_ok=True)


def read(
    folder: Path,
    chosen: Callable[[str], bool],
    check: Callable[[dict[str, Any]], None],
    put: Callable[[str, Any], Any],
) -> dict[str, Any]:
    """Reads parameters, by path.

    Args:
        folder: a folder that `write` wrote.
        chosen: whether to read a path.
        check: called with the parameters, whose arrays have only a shape and a dtype yet.
        put: (path, parameter) -> its replacement; a quantised matrix is given as a dict.
    """
    import orbax.checkpoint as ocp

    placed: dict[str, Any] = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder).item_metadata.tree
        stored = {
            path: x
            for path, x in parameters.flat(tree, is_leaf=is_quantised).items()
            if chosen(path)
        }
        check(stored)
        # NumPy arrays: jax.Arrays would be read to the devices that they were saved from.
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        for batch in parameters.batches(stored, lambda path: _nbytes(stored[path]), BATCH_BYTES):

            def item(path: str, x: Any, batch: frozenset[str] = frozenset(batch)) -> Any:
                if path in batch:
                    return x
                return jax.tree.map(lambda _: ocp.PLACEHOLDER, x)

            partial = parameters.map_by_path(item, tree, is_leaf=is_quantised)
            restored = checkpointer.restore(
                folder, ocp.args.PyTreeRestore(item=partial, restore_args=arguments)
            )
            arrays = parameters.flat(restored, is_leaf=is_quantised)
            del restored
            placed |= {path: put(path, arrays.pop(path)) for path in batch}
    return placed


def _nbytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def _global(x: jax.Array) -> jax.Array:
    """Makes an array one that all processes know of, as Orbax wants it; each must have the same
    values.
    """
    if jax.process_count() > 1 and x.is_fully_addressable:
        return sharding.put(
            x, NamedSharding(sharding.mesh(f"data={jax.device_count()}"), PartitionSpec())
        )
    return x
