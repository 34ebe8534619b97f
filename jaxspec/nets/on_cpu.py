"""Products with few rows on a CPU, in the forms that XLA compiles well there.

A pass over a few tokens should cost little more than a pass over one, which reads the weights once.
XLA hands products to libraries, and which form it hands over decides the time. What is here was
measured on two cores of an AMD EPYC.

Shapes: N rows of activations, G groups of `width` columns.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.nets.quantised import (
    ENTRIES,
    Precision,
    Quantised,
    apart_from_loops,
    entries_of,
    shape,
)

FEW = 64  # rows up to which the weights come first
EIGHTS = range(5, 17)  # rows that are padded to a multiple of 8
# bytes that a block of rows may have in float32: smaller ones pay for more turns of the loop
BLOCK = 2**22
# bytes in float32 up to which a matrix is widened at once: a loop would cost more than it saves
SMALL = 2**14


def is_narrow(dtype: jnp.dtype) -> bool:
    """Tells whether a dtype has less than float32's bits: bfloat16 and float16."""
    return dtype.itemsize < 4


def product(
    x: Float[Array, "B T in"], weight: Float[Array, "out in"], precision: Precision
) -> Float[Array, "B T out"]:
    """Multiplies `x @ weight.T`, both of one dtype, which is the result's.

    >>> product(jnp.array([[[1.0, 2.0]]]), jnp.array([[1.0, 0.0], [1.0, 1.0]]), None).tolist()
    [[[1.0, 3.0]]]
    """
    return _shaped(_multiply(_rows(x), weight, precision), x).astype(x.dtype)


def quantised_product(
    x: Float[Array, "B T in"], matrix: Quantised, precision: Precision
) -> Float[Array, "B T out"]:
    """Multiplies with a part of a quantised matrix at a time: a group, or a block of rows. The
    result is float32.

    XLA makes both factors one type in memory before it multiplies them, each matrix in a buffer of
    its own. Here the buffer holds a part. It stays in cache, and all products share it. (On a mesh
    of CPUs, groups that are split over devices are gathered: a group is multiplied on all of them.)
    """
    if 4 * entries_of(matrix).size <= SMALL:
        return apart_from_loops(x, matrix, precision)
    if matrix["scale"].shape[1] > 1:
        parts = _by_groups
    else:
        parts = _by_blocks
    return _shaped(parts(_rows(x), matrix, precision), x)


def _rows(x: Float[Array, "B T in"]) -> Float[Array, "N in"]:
    """Returns all rows. Rows of one sequence are padded; rows of a batch may lie on several
    devices.
    """
    *batch, step, columns = x.shape
    if is_narrow(x.dtype):
        short = step == 1
    else:
        short = step in EIGHTS
    more = 0
    if math.prod(batch) == 1 and short:
        more = -step % (2 if is_narrow(x.dtype) else 8)
    if more:
        padded = jnp.pad(x, (*((0, 0) for _ in batch), (0, more), (0, 0)))
    else:
        padded = x
    return padded.reshape(-1, columns)


def _shaped(y: Float[Array, "N out"], x: Float[Array, "B T in"]) -> Float[Array, "B T out"]:
    return y[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], y.shape[-1])


def _multiply(
    x: Float[Array, "N in"], weight: Float[Array, "out in"], precision: Precision
) -> Float[Array, "N out"]:
    """Multiplies `x @ weight.T`; sums have 32 bits or more.

    float32: XLA copies a large matrix into another layout to multiply it with a few rows, which
    takes as long as two to three passes over one row. With the matrix as the left factor it does
    not: 1.1 to 1.5 passes. 5 to 7 rows are faster as 8, and 9 to 15 as 16.

    bfloat16: a product with a bfloat16 result is computed in float32, from a float32 copy of the
    matrix, and so is a product of a single row. With float32 sums and two rows or more nothing is
    copied.
    """
    rows_last: Any = (((1,), (1,)), ((), ()))
    if is_narrow(x.dtype):
        return jax.lax.dot_general(
            x, weight, rows_last, precision, preferred_element_type=jnp.float32
        )
    if len(x) == 1 or len(x) > FEW:
        return jax.lax.dot_general(x, weight, rows_last, precision)
    y = jax.lax.dot_general(weight, x, rows_last, precision)
    # The barrier keeps the compiler from swapping the factors back.
    return jax.lax.optimization_barrier(y).T


