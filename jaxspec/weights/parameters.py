"""A network's parameters by path ("encoder_0/ff/wi/weight"): their shapes, and putting them in
place one by one.

What every format needs: names and shapes are compared before any weights are read. From the formats
of other libraries each parameter goes straight to where it will be used, so that the host need not
hold the model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import sharding
from jaxspec.core import Params, token_rows
from jaxspec.files import folders
from jaxspec.files.folders import some
from jaxspec.nets import net_of
from jaxspec.sharding import Axes
from jaxspec.weights import quantisation
from jaxspec.weights.quantised_files import Quantised
from jaxspec.weights.tensors import ArrayShape, CheckpointError, Stored, chunks

LONGEST_PATH = 4096  # in bytes, of folders that processes tell each other of
ALIGNMENT = 64  # in bytes, of memory that jax's CPU devices take without a copy
FLOATS = ("float32", "bfloat16", "float16", "float64")  # what stored weights may be
FLOAT4 = (np.arange(-12, 13) / 2).astype(jnp.float4_e2m1fn)  # of twice each number, from -12 on
NARROW = ("float8", "float4", "int8", "uint8", "int4", "int32")  # what quantised ones are

T = TypeVar("T")


def shapes(config: Any) -> dict[str, ArrayShape]:
    """Returns the shape of each of a network's parameters.

    >>> from jaxspec.nets.decoder import gpt_config
    >>> found = shapes(gpt_config(32, dim=16, ff_dim=24, layers=1, heads=2, max_positions=8))
    >>> found["layers_0/ff/wi/weight"]
    (24, 16)
    """
    return {path: x.shape for path, x in flat(net_of(config).shapes(config)).items()}


def check_float(where: Path, name: str, dtype: str) -> None:
    """Raises ValueError for impossible values in stored weights."""
    if dtype not in FLOATS:
        if dtype.startswith(NARROW):
            quantised = ", so it is quantised, and no scales lie beside it"
        else:
            quantised = ""
        raise CheckpointError(
            f"{where}: {name} is {dtype}{quantised}: expected one of {', '.join(FLOATS)}"
        )


def place(path: str, x: np.ndarray | Stored, axes: Axes, mesh: Mesh | None, dtype: str) -> Any:
    """Places a parameter on its device, or its parts on those of a mesh.

    It is converted by rows, into the memory that it then stays in if the device is a CPU.

    Args:
        path: the parameter's path.
        x: the parameter, in any of `FLOATS`; what still lies in a file is read by rows.
        axes: the network's axes, which decide how it is split.
        mesh: the devices to split it over (`jaxspec.sharding`); None for the default device.
        dtype: a matrix' dtype: "float32", "bfloat16", or "int8" or "int4", which make it entries
            and scales (`weights.quantisation`), or take those that are stored. All other parameters
            are float32.

    Returns:
        The parameter; of a quantised matrix, a dict with its parts.
    """
    matrix = quantisation.is_matrix(keys(path), x)
    scheme = quantisation.kind_of(keys(path), dtype)
    if matrix and scheme is not None:
        if isinstance(x, Quantised) and (x.floats or f"int{x.bits}" in (scheme, "int4")):
            parts: Mapping[str, Any] = _parts(path, x, scheme)
        elif len(x.shape) == 3:
            # experts, one at a time: all in float32 would be twice what a file of bfloat16 has
            stack = [_rounded(x[i : i + 1], scheme) for i in range(x.shape[0])]
            parts = {
                name: np.concatenate([np.asarray(z[name]) for z in stack]) for name in stack[0]
            }
        else:
            parts = _rounded(x, scheme)
        return {name: put(f"{path}/{name}", array, axes, mesh) for name, array in parts.items()}
    y = _converted(x, jnp.dtype(dtype if matrix else "float32"))
    if mesh is not None:
        return put(path, y, axes, mesh)
    return jax.block_until_ready(jax.device_put(y, may_alias=True))


def _rounded(x: np.ndarray | Stored, scheme: str) -> dict[str, jax.Array]:
    """Quantises a matrix; waited for, so that one at a time is in float32."""
    return jax.block_until_ready(
        quantisation.quantise_matrix(_converted(x, jnp.dtype("float32")), scheme)
    )


def _parts(path: str, x: Quantised, scheme: str) -> dict[str, np.ndarray]:
    """Returns the parts of a matrix that is stored quantised, with entries of a wider or of the
    same kind.
    """
    if x.columns is not None:
        order = f"{path} is stored with its columns in groups of another order (GPTQ's desc_act)"
        raise CheckpointError(
            f'{order}: load it with dtype="bfloat16", or a model that was quantised without'
        )
    # The file's own numbers stay so where there are 4 bits for them; their scales are powers of
    # two, as bfloat16 holds.
    stored = x.entries
    is_float4 = x.floats and scheme == "int4"
    if is_float4:
        stored = Stored(
            stored.shape, FLOAT4.dtype, lambda start, stop: FLOAT4[x.entries[start:stop] + 12]
        )
    # [..., out, in] -> [..., G, out, width], as `nets.quantised` multiplies them.
    entries = _converted(stored, stored.dtype)
    groups = x.scale.shape[-1]
    if groups > 1:
        entries = entries.reshape(*entries.shape[:-1], groups, -1).swapaxes(-3, -2)
    if is_float4:
        return {"float4": entries, "scale": (2 * x.scale).astype(jnp.bfloat16)}
    parts = {
        scheme: entries.astype(scheme, copy=False),
        "scale": _converted(x.scale, jnp.dtype("float32")),
    }
    if x.zero is None:
        return parts
    return parts | {"zero": _converted(x.zero, jnp.dtype("int8"))}


def _converted(x: np.ndarray | Stored, dtype: Any) -> np.ndarray:
    """Copies into memory that nothing else refers to, at an address from which a CPU device takes
    it over.
    """
    if not x.shape:
        return np.array(x, dtype)
    size = int(np.prod(x.shape)) * dtype.itemsize
    # At an aligned address jax takes the memory over, so the parameter is in it once.
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    copy = memory[start : start + size].view(dtype).reshape(x.shape)
    for rows in chunks(x):
        copy[rows] = x[rows]
    return copy


def put(path: str, x: np.ndarray | jax.Array, axes: Axes, mesh: Mesh | None) -> jax.Array:
    """Places a parameter on its device, or its parts on a mesh's devices, unchanged.

    The file's own memory is let go of: what comes from NumPy is copied, and that is waited for.
    """
    if mesh is not None:
        return jax.block_until_ready(sharding.put(x, sharding.of(path, x.shape, axes, mesh)))
    return jax.block_until_ready(token_rows.on_device(x))


def apart(x: Any) -> jax.Array:
    """Wraps the same buffers in a new array, so that its cached copy on the host is freed with it.

    A `jax.Array` and its parts keep the copy that `np.asarray` makes of it for as long as they
    live. On one CPU device nothing is copied.
    """
    if not isinstance(x, jax.Array):
        return jnp.asarray(x)
    # A new array of the same buffers has no copy on the host yet.
    parts = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """Does what `folders.whole` does, for all processes of `jax.distributed`: the first makes the
    folder and moves it.

    None goes on before it is there. All must see the same files.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "new"
    >>> with beside(folder) as partial:
    ...     _ = (partial / "file").write_text("text")
    >>> (folder / "file").read_text()
    'text'
    """
    if jax.process_count() == 1:
        with folders.whole(folder) as partial:
            yield partial
        return
    from jax.experimental import multihost_utils

    with (
        folders.whole(folder)
        if jax.process_index() == 0
        else contextlib.nullcontext(folder) as partial
    ):
        # Processes that did not make the folder learn its name, which is drawn at random.
        name = np.frombuffer(bytes(partial).ljust(LONGEST_PATH, b"\0"), np.uint8)
        yield Path(os.fsdecode(multihost_utils.broadcast_one_to_all(name).tobytes().rstrip(b"\0")))
        multihost_utils.sync_global_devices("all have written")
    multihost_utils.sync_global_devices("it is in place")


def flat(params: Params, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of a tree by path; `is_leaf` as in `jax.tree.flatten`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def map_by_path(
    make: Callable[[str, Any], Any], params: Params, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Makes a tree of what `make` gives for each path and leaf."""

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        return make(jax.tree_util.keystr(path, simple=True, separator="/"), x)

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_leaf)


