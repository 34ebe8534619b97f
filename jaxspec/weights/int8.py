"""Matrices as int8 with one float32 scale per channel, symmetric: pure functions on parameter trees.

A channel w becomes q = round(w / s) with s = max|w| / 127, and is read back as s * q: no entry moves by more
than s / 2. A channel is an output column of a kernel [in, out], or a row of an embedding [vocab, dim]; every
other leaf (norm scales, biases, tables of position biases) is small and stays as it is.

A scale keeps 17 of float32's 24 significant bits. |q| needs 7, so s * q is exact: reading back gives the same
bits on every backend, fused or not, and quantising what was read back gives the same q and s again. (With all
24 bits, s * 127 / 127 misses s by a rounding for one s in 129.)
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jaxspec.base import Params

LARGEST = 127  # -128 is not used: the grid is symmetric
WITHIN = {"kernel": 0, "embedding": 1}  # the axis of a matrix along which a channel runs


def channel_axis(path: tuple[Any, ...], leaf: Any) -> int | None:
    """The axis along which the channels of a leaf run; None for leaves that are not matrices of weights.

    Args:
        path: of the leaf in its tree, as `jax.tree_util` gives it; its last name says what the leaf is.
        leaf: anything with a shape.
    """
    name = jax.tree_util.keystr(path[-1:], simple=True)
    return WITHIN.get(name) if len(leaf.shape) == 2 else None


def quantise(params: Params) -> Params:
    """Replaces each matrix by {"int8": entries, "scale": one float32 per channel, its other axis kept as 1}.

    >>> layer = {"kernel": jnp.array([[0.5, 2.0], [-1.0, 0.25]]), "bias": jnp.array([0.1, 0.2])}
    >>> stored = quantise(layer)
    >>> stored["kernel"]["int8"].tolist(), stored["kernel"]["scale"].shape, stored["bias"].shape
    ([[64, 127], [-127, 16]], (1, 2), (2,))
    """

    def leaf(path: tuple[Any, ...], x: Array) -> Any:
        axis = channel_axis(path, x)
        return x if axis is None else quantise_matrix(x, axis)

    return jax.tree_util.tree_map_with_path(leaf, params)


def dequantise(params: Params) -> Params:
    """Undoes `quantise`, but for the rounding: every {"int8", "scale"} becomes a float32 matrix again.

    >>> stored = {"kernel": {"int8": jnp.array([[64], [-127]], jnp.int8), "scale": jnp.array([[0.5]])}}
    >>> dequantise(stored)["kernel"].tolist()
    [[32.0], [-63.5]]
    """

    def leaf(x: Any) -> Any:
        return dequantise_matrix(**x) if _is_quantised(x) else x

    return jax.tree.map(leaf, params, is_leaf=_is_quantised)


@functools.partial(jax.jit, static_argnames="axis")
def quantise_matrix(matrix: Float[Array, "rows columns"], axis: int) -> dict[str, Array]:
    """One matrix whose channels run along `axis`. A channel of zeros has scale 1."""
    matrix = matrix.astype(jnp.float32)
    scale = jnp.max(jnp.abs(matrix), axis=axis, keepdims=True) / LARGEST
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=16)
    # Subnormal scales may be flushed to 0: such a channel is all zeros to within a float's smallest number.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    return {"int8": jnp.round(matrix / scale).astype(jnp.int8), "scale": scale}


@jax.jit
def dequantise_matrix(int8: Int8[Array, "rows columns"], scale: Array) -> Float[Array, "rows columns"]:
    """The matrix that an int8 one stands for."""
    return int8.astype(jnp.float32) * scale


def _is_quantised(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == {"int8", "scale"}
