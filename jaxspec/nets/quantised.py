"""Products with matrices that stay int8 or int4 in memory, so that no float copy of a whole one is
ever made.

A quantised matrix is a dict of arrays. Its entries q ("int8", "int4", or "float4" for mxfp4's
numbers) and its scales s ("scale") stand for w = s q. With zero points z ("zero") they stand for w
= s (q - z):

    a scale per output      entries [out, in]         scale [out, 1]        zero [out, 1]
    a scale per group       entries [G, out, width]   scale [out, G]        zero [out, G]

Stacks of matrices, experts', have one more axis in front of entries, scales and zero points alike;
they are multiplied one by one.

A group is `width` neighbouring columns of a row, so a matrix of G groups is G matrices of one scale
per output, side by side. A scale belongs to an output, so x @ (s q)^T = s (x @ q^T). The entries
are widened to the dtype of x where they are multiplied. Sums are float32. The product is scaled
before it is rounded; the scaled products of groups are added up. Entries have at most 7 bits and
bfloat16 has 8, so widening them is exact in either. Scales are float32; scales of "float4" are
powers of two, in bfloat16. Two habits of XLA would bring the copies back:

Widened weights are the same in every round of a generation, so they are moved out of its loop: all
matrices, as floats, for as long as it runs. Tying the entries to the activations by a barrier
prevents that (`apart_from_loops`).

On CPU, factors are converted to one type in memory before they are multiplied, each matrix in a
separate buffer. There a product is a loop over parts of the matrix (`nets.on_cpu`).

A TPU's compiler does neither. It widens inside the product, a tile at a time, and leaves that in
the loop (tests/test_tpu.py). A barrier would make two layers of Llama 8B in bfloat16 a third
slower: 0.85 million estimated cycles of a v5p in place of 0.64 for a token. Groups are widened in
the same way, because each is a separate matrix here. Scaled first, as [out, in], the whole matrix
would be written to memory.

Shapes: B batch, T step, N = B T, G groups of `width` columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# rows of activations up to which groups are multiplied apart; beyond, their sums would be the
# larger part
APART = 64
# the names and dtypes of entries
ENTRIES = {"int8": jnp.int8, "int4": jnp.int4, "float4": jnp.float4_e2m1fn}
PARTS = (*ENTRIES, "scale", "zero")

Quantised = Mapping[str, Array]
Matrix = Float[Array, "out in"] | Quantised
Precision = jax.lax.Precision | None


def is_quantised(node: Any) -> bool:
    """Tells whether a node of a parameter tree is a quantised matrix: entries, scales and perhaps
    zero points.

    >>> [
    ...     is_quantised(dict.fromkeys(names, 0))
    ...     for names in (("int8", "scale"), ("int4", "scale", "zero"), ("scale",))
    ... ]
    [True, True, False]
    """
    return (
        isinstance(node, Mapping)
        and "scale" in node
        and set(node) - {"scale", "zero"} in [{name} for name in ENTRIES]
    )


def entries_of(matrix: Quantised) -> Array:
    """Returns the entries of a quantised matrix, [out, in] or [G, out, width]."""
    return matrix[entries_name(matrix)]


def entries_name(matrix: Quantised) -> str:
    """Returns which of `ENTRIES` a quantised matrix has."""
    return next(name for name in ENTRIES if name in matrix)


def shape(matrix: Matrix) -> tuple[int, ...]:
    """Returns [out, in], of a quantised matrix too, or [experts, out, in]; other arrays keep their
    shape.

    >>> shape({"int4": jnp.zeros((2, 5, 32), jnp.int4), "scale": jnp.ones((5, 2))})
    (5, 64)
    """
    if not isinstance(matrix, Mapping):
        return jnp.shape(matrix)
    *stack, rows, _ = matrix["scale"].shape
    return (*stack, rows, math.prod(entries_of(matrix).shape) // math.prod((*stack, rows)))


def is_whole(matrix: Quantised) -> bool:
    """Tells whether shapes and types of entries, scales and zero points belong together."""
    entries, scale, zero = entries_of(matrix), matrix["scale"], matrix.get("zero", matrix["scale"])
    # Two forms: [out, in] with a scale a row, or [G, out, width] with a scale a row and group;
    # either in a stack.
    *stack, _, _ = scale.shape
    groups = 1
    if len(entries.shape) == len(stack) + 3:
        groups = entries.shape[len(stack)]
    name = entries_name(matrix)
    shapes = {tuple(scale.shape), tuple(zero.shape)} == {
        (*entries.shape[: len(stack)], entries.shape[-2], groups)
    }
    kinds = entries.dtype == ENTRIES[name] and scale.dtype == (
        jnp.bfloat16 if name == "float4" else jnp.float32
    )
    return (
        len(stack) < 2
        and len(entries.shape) - len(stack) in (2, 3)
        and shapes
        and kinds
        and ("zero" not in matrix or zero.dtype == jnp.int8)
    )


def take_rows(matrix: Matrix, rows: Int[Array, " n"]) -> Matrix:
    """Takes some rows of a matrix, or entries of a vector, without changing its form."""
    if not isinstance(matrix, Mapping):
        return jnp.take(matrix, rows, axis=0)
    return {
        name: jnp.take(x, rows, axis=x.ndim - 2 if name in ENTRIES else 0)
        for name, x in matrix.items()
    }


def widen(matrix: Quantised) -> Float[Array, "*experts out in"]:
    """Computes the float32 matrix that a quantised one stands for, or the stack of matrices.

    >>> matrix = {
    ...     "int4": jnp.array([[[3, 4]], [[-1, 2]]], jnp.int4),
    ...     "scale": jnp.array([[0.5, 2]]),
    ... }
    >>> widen(matrix | {"zero": jnp.array([[1, 0]], jnp.int8)})
    Array([[ 1. ,  1.5, -2. ,  4. ]], dtype=float32)
    """
    if matrix["scale"].ndim == 3:  # experts, one by one
        return jax.lax.map(widen, dict(matrix))
    by_group = _groups_first(matrix["scale"]).astype(jnp.float32)
    # [G, out, width]
    values = entries_of(matrix).astype(jnp.float32).reshape(*by_group.shape[:2], -1)
    if "zero" in matrix:
        values = values - _groups_first(matrix["zero"]).astype(jnp.float32)
    return (values * by_group).swapaxes(0, 1).reshape(by_group.shape[1], -1)


def _groups_first(x: Array) -> Array:
    """[out, G] -> [G, out, 1]."""
    return x.T[:, :, None]


def product(
    x: Float[Array, "B T in"],
    matrix: Quantised,
    precision: Precision = None,
    how: Callable[[Array, Quantised, Precision], Array] | None = None,
) -> Float[Array, "B T out"]:
    """Multiplies `x @ widen(matrix).T`, summed and scaled in float32.

    Args:
        x: activations; the product has their dtype.
        matrix: quantised.
        precision: the product's precision; see `dense.precision`.
        how: how the entries are multiplied, which depends on the backend: `at_once` (None),
            `apart_from_loops`, `on_cpu.quantised_product`.

    >>> matrix = {"int8": jnp.array([[3, 4], [5, 6]], jnp.int8), "scale": jnp.array([[1.0], [0.5]])}
    >>> product(jnp.array([[[1.0, 2.0]]]), matrix).tolist()
    [[[11.0, 8.5]]]
    """
    return (how or at_once)(x, matrix, precision).astype(x.dtype)


def at_once(
    x: Float[Array, "B T in"], matrix: Quantised, precision: Precision
) -> Float[Array, "B T out"]:
    """Multiplies with the entries in the dtype of `x`, sums in float32, and scales.

    With groups, few rows of activations are multiplied with each group separately and the sums are
    scaled, so that only the entries are read. Of many rows these sums [G, N, out] would be more
    than the matrix: it is scaled inside of the product, and rounded to the dtype of `x`.
    """
    entries = entries_of(matrix)
    scale = matrix["scale"].astype(jnp.float32)
    zero = matrix.get("zero")
    if entries.ndim == 2:
        sums = _dot(x, entries.astype(x.dtype), (((2,), (1,)), ((), ())), precision)  # [B, T, out]
        if zero is not None:
            # (q - z) x = q x - z sum(x): zero points cost one sum of activations, and no second
            # matrix.
            sums -= (
                x.astype(jnp.float32).sum(axis=2, keepdims=True)
                * zero[:, 0].astype(jnp.float32)[None, None, :]
            )
        return sums * scale[:, 0][None, None, :]
    groups, rows, width = entries.shape
    parts = x.reshape(-1, groups, width)  # [N, G, width]
    if len(parts) > APART:
        # Many rows: the matrix is widened once, and its cost is shared by all of them.
        values = entries.astype(jnp.float32)
        if zero is not None:
            values = values - _groups_first(zero).astype(jnp.float32)
        values = (values * _groups_first(scale)).astype(x.dtype)
        y = _dot(parts, values, (((1, 2), (0, 2)), ((), ())), precision)
    else:
        # Few rows: sums of groups stay apart, so that entries are multiplied as they are and scaled
        # afterwards. The sums are [G, N, out].
        sums = _dot(parts, entries.astype(x.dtype), (((2,), (2,)), ((1,), (0,))), precision)
        if zero is not None:
            sums -= (
                parts.astype(jnp.float32).sum(axis=2).T[:, :, None]
                * zero.astype(jnp.float32).T[:, None, :]
            )
        y = (sums * scale.T[:, None, :]).sum(axis=0)
    return y.reshape(*x.shape[:-1], rows)


def _dot(x: Array, y: Array, axes: Any, precision: Precision) -> Array:
    return jax.lax.dot_general(x, y, axes, precision, preferred_element_type=jnp.float32)


def rows(tokens: Int[Array, "*shape"], matrix: Quantised) -> Float[Array, "*shape dim"]:
    """Reads some rows of the matrix, in float32.

    One row is read together with a second one: for a single row a TPU's compiler copies the whole
    matrix into another layout first, in every step (0.5 GB of Llama 3.1 8B).

    >>> matrix = {"int8": jnp.array([[3, 4], [5, 6]], jnp.int8), "scale": jnp.array([[1.0], [0.5]])}
    >>> rows(jnp.array([1]), matrix).tolist()
    [[2.5, 3.0]]
    """
    flat = tokens.reshape(-1)
    few = take_rows(matrix, jnp.pad(flat, (0, 1)) if flat.size == 1 else flat)
    # The barrier keeps the look-up before the widening: the other way round the whole matrix would
    # be widened.
    vectors = widen(jax.lax.optimization_barrier(few))[: flat.size]
    return vectors.reshape(*tokens.shape, vectors.shape[1])


def apart_from_loops(
    x: Float[Array, "B T in"], matrix: Quantised, precision: Precision
) -> Float[Array, "B T out"]:
    """Multiplies as `at_once` does, where a loop's body is, and not before the loop."""
    x, matrix = jax.lax.optimization_barrier((x, dict(matrix)))
    return at_once(x, matrix, precision)
