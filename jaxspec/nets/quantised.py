"""Products with matrices that stay int8 in memory, so that no float copy of a whole one is ever made.

A scale belongs to an output, so x @ (s q)^T = s (x @ q^T): the entries q are widened where they are multiplied, to the
dtype of x, sums are float32, and the product is scaled before it is rounded. Entries have 7 bits and bfloat16 has 8, so
widening them is exact in either. Two habits of XLA would bring the copies back:

Widened weights are the same in every round of a generation, so they are moved out of its loop: all matrices, as
floats, for as long as it runs. Tying the entries to the activations by a barrier prevents that (`apart_from_loops`).

On CPU, factors are made one type in memory before they are multiplied, each matrix in a buffer of its own. There
a product is a loop over blocks of rows, whose buffer is small, stays in cache and is shared by all products
(`by_blocks`).

A TPU's compiler does neither: it widens inside of the product, a tile at a time, where it multiplies, and leaves that
in the loop (tests/test_tpu.py). A barrier would cost it a third, of two layers of Llama 8B in bfloat16: 0.85 million
estimated cycles of a v5p in place of 0.64 for a token.

Shapes: B batch, T step, N = B T.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


Precision = jax.lax.Precision | None
Entries = Int8[Array, "out in"]


def widened(x: Float[Array, "B T in"], int8: Entries, precision: Precision) -> Float[Array, "B T out"]:
    """Multiplies with the entries alone, in the dtype of `x`, summed in float32."""
    axes = (((2,), (1,)), ((), ()))
    return jax.lax.dot_general(x, int8.astype(x.dtype), axes, precision, preferred_element_type=jnp.float32)


def product(
    x: Float[Array, "B T in"],
    int8: Int8[Array, "out in"],
    scale: Float[Array, "out 1"],
    precision: Precision = None,
    how: Callable[[Array, Array, Precision], Array] = widened,
) -> Float[Array, "B T out"]:
    """Multiplies `x @ (int8 * scale).T`, summed and scaled in float32.

    Args:
        x: activations, whose dtype is that of the product.
        int8, scale: the matrix.
        precision: of the product; see `dense.precision`.
        how: how the entries are multiplied, which depends on the backend: `widened`, `apart_from_loops`, `by_blocks`.

    >>> product(jnp.array([[[1.0, 2.0]]]), jnp.array([[3, 4], [5, 6]], jnp.int8), jnp.array([[1.0], [0.5]])).tolist()
    [[[11.0, 8.5]]]
    """
    return (how(x, int8, precision) * scale[:, 0][None, None, :]).astype(x.dtype)


def rows(
    tokens: Int[Array, "*shape"], int8: Int8[Array, "vocab dim"], scale: Float[Array, "vocab 1"]
) -> Float[Array, "*shape dim"]:
    """Reads some rows of the matrix, in float32.

    One row is read as one of two: for a single one a TPU's compiler copies the whole matrix into another layout first,
    in every step (0.5 GB of Llama 3.1 8B).

    >>> rows(jnp.array([1]), jnp.array([[3, 4], [5, 6]], jnp.int8), jnp.array([[1.0], [0.5]])).tolist()
    [[2.5, 3.0]]
    """
    flat = tokens.reshape(-1)
    entries = jnp.take(int8, jnp.pad(flat, (0, 1)) if flat.size == 1 else flat, axis=0)
    entries = jax.lax.optimization_barrier(entries)[: flat.size]
    vectors = entries.astype(jnp.float32) * jnp.take(scale, flat, axis=0)
    return vectors.reshape(*tokens.shape, int8.shape[1])


def block_rows(rows: int, columns: int) -> int:
    """Chooses how many rows a block has: as many as fit, at most half of them, and a divisor of them if one is near.

    Half, since a loop that runs once is none, and what it widens would be moved out of generation's loop again.

    >>> block_rows(256, 256), block_rows(32128, 4096), block_rows(50257, 768)  # 50257 is 29 times 1733
    (128, 64, 341)
    """
    most = max(1, min(rows // 2, BLOCK // (4 * columns)))
    return max(range(most // 2 + 1, most + 1), key=lambda size: (rows % size == 0, size))


def apart_from_loops(x: Float[Array, "B T in"], int8: Entries, precision: Precision) -> Float[Array, "B T out"]:
    """Multiplies as `widened` does, where a loop's body is, and not before the loop."""
    x, int8 = jax.lax.optimization_barrier((x, int8))
    return widened(x, int8, precision)


def by_blocks(x: Float[Array, "B T in"], int8: Entries, precision: Precision) -> Float[Array, "B T out"]:
    """Multiplies with blocks of rows in turn.

    Cuts six rows into three blocks as 0 and 3, 1 and 4, 2 and 5: rows that are split over devices stay there.

    Five rows in three blocks: 0 and 1, 2 and 3, 3 and 4; row 3 is left out of the last.
    """
    if 4 * int8.size <= SMALL:
        return apart_from_loops(x, int8, precision)
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
