"""Matrices as int8 or int4, with float32 scales: pure functions on parameter trees.

A network computes with such matrices as they are (`jaxspec.nets.quantised`, which has their form),
and checkpoints may store them. A channel is a row of a weight [out, in] or of an embedding [vocab,
dim]. Norm scales, biases and tables of position biases are small and stay as they are.

int8: a channel w becomes q = round(w / s) with s = max|w| / 127, and is read back as s * q: no
entry moves by more than s / 2.

int4: the same for groups of a row, `GROUPS` columns each, with s = r m / -8. The entry m has the
largest magnitude. Its sign gets the longer side of the grid, which reaches from -8 to 7. The ratio
r is the one in `RATIOS` with the least squared error. A ratio below 1 cuts off a few large entries
and brings all others nearer: normal weights then have 0.89 of the error that they have with r = 1.
Embeddings and heads are int8, as in most published files of 4 bits.

A scale keeps 17 of float32's 24 significant bits. |q| needs 7, so s * q is exact. Reading back
gives the same bits on every backend, fused or not. Quantising the result gives the same q and s
again. (With all 24 bits, s * 127 / 127 misses s by a rounding for one s in 129.)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.core import Params
from jaxspec.nets import quantised
from jaxspec.nets.quantised import Quantised, is_quantised

LARGEST = 127  # -128 is not used: the grid is symmetric
DTYPES = ("int8", "int4")  # of quantised matrices
# columns of int4 that share a scale: as many as divide a row, else all of it
GROUPS = (128, 64, 32)
RATIOS = (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of int4 scales; the first where errors are alike
MATRICES = ("weight", "embedding")  # the names of leaves whose rows are channels
HEAD = "head"  # the module whose weight makes logits


def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Tells whether a leaf is a matrix of weights, or several in one array: experts'.

    Args:
        path: the leaf's path in its tree, as `jax.tree_util` gives it; its last name tells the kind
            of the leaf.
    """
    return jax.tree_util.keystr(path[-1:], simple=True) in MATRICES and len(leaf.shape) > 1


def kind_of(path: tuple[Any, ...], dtype: Any) -> str | None:
    """Returns the type of a matrix's entries in a dtype: "int8", "int4", or None if it is not
    quantised.

    >>> weight = tuple(map(jax.tree_util.DictKey, ("ff", "wi", "weight")))
    >>> head = tuple(map(jax.tree_util.DictKey, ("head", "weight")))
    >>> kind_of(weight, "int4"), kind_of(head, "int4"), kind_of(weight, "bfloat16")
    ('int4', 'int8', None)
    """
    names = jax.tree_util.keystr(path[-2:], simple=True, separator="/").split("/")
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return None
    if names[-1] != "weight" or HEAD in names:
        return "int8"
    return name


def as_dtype(path: tuple[Any, ...], leaf: Any, dtype: Any) -> Any:
    """Converts a leaf to a dtype: matrices are cast or quantised; others stay.

    A quantised matrix stays as it is, or gets wider entries. A dtype of floats restores its values.
    """
    scheme = kind_of(path, dtype)
    if is_quantised(leaf):
        name = quantised.entries_name(leaf)
        if scheme == name or (scheme == "int4" and name == "float4"):
            return leaf
        if scheme == "int8" and name == "int4":
            return {"int8": leaf["int4"].astype(jnp.int8)} | {
                name: x for name, x in leaf.items() if name != "int4"
            }
        if scheme == "int8":  # twice each number is an integer
            entries = (2 * leaf["float4"].astype(jnp.float32)).astype(jnp.int8)
            return {"int8": entries, "scale": leaf["scale"].astype(jnp.float32) / 2}
        leaf = dequantise_matrix(leaf)
    if not is_matrix(path, leaf):
        return leaf
    if scheme is None:
        return leaf.astype(dtype)
    return quantise_matrix(leaf, scheme)


def quantise(params: Params, dtype: str = "int8") -> Params:
    """Replaces each matrix by its entries and scales; in another dtype it casts them. Other leaves
    stay as they are.

    >>> layer = {"weight": jnp.array([[0.5, -1.0], [2.0, 0.25]]), "bias": jnp.array([0.1, 0.2])}
    >>> stored = quantise(layer)
    >>> stored["weight"]["int8"].tolist(), stored["weight"]["scale"].shape, stored["bias"].shape
    ([[64, -127], [127, 16]], (2, 1), (2,))
    >>> quantise(layer, "int4")["weight"]["int4"].tolist()
    [[4, -8], [-8, -1]]
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: as_dtype(path, x, dtype), params, is_leaf=is_quantised
    )


def dequantise(params: Params) -> Params:
    """Undoes `quantise`, but for the rounding: every quantised matrix becomes a float32 matrix
    again.

    >>> stored = {
    ...     "weight": {"int8": jnp.array([[64, -127]], jnp.int8), "scale": jnp.array([[0.5]])}
    ... }
    >>> dequantise(stored)["weight"].tolist()
    [[32.0, -63.5]]
    """
    return jax.tree.map(
        lambda x: dequantise_matrix(x) if is_quantised(x) else x, params, is_leaf=is_quantised
    )


def count(params: Params) -> int:
    """Counts weights; scales and zero points of quantised matrices are not counted.

    >>> count(
    ...     {
    ...         "weight": {"int8": jnp.ones((4, 8), jnp.int8), "scale": jnp.ones((4, 1))},
    ...         "bias": jnp.ones(4),
    ...     }
    ... )
    36
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantised)
    return sum((quantised.entries_of(x) if is_quantised(x) else x).size for x in leaves)


