"""Places parameters, caches and batches on a mesh, by one table from logical axes to mesh axes.

Matrices [out, in] are split as in Megatron-LM (Shoeybi et al., arXiv 1909.08053). Projections into
heads and hidden units are split by their outputs and projections back by their inputs, so that a
block needs one sum over devices. Embedding and head are split by vocabulary. Rows of the batch are
split over the data axis. An axis that a mesh axis does not divide is kept whole on every device;
heads are never cut. Once the arguments of a program are placed, the compiler (GSPMD, arXiv
2105.04663) places everything else.

Under `jax.distributed` every process makes the same calls with the same arguments and gets the
whole text. The host looks for stop strings between rounds, so these work only in a single process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxspec.core import Cache, Params, programs
from jaxspec.core.token_rows import AllRows

DATA = "data"
MODEL = "model"
AXES = {DATA, MODEL}  # axes of a mesh
TABLE = {  # logical axis: the mesh axis that it is split over, None for whole
    "batch": DATA,
    "vocab": MODEL,
    "source_vocab": MODEL,  # an encoder's own
    "heads": MODEL,
    "kv_heads": MODEL,
    "ff": MODEL,
    "dim": None,
    "head_dim": None,
    "positions": None,
    "experts": MODEL,
    "stack": None,
    "outputs": MODEL,
    "hidden": None,
}
# the axes of a layer's matrix, by the end of its path; a bias has all but the last
LAYERS = {
    "embedding": ("vocab", "dim"),
    "encoder_embedding": ("source_vocab", "dim"),
    "position": ("positions", "dim"),
    "head": ("vocab", "dim"),
    "query": ("heads", "dim"),
    "key": ("kv_heads", "dim"),
    "value": ("kv_heads", "dim"),
    "attention/out": ("dim", "heads"),
    "cross/out": ("dim", "heads"),
    "ff/gate": ("ff", "dim"),
    "ff/wi": ("ff", "dim"),
    "ff/out": ("dim", "ff"),
    # a part of every expert, so that all devices work, whichever experts are chosen
    "experts/inwards": ("stack", "ff", "dim"),
    # Not by hidden units: a TPU would pad a few columns to 128 lanes, copying them in its loop.
    "experts/outwards": ("stack", "outputs", "hidden"),
}
QUANTISED = ("int8", "int4", "float4", "scale", "zero")  # parts of a quantised matrix
CACHE = ("batch", "kv_heads", "positions", "head_dim")


class Axes(NamedTuple):
    """The axes along which a network's parameters may be split."""

    # the number of parts that each logical axis may be cut into: a projection to 2 heads of 64
    # dimensions has 128 outputs, but only 2 parts. An absent axis may be cut anywhere.
    parts: Mapping[str, int] = MappingProxyType({})
    # axes of matrices that `LAYERS` lacks, in its form
    layers: Mapping[str, tuple[str, ...]] = MappingProxyType({})


WHOLE = Axes()
"""The axes of a model with another network than those of `jaxspec.nets`."""


