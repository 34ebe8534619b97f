"""Matrices as int8 with one float32 scale per channel, symmetric: pure functions on parameter trees.

A network computes with such matrices as they are (`jaxspec.nets.quantised`), and checkpoints may store them.

A channel w becomes q = round(w / s) with s = max|w| / 127, and is read back as s * q: no entry moves by more
than s / 2. A channel is a row of a weight [out, in] or of an embedding [vocab, dim]; every
other leaf (norm scales, biases, tables of position biases) is small and stays as it is.

A scale keeps 17 of float32's 24 significant bits. |q| needs 7, so s * q is exact: reading back gives the same
bits on every backend, fused or not, and quantising what was read back gives the same q and s again. (With all
24 bits, s * 127 / 127 misses s by a rounding for one s in 129.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jaxspec.core import Params
from jaxspec.nets.quantised import is_quantised

LARGEST = 127  # -128 is not used: the grid is symmetric
MATRICES = ("weight", "embedding")  # the names of leaves whose rows are channels


def is_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Tells whether a leaf is a matrix of weights.

    Args:
        path: of the leaf in its tree, as `jax.tree_util` gives it; its last name says what the leaf is.
        leaf: anything with a shape.
    """
    return jax.tree_util.keystr(path[-1:], simple=True) in MATRICES and len(leaf.shape) == 2


def as_dtype(path: tuple[Any, ...], leaf: Any, dtype: Any) -> Any:
    """Makes a leaf what it is in a dtype: matrices are cast, or quantised if it is int8; others stay."""
    if not is_matrix(path, leaf):
        return leaf
    return quantise_matrix(leaf) if jnp.dtype(dtype) == jnp.int8 else leaf.astype(dtype)


def quantise(params: Params) -> Params:
    """Replaces each matrix by {"int8": entries, "scale": one float32 per row}.

    >>> layer = {"weight": jnp.array([[0.5, -1.0], [2.0, 0.25]]), "bias": jnp.array([0.1, 0.2])}
    >>> stored = quantise(layer)
    >>> stored["weight"]["int8"].tolist(), stored["weight"]["scale"].shape, stored["bias"].shape
    ([[64, -127], [127, 16]], (2, 1), (2,))
    """

    return jax.tree_util.tree_map_with_path(lambda path, x: as_dtype(path, x, jnp.int8), params)


def dequantise(params: Params) -> Params:
    """Undoes `quantise`, but for the rounding: every {"int8", "scale"} becomes a float32 matrix again.

    >>> stored = {"weight": {"int8": jnp.array([[64, -127]], jnp.int8), "scale": jnp.array([[0.5]])}}
    >>> dequantise(stored)["weight"].tolist()
    [[32.0, -63.5]]
    """

    def leaf(x: Any) -> Any:
        return dequantise_matrix(**x) if is_quantised(x) else x

    return jax.tree.map(leaf, params, is_leaf=is_quantised)


def count(params: Params) -> int:
    """Counts weights; the scales of int8 matrices are not counted.

    >>> count({"weight": {"int8": jnp.ones((4, 8), jnp.int8), "scale": jnp.ones((4, 1))}, "bias": jnp.ones(4)})
    36
    """
    leaves = jax.tree.leaves(params, is_leaf=is_quantised)
    return sum((x["int8"] if is_quantised(x) else x).size for x in leaves)


def computation(dtype: str, compute: str | None = None) -> str:
    """Returns the dtype that a model computes in, whose matrices are of this one.

    Args:
        dtype: of the matrices.
        compute: around int8 matrices, "float32" or "bfloat16"; None for float32 on a CPU, and bfloat16 on a GPU or
            TPU, where float32 products take several passes and caches twice the memory.

    >>> computation("bfloat16"), computation("int8", "bfloat16")
    ('bfloat16', 'bfloat16')
    """
    if dtype != "int8":
        return dtype
    return compute or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def has_int8(params: Params) -> bool:
    """Tells whether any matrix is int8."""
    return any(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised)))


def dtype_of(params: Params, computed: str) -> str:
    """Names the dtype of parameters as the command line has it; "int8" alone is computed in float32.

    >>> layer = {"weight": {"int8": jnp.ones((4, 8), jnp.int8), "scale": jnp.ones((4, 1))}}
    >>> dtype_of(layer, "float32"), dtype_of(layer, "bfloat16"), dtype_of({}, "bfloat16")
    ('int8', 'int8/bfloat16', 'bfloat16')
    """
    return computed if not has_int8(params) else "int8" if computed == "float32" else f"int8/{computed}"


@jax.jit
def quantise_matrix(matrix: Float[Array, "rows columns"]) -> dict[str, Array]:
    """Quantises one matrix, whose channels are its rows. A channel of zeros has scale 1."""
    matrix = matrix.astype(jnp.float32)
    scale = jnp.max(jnp.abs(matrix), axis=1, keepdims=True) / LARGEST
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=16)
    # Subnormal scales may be flushed to 0: such a channel is all zeros to within a float's smallest number.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    return {"int8": jnp.round(matrix / scale).astype(jnp.int8), "scale": scale}


@jax.jit
def dequantise_matrix(int8: Int8[Array, "rows columns"], scale: Array) -> Float[Array, "rows columns"]:
    """Returns the matrix that an int8 one stands for."""
    return int8.astype(jnp.float32) * scale
