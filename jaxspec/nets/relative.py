"""Relative positions: T5's learned biases by distance, and which cache entries lie within a window.

Shapes: B batch, T step, S cache capacity, N nodes of a tree, H heads.
"""

from __future__ import annotations

import bisect
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core import kv_cache as kv
from jaxspec.nets import dense


def relative_bucket(
    distance: Int[Array, "*shape"], buckets: int, max_distance: int, bidirectional: bool
) -> Int[Array, "*shape"]:
    """Returns the bias bucket of `distance` = key position - query position: exact when near,
    logarithmic when far.

    >>> relative_bucket(jnp.array([0, -1, -200]), 32, 128, bidirectional=False).tolist()
    [0, 1, 31]
    """
    table = jnp.asarray(bucket_table(buckets, max_distance, bidirectional))
    return jnp.take(table, distance + max_distance, mode="clip")


@functools.lru_cache
def bucket_table(buckets: int, max_distance: int, bidirectional: bool) -> np.ndarray:
    """Lists the buckets of the distances -max_distance..max_distance; those beyond are in the last.

    Far ones are in bucket exact + floor(log(distance / exact) / log(max_distance / exact) *
    (buckets - exact)). At many distances (16, 32 and 64 of T5's encoder) that is a whole number,
    whose floor would depend on how a backend rounds its logarithm; so powers of integers are
    compared instead.

    >>> bucket_table(8, 4, bidirectional=True).tolist()
    [3, 3, 2, 1, 0, 5, 6, 7, 7]
    """
    one_way = buckets // 2 if bidirectional else buckets
    exact = one_way // 2
    if not 0 < exact < max_distance:
        raise ValueError(
            f"{buckets} buckets for distances up to {max_distance}: expected at least "
            f"{4 if bidirectional else 2}, and a max_distance above {exact}, up to where each "
            "distance has its own"
        )
    far = one_way - exact
    # Bucket exact + i begins where distance / exact is (max_distance / exact)^(i / far); both sides
    # to the power of far.
    limits = [exact ** (far - i) * max_distance**i for i in range(1, far)]

    def bucket(distance: int) -> int:
        if distance < exact:
            return distance
        return exact + bisect.bisect_right(limits, distance**far)

    before = [bucket(distance) for distance in range(max_distance, -1, -1)]
    after = [
        one_way + bucket(distance) if bidirectional else 0
        for distance in range(1, max_distance + 1)
    ]
    return np.array(before + after, np.int32)


class RelativeBias(nn.Module):
    """One learned bias per head and bucket of distance, shared by all layers of a stack."""

    heads: int
    buckets: int
    max_distance: int
    bidirectional: bool

    @nn.compact
    def __call__(self, distance: Int[Array, "*shape"]) -> Float[Array, " H *shape"]:
        table = dense.parameter(
            self, "table", nn.initializers.normal(0.1), (self.buckets, self.heads)
        )
        # Bias of all heads at once: rows of the table are buckets, columns heads.
        bucket = relative_bucket(distance, self.buckets, self.max_distance, self.bidirectional)
        return jnp.moveaxis(jnp.take(table, bucket, axis=0), -1, 0)


def distances(capacity: int) -> Int[Array, " distances"]:
    """Lists the distances whose biases `biases` reads; entry j is distance j - (capacity - 1).

    The query at position i, over keys 0..S-1, then reads the slice that begins at S - 1 - i.
    Distances above 0 (the future) are masked whatever their bias.

    >>> distances(3).tolist()
    [-2, -1, 0, 1, 2, 3]
    """
    return jnp.arange(2 * capacity, dtype=jnp.int32) - (capacity - 1)


def biases(
    by_distance: Float[Array, "H distances"],
    length: Int[Array, " B"],
    step: int,
    capacity: int,
    parent: Int[Array, "B N"] | None,
) -> Float[Array, "B H T S"]:
    """Looks up the bias between each fed token and each cache entry; `by_distance` is laid out as
    `distances` says.
    """
    query = kv.positions(length, step, parent)
    # [B, T]: where in `by_distance` key 0 is
    start = jnp.asarray(capacity - 1, query.dtype) - query
    if parent is None:  # entry s is position s, so a query's biases are one contiguous slice

        def of_query(offset: Int[Array, ""]) -> Float[Array, "H S"]:
            return jax.lax.dynamic_slice_in_dim(by_distance, offset, capacity, axis=1)

        return jax.vmap(jax.vmap(of_query))(start).transpose(0, 2, 1, 3)
    # Of a tree siblings share a position, so each entry of the cache looks its own up: [B, T, S].
    key = kv.key_positions(length, step, capacity, parent)
    index = jnp.clip(start[:, :, None] + key[:, None, :], 0, by_distance.shape[1] - 1)
    return jnp.take(by_distance, index, axis=1).transpose(1, 0, 2, 3)
