"""Products with matrices that stay int8 in memory, so that no float copy of a whole one is ever made.

A scale belongs to an output, so x @ (s q)^T = s (x @ q^T): the entries q are widened where they are multiplied, and
the product is scaled. Two habits of XLA would bring the copies back:

Widened weights are the same in every round of a generation, so they are moved out of its loop: all matrices, as
floats, for as long as it runs. Tying the entries to the activations by a barrier prevents that.

On CPU, factors are made one type in memory before they are multiplied, each matrix in a buffer of its own. There
a product is a loop over blocks of rows, whose buffer is small, stays in cache and is shared by all products.
On GPU and TPU widening is left to the compiler, which can fuse it with the product.

Shapes: B batch, T step, N = B T.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

BLOCK = 2**20  # bytes that a block of rows may have in float32: what a core's cache holds
SMALL = 2**14  # bytes in float32 up to which a matrix is widened at once: a loop would cost more than it saves

Matrix = Float[Array, "out in"] | Mapping[str, Array]


def is_quantised(node: Any) -> bool:
    """Tells whether a node of a parameter tree is an int8 matrix: {"int8": [out, in], "scale": [out, 1]}."""
    return isinstance(node, Mapping) and set(node) == {"int8", "scale"}


def product(
    x: Float[Array, "B T in"],
    int8: Int8[Array, "out in"],
    scale: Float[Array, "out 1"],
    precision: jax.lax.Precision | None = None,
) -> Float[Array, "B T out"]:
    """Multiplies `x @ (int8 * scale).T`, summed and scaled in float32; `dense.precision` says of what precision.

    >>> product(jnp.array([[[1.0, 2.0]]]), jnp.array([[3, 4], [5, 6]], jnp.int8), jnp.array([[1.0], [0.5]])).tolist()
    [[[11.0, 8.5]]]
    """
    by_blocks, widened = (functools.partial(f, precision=precision) for f in (_by_blocks, _widened))
    y = jax.lax.platform_dependent(x, int8, cpu=by_blocks, default=widened)
    return (y * scale[:, 0][None, None, :]).astype(x.dtype)


def rows(
    tokens: Int[Array, "*shape"], int8: Int8[Array, "vocab dim"], scale: Float[Array, "vocab 1"]
) -> Float[Array, "*shape dim"]:
    """Reads some rows of the matrix, in float32.

    >>> rows(jnp.array([1]), jnp.array([[3, 4], [5, 6]], jnp.int8), jnp.array([[1.0], [0.5]])).tolist()
    [[2.5, 3.0]]
    """
    return jnp.take(int8, tokens, axis=0).astype(jnp.float32) * jnp.take(scale, tokens, axis=0)


def block_rows(rows: int, columns: int) -> int:
    """Chooses how many rows a block has: as many as fit, at most half of them, and a divisor of them if one is near.

    Half, since a loop that runs once is none, and what it widens would be moved out of generation's loop again.

    >>> block_rows(256, 256), block_rows(32128, 4096), block_rows(50257, 768)  # 50257 is 29 times 1733
    (128, 64, 341)
    """
    most = max(1, min(rows // 2, BLOCK // (4 * columns)))
    return max(range(most // 2 + 1, most + 1), key=lambda size: (rows % size == 0, size))


Precision = jax.lax.Precision | None


def _widened(x: Float[Array, "B T in"], int8: Int8[Array, "out in"], precision: Precision) -> Float[Array, "B T out"]:
    x, int8 = jax.lax.optimization_barrier((x, int8))
    axes = (((2,), (1,)), ((), ()))
    return jax.lax.dot_general(x, int8.astype(x.dtype), axes, precision, preferred_element_type=jnp.float32)


def _by_blocks(x: Float[Array, "B T in"], int8: Int8[Array, "out in"], precision: Precision) -> Float[Array, "B T out"]:
    """Cuts six rows into three blocks as 0 and 3, 1 and 4, 2 and 5: rows that are split over devices stay there.

    Five rows in three blocks: 0 and 1, 2 and 3, 3 and 4; row 3 is left out of the last.
    """
    if 4 * int8.size <= SMALL:
        return _widened(x, int8, precision)
    (rows, columns), flat = int8.shape, x.reshape(-1, x.shape[-1])  # flat: [N, in]
    size = block_rows(rows, columns)
    count, even = -(-rows // size), rows % size == 0

    def block(i: Int[Array, ""]) -> Float[Array, "size N"]:
        if even:  # rows i, count + i, 2 count + i, ...
            part = jax.lax.dynamic_index_in_dim(int8.reshape(size, count, columns), i, axis=1, keepdims=False)
        else:  # the last block begins earlier than its turn, to be as large as the others
            part = jax.lax.dynamic_slice_in_dim(int8, jnp.minimum(i * size, rows - size), size)
        axes = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(part.astype(x.dtype), flat, axes, precision, preferred_element_type=jnp.float32)

    y: Float[Array, "count size N"] = jax.lax.map(block, jnp.arange(count, dtype=jnp.int32))
    if even:
        y = y.transpose(1, 0, 2).reshape(rows, -1)  # back into the order of the rows
    else:  # of the last block only what the ones before it have not got
        y = jnp.concatenate([y[:-1].reshape(-1, flat.shape[0]), y[-1, count * size - rows :]])
    return y.T.reshape(*x.shape[:-1], rows)