def keys(path: str) -> tuple[Any, ...]:
    """Returns a path as `jax.tree_util` has it."""
    return tuple(map(jax.tree_util.DictKey, path.split("/")))


def batches(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Groups arrays for one transfer: at least one, and at most `most` in size.

    >>> list(batches([3, 4, 1, 9, 1], lambda x: x, most=8))
    [[3, 4, 1], [9], [1]]
    """
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + size(item) > most:
            yield batch
            batch = []
            total = 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def nested(by_path: dict[str, Any]) -> Params:
    """Returns the tree of leaves by path."""
    from flax import traverse_util

    return traverse_util.unflatten_dict(by_path, sep="/")


def differences(
    expected: dict[str, Any],
    stored: dict[str, Any],
    shown: Callable[[Any], str] = lambda shape: str(list(shape)),
) -> str:
    """Lists missing, unexpected and wrong parameters, a line each; empty if all match.

    Args:
        expected, stored: shapes by name, or whatever `shown` takes: those that there should be, and
            those that are.
        shown: a shape in words; shapes with equal words count as equal.

    >>> differences({"a": (2,), "b": (3, 4)}, {"b": (4, 3)})
    '\\n  missing (1): a\\n  wrong (1): b is [4, 3], expected [3, 4]'
    """
    parts = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in expected],
        "wrong": [
            f"{name} is {shown(stored[name])}, expected {shown(x)}"
            for name, x in expected.items()
            if name in stored and shown(stored[name]) != shown(x)
        ],
    }
    return "".join(
        f"\n  {difference} ({len(names)}): {some(names)}"
        for difference, names in parts.items()
        if names
    )