def mesh(axes: str | Mesh, devices: Sequence[Any] | None = None) -> Mesh:
    """Makes a mesh of the first devices from a description such as "data=2,model=4".

    Args:
        axes: sizes of the axes "data" (rows of a batch) and "model" (parameters and caches); either
            may be left out. Or a mesh of these: the same devices, with axes of the kind that the
            compiler takes care of.
        devices: by default all, including other processes' devices.

    Raises:
        TypeError: it is neither text nor a mesh.
        ValueError: the description cannot be read, devices are missing, or the mesh has other axes.

    >>> dict(mesh("model=1").shape)
    {'data': 1, 'model': 1}
    >>> mesh("model=two")
    Traceback (most recent call last):
    ValueError: the mesh is 'model=two': expected sizes, 1 or more, of the axes data and model, such as data=2,model=4
    """
    if isinstance(axes, Mesh):
        _check(axes)
        return programs.automatic_mesh(axes)
    if not isinstance(axes, str):
        raise TypeError(
            f"the mesh is {axes!r}: expected sizes such as 'data=2,model=4', or a jax.sharding.Mesh"
        )
    sizes = {DATA: 1, MODEL: 1}
    parts = [axis.strip().partition("=") for axis in axes.split(",")]
    names = [name for name, _, _ in parts]
    are_axes = set(names) <= set(sizes) and len(set(names)) == len(names)
    are_sizes = all(size.isdecimal() and int(size) for _, _, size in parts)
    if not (are_axes and are_sizes):
        raise ValueError(
            f"the mesh is {axes!r}: expected sizes, 1 or more, of the axes data and model, such as "
            "data=2,model=4"
        )
    sizes |= {name: int(size) for name, _, size in parts}
    needed = math.prod(sizes.values())
    is_topology = devices is not None  # else the devices of this machine
    if devices is None:
        devices = jax.devices()
    if needed > len(devices):
        if is_topology:
            available = f"and the topology {len(devices)}: choose a larger one"
        else:
            available = (
                f"but jax sees {len(devices)} (jax.devices()); on a CPU, "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} simulates them"
            )
        raise ValueError(f"the mesh {axes} has {needed} devices, {available}")
    kinds = (AxisType.Auto,) * len(sizes)
    try:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices[:needed])
    except AssertionError:
        # jax.make_mesh cannot order a described v4 topology (two devices a chip). Any order will
        # do, since nothing runs on it.
        return Mesh(np.array(devices[:needed]).reshape(*sizes.values()), tuple(sizes), kinds)


def parameters(params: Params, axes: Axes, mesh: Mesh) -> Params:
    """Returns the sharding of every parameter.

    Args:
        params: the parameters of a network of `jaxspec.nets`, or their shapes; also quantised ones
            (`weights.quantisation`). A leaf whose path is in neither table is kept whole.
        axes: the network's (`nets.axes_of`).
        mesh: with axes among "data" and "model".

    >>> tree = {
    ...     "query": {"weight": jax.ShapeDtypeStruct((8, 6), "float32")},
    ...     "norm": {"scale": np.ones(6)},
    ... }
    >>> places = parameters(tree, Axes({"heads": 2}), mesh("model=1"))
    >>> tuple(places["query"]["weight"].spec), tuple(places["norm"]["scale"].spec)
    (('model', None), ())
    """

    def leaf(path: tuple[Any, ...], x: Any) -> NamedSharding:
        return of(jax.tree_util.keystr(path, simple=True, separator="/"), x.shape, axes, mesh)

    return jax.tree_util.tree_map_with_path(leaf, params)