def _by_groups(
    x: Float[Array, "N in"], matrix: Quantised, precision: Precision
) -> Float[Array, "N out"]:
    entries = entries_of(matrix)
    rows = len(matrix["scale"])
    fed: dict[str, Array] = {
        "x": x.reshape(len(x), len(entries), -1).swapaxes(0, 1),
        "entries": entries,
    }
    fed |= {name: array.T for name, array in matrix.items() if name not in ENTRIES}  # [G, out]

    def add(
        total: Float[Array, "N out"], group: dict[str, Array]
    ) -> tuple[Float[Array, "N out"], None]:
        return total + _scaled(group.pop("x"), group.pop("entries"), group, precision), None

    return jax.lax.scan(add, jnp.zeros((len(x), rows), jnp.float32), fed)[0]


def _scaled(
    x: Float[Array, "N in"], entries: Array, channels: dict[str, Array], precision: Precision
) -> Float[Array, "N out"]:
    """Multiplies with entries [out, in]; zero points and scales, [out] each, come after the
    product.
    """
    sums = _multiply(x, entries.astype(x.dtype), precision)
    if "zero" in channels:  # (q - z) x = q x - z sum(x)
        sums -= (
            x.astype(jnp.float32).sum(axis=1, keepdims=True)
            * channels["zero"].astype(jnp.float32)[None, :]
        )
    return sums * channels["scale"].astype(jnp.float32)[None, :]


def block_rows(rows: int, columns: int) -> int:
    """Chooses the rows of a block: as many as fit, at most half of them, and a divisor of them if
    one is near.

    Half, because XLA unrolls a loop that runs once, and would move its widened matrix out of
    generation's loop again.

    >>> (
    ...     block_rows(256, 256),
    ...     block_rows(32128, 4096),
    ...     block_rows(50257, 768),
    ... )  # 50257 is 29 times 1733
    (128, 251, 1365)
    """
    most = max(1, min(rows // 2, BLOCK // (4 * columns)))
    return max(range(most // 2 + 1, most + 1), key=lambda size: (rows % size == 0, size))


def _by_blocks(
    x: Float[Array, "N in"], matrix: Quantised, precision: Precision
) -> Float[Array, "N out"]:
    """Multiplies with blocks of rows in turn.

    Cuts six rows into three blocks as 0 and 3, 1 and 4, 2 and 5: rows that are split over devices
    stay there.

    Five rows in three blocks: 0 and 1, 2 and 3, 3 and 4; row 3 is left out of the last.
    """
    rows, columns = shape(matrix)
    entries = entries_of(matrix).reshape(rows, columns)
    size = block_rows(rows, columns)
    count = -(-rows // size)
    even = rows % size == 0

    def block_of(i: Int[Array, ""], array: Array) -> Array:
        if even:  # rows i, count + i, 2 count + i, ...
            # Every count-th row: a mesh splits rows into consecutive parts, and each block then has
            # a share of every part.
            return jax.lax.dynamic_index_in_dim(
                array.reshape(size, count, -1), i, 1, keepdims=False
            )
        # The last block begins earlier than its turn, to be as large as the others.
        return jax.lax.dynamic_slice_in_dim(array, jnp.minimum(i * size, rows - size), size)

    def block(i: Int[Array, ""]) -> Float[Array, "N size"]:
        channels = {
            name: block_of(i, array)[:, 0] for name, array in matrix.items() if name not in ENTRIES
        }
        return _scaled(x, block_of(i, entries), channels, precision)

    y: Float[Array, "count N size"] = jax.lax.map(block, jnp.arange(count, dtype=jnp.int32))
    if even:
        return y.transpose(1, 2, 0).reshape(len(x), rows)  # back into the order of the rows
    # Of the last block only what the ones before it have not got.
    first: Any = y[:-1].swapaxes(0, 1).reshape(len(x), -1)
    return jnp.concatenate([first, y[-1, :, count * size - rows :]], axis=1)
