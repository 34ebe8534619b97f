"""T5's buckets of relative positions: those of published implementations, whatever the backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.nets.relative import bucket_table, relative_bucket

DISTANCES = np.arange(-300, 301)
# (buckets, max_distance, bidirectional): the smallest distance of each bucket of one direction
FIRST = {
    (32, 128, True): [*range(8), 8, 12, 16, 23, 32, 46, 64, 91],
    (32, 128, False): [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113],
    (8, 20, True): [0, 1, 2, 7],
    (8, 20, False): [0, 1, 2, 3, 4, 6, 9, 14],
    (20, 1000, False): [*range(10), 10, 16, 26, 40, 64, 100, 159, 252, 399, 631],
}


@pytest.mark.parametrize(("shape", "first"), FIRST.items(), ids=str)
def test_buckets_are_those_of_t5(shape, first):
    after = np.searchsorted(first, np.maximum(-DISTANCES, 0), side="right") - 1
    ahead = len(first) + np.searchsorted(first, DISTANCES, side="right") - 1
    expected = np.where(DISTANCES > 0, ahead, after) if shape[2] else after
    distances = jnp.array(DISTANCES.reshape(1, -1))
    np.testing.assert_array_equal(relative_bucket(distances, *shape), expected[None])


def test_no_backend_computes_a_logarithm():
    """The last bit of one would choose the bucket at 16, 32 and 64."""
    program = jax.make_jaxpr(lambda distance: relative_bucket(distance, 32, 128, True))(
        jnp.array(DISTANCES)
    )
    assert "gather" in str(program) and "log" not in str(program) and "f32" not in str(program)


@pytest.mark.parametrize(
    "shape", [(2, 128, True), (1, 128, False), (32, 8, True), (32, 16, False)], ids=str
)
def test_buckets_that_no_distance_would_have_are_refused(shape):
    with pytest.raises(
        ValueError, match=f"{shape[0]} buckets for distances up to {shape[1]}: expected at least"
    ):
        bucket_table(*shape)


@pytest.mark.needs_torch
@pytest.mark.slow
def test_buckets_are_those_of_transformers():
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    peer = T5Attention._relative_position_bucket
    for buckets in (4, 8, 10, 20, 32, 48, 64, 128):
        for max_distance in (20, 50, 100, 128, 256, 1000):
            for bidirectional in (True, False):
                if max_distance <= buckets // (4 if bidirectional else 2):
                    continue
                expected = peer(
                    torch.tensor(DISTANCES), bidirectional, buckets, max_distance
                ).numpy()
                got = relative_bucket(jnp.array(DISTANCES), buckets, max_distance, bidirectional)
                np.testing.assert_array_equal(
                    got, expected, err_msg=f"{buckets, max_distance, bidirectional}"
                )