def of(path: str, shape: tuple[int, ...], axes: Axes, mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a parameter, by its path ("layers_0/ff/out/weight") and shape."""
    names = logical(path, axes.layers)
    # A matrix quantised by groups is [groups of columns, rows, columns of a group].
    if len(shape) == len(names) + 1 > 2:
        names = (*names[:-2], names[-1], names[-2])
    return _sharding(names, shape, axes.parts, mesh)


def logical(path: str, layers: Mapping[str, tuple[str, ...]] = WHOLE.layers) -> tuple[str, ...]:
    """Returns the logical axes of a parameter; () if it is kept whole.

    >>> (
    ...     logical("layers_0/ff/out/weight"),
    ...     logical("layers_0/attention/query/bias"),
    ...     logical("norm/scale"),
    ... )
    (('dim', 'ff'), ('heads',), ())
    """
    names = path.split("/")
    is_matrix = names[-2:-1] in (["weight"], ["embedding"])
    if is_matrix and names[-1] in QUANTISED:
        names.pop()  # a part is split like the whole matrix
    layer = names[:-1]
    leaf = names[-1]
    # "attention/out" is looked up before "out".
    ends = "/".join(layer[-2:]), "".join(layer[-1:])
    axes = next((table[end] for end in ends for table in (layers, LAYERS) if end in table), None)
    if axes is None or leaf not in ("weight", "embedding", "bias"):
        return ()
    if leaf == "bias":
        return axes[:-1]
    return axes


def cache(cache: Cache, axes: Axes, mesh: Mesh) -> Cache:
    """Returns the sharding of every leaf of a cache: keys, values and states by rows and heads,
    other leaves by rows.

    >>> keys, log = np.ones((4, 2, 16, 8)), np.ones((4, 6, 24))
    >>> [tuple(x.spec) for x in cache((keys, log), Axes({"kv_heads": 2}), mesh("data=1"))]
    [('data', 'model', None, None), ('data',)]
    """

    def leaf(x: Any) -> NamedSharding:
        # Leaves with four axes have heads: keys, values and recurrent states. The batch comes
        # first.
        return _sharding(CACHE if len(x.shape) == 4 else CACHE[:1], x.shape, axes.parts, mesh)

    return jax.tree.map(leaf, cache)


def rows(tree: Any, batch: int | None, mesh: Mesh) -> Any:
    """Returns the sharding of a batch: leaves with an entry for each row by rows, others whole.

    With `batch=None` everything is whole.

    >>> [tuple(s.spec) for s in rows([np.ones((4, 7)), np.ones(3)], 4, mesh("data=1"))]
    [('data',), ()]
    """

    def leaf(x: Any) -> Any:
        if isinstance(x, AllRows):
            return AllRows(rows(x.value, None, mesh))
        return _sharding(("batch",) if x.shape[:1] == (batch,) else (), x.shape, {}, mesh)

    return jax.tree.map(leaf, tree, is_leaf=lambda node: isinstance(node, AllRows))


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Places an array; each process fills its local devices, without communication.

    Args:
        x: the whole array, the same in every process: PRNG keys, a NumPy array, or a `jax.Array` of
            this process.
        sharding: where to.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x)
        )
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def place(tree: Any, batch: int | None, mesh: Mesh) -> Any:
    """Places leaves that are not on the mesh yet, as `rows` says."""

    def leaf(x: Any, sharding: NamedSharding) -> Any:
        if _mesh(x) == mesh:
            return x
        return put(x, sharding)

    return jax.tree.map(leaf, tree, rows(tree, batch, mesh))


def mesh_of(params: Params) -> Mesh | None:
    """Returns the mesh that parameters were placed on; None on a single device.

    >>> mesh_of({"weight": jax.numpy.ones(2)}) is None
    True
    """
    meshes = {_mesh(leaf) for leaf in jax.tree.leaves(params)}
    own_meshes = {m for m in meshes if m is not None and set(m.axis_names) <= AXES}
    if len(own_meshes) > 1:
        shapes = sorted(
            ",".join(f"{name}={size}" for name, size in m.shape.items()) for m in own_meshes
        )
        raise ValueError(
            f"target and drafter lie on different meshes, {' and '.join(shapes)}: load both with "
            "the same"
        )
    return next(iter(own_meshes), None)


def fetch(tree: Any) -> Any:
    """Fetches a tree as NumPy arrays; parts on devices of other processes are gathered."""

    def leaf(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(leaf, tree)


def kept_whole(axes: Axes, mesh: Mesh) -> list[str]:
    """Lists the axes that the table splits but this mesh cannot, each with the reason.

    >>> kept_whole(Axes({"heads": 4, "ff": 12, "vocab": 10}), mesh("model=1"))
    []
    """
    size = mesh.shape.get(MODEL, 1)
    return [
        f"{name} ({count} is no multiple of {size})"
        for name, count in axes.parts.items()
        if count % size
    ]


def _check(mesh: Any) -> None:
    if not set(mesh.axis_names) <= AXES:
        raise ValueError(
            f"the mesh has the axes {', '.join(mesh.axis_names)}: expected {DATA} and {MODEL}, or "
            "either"
        )


def _mesh(x: Any) -> Mesh | None:
    """Returns the mesh of an array, with Auto axes; None without one."""
    layout = getattr(x, "sharding", None)
    if isinstance(layout, NamedSharding) and isinstance(layout.mesh, Mesh):
        return programs.automatic_mesh(layout.mesh)
    return None


def _sharding(
    axes: tuple[str, ...], shape: tuple[int, ...], parts: Mapping[str, int], mesh: Mesh
) -> NamedSharding:
    _check(mesh)

    def of_axis(axis: str, size: int) -> str | None:
        over = TABLE[axis]
        if over not in mesh.axis_names:
            return None
        # An axis that cannot be cut evenly is kept whole.
        if size % mesh.shape[over] or parts.get(axis, 0) % mesh.shape[over]:
            return None
        return over

    return NamedSharding(mesh, PartitionSpec(*map(of_axis, axes, shape)))