def nbytes(params: Any) -> int:
    """Counts the bytes of a tree of arrays, or of their shapes: two int4 entries are one.

    >>> nbytes(
    ...     {
    ...         "int4": jax.ShapeDtypeStruct((4, 8, 32), jnp.int4),
    ...         "scale": jax.ShapeDtypeStruct((8, 4), jnp.float32),
    ...     }
    ... )
    640
    """
    return sum(x.size * bits(x.dtype) // 8 for x in jax.tree.leaves(params))


def bits(dtype: Any) -> int:
    """Returns the bits of an array's entry in memory; 4 where NumPy counts the 8 that it takes on
    the host.
    """
    dtype = jnp.dtype(dtype)
    if dtype in (jnp.int4, jnp.float4_e2m1fn):
        return 4
    return 8 * dtype.itemsize


def computation(dtype: str, compute: str | None = None) -> str:
    """Returns the dtype that a model computes in, whose matrices are of this one.

    Args:
        compute: around quantised matrices, "float32" or "bfloat16"; None for float32 on a CPU, and
            bfloat16 on a GPU or TPU, where float32 products take several passes and caches twice
            the memory.

    >>> computation("bfloat16"), computation("int8", "bfloat16")
    ('bfloat16', 'bfloat16')
    """
    if dtype not in DTYPES:
        return dtype
    return compute or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def has_quantised(params: Params) -> bool:
    """Tells whether any matrix is quantised."""
    return any(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised)))


def dtype_of(params: Params, computed: str) -> str:
    """Names the dtype of parameters as the command line has it; "int8" or "int4" alone is computed
    in float32.

    >>> layer = {"weight": {"int8": jnp.ones((4, 8), jnp.int8), "scale": jnp.ones((4, 1))}}
    >>> dtype_of(layer, "float32"), dtype_of(layer, "bfloat16"), dtype_of({}, "bfloat16")
    ('int8', 'int8/bfloat16', 'bfloat16')
    """
    kinds = [x for x in jax.tree.leaves(params, is_leaf=is_quantised) if is_quantised(x)]
    if not kinds:
        return computed
    if all("int8" in x for x in kinds):
        name = "int8"
    else:
        name = "int4"
    if computed == "float32":
        return name
    return f"{name}/{computed}"


@functools.partial(jax.jit, static_argnames="dtype")
def quantise_matrix(
    matrix: Float[Array, "*experts rows columns"], dtype: str = "int8"
) -> dict[str, Array]:
    """Quantises one matrix, whose channels are its rows, or a stack. A channel or group of zeros
    has scale 1.
    """
    if matrix.ndim == 3:  # one by one: the search for scales holds several copies
        return jax.lax.map(functools.partial(quantise_matrix, dtype=dtype), matrix)
    matrix = matrix.astype(jnp.float32)
    if dtype == "int8":
        scale = jnp.max(jnp.abs(matrix), axis=1, keepdims=True) / LARGEST
        scale = _shortened(scale)
        return {"int8": jnp.round(matrix / scale).astype(jnp.int8), "scale": scale}
    rows, columns = matrix.shape
    width = next((size for size in GROUPS if columns % size == 0), columns)
    groups = matrix.reshape(rows, -1, width)
    # [out, G]
    low = groups.min(axis=2)
    high = groups.max(axis=2)
    largest = jnp.where(-low >= high, low, high)
    best = None
    for ratio in RATIOS:
        # The grid reaches from -8 to 7, so the entry of largest magnitude is put on its longer
        # side.
        scale = _shortened(ratio * largest / -8)
        entries = jnp.clip(jnp.round(groups / scale[:, :, None]), -8, 7)
        error = jnp.square(entries * scale[:, :, None] - groups).sum(axis=2)
        tried = error, scale, entries.astype(jnp.int8)
        if best is None:
            best = tried
        else:
            best = jax.tree.map(functools.partial(_where, error < best[0]), tried, best)
    assert best is not None
    # [out, G, width] -> [G, out, width]: each group is a matrix of one scale per output.
    entries = best[2].astype(jnp.int4).swapaxes(0, 1)
    return {"int4": entries if len(entries) > 1 else entries[0], "scale": best[1]}


def _where(better: Array, new: Array, old: Array) -> Array:
    return jnp.where(better if new.ndim == 2 else better[:, :, None], new, old)


def _shortened(scale: Array) -> Array:
    # 16 bits after the first one: with q of 7 bits the product has 24, and is exact.
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=16)
    # Subnormal scales may be flushed to 0: such a channel is all zeros to within a float's smallest
    # number.
    return jnp.where(jnp.abs(scale) < jnp.finfo(jnp.float32).tiny, 1.0, scale)


@jax.jit
def dequantise_matrix(matrix: Quantised) -> Float[Array, "*experts rows columns"]:
    """Returns the matrix that a quantised one stands for."""
    return quantised.widen(matrix)
