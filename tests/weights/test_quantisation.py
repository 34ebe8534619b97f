"""int8 and int4 storage: how far it may move a weight, and that what was read back is stored as
itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.weights import quantisation


def _tree(seed: int = 0) -> dict:
    """Matrices whose channels differ in size by many orders of magnitude, and leaves that are no
    matrices.
    """
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((40, 24)) * 10.0 ** rng.uniform(-30, 30, (40, 1))
    embedding = rng.standard_normal((40, 24)) * 10.0 ** rng.uniform(-30, 30, (40, 1))
    weight[3], embedding[5] = 0.0, 0.0
    # a subnormal channel, a nearly infinite one
    weight[4], embedding[6] = weight[4] * 0 + 1e-41, 3e38
    weight, embedding = jnp.asarray(weight, jnp.float32), jnp.asarray(embedding, jnp.float32)
    return {
        "embedding": {"embedding": embedding},
        "layer": {"weight": weight, "bias": jnp.ones(40), "norm": {"scale": jnp.ones(24)}},
        "bias": {"table": jnp.asarray(rng.standard_normal((32, 4)), jnp.float32)},
    }


def test_only_matrices_change_and_scales_lie_along_their_channels():
    tree = _tree()
    stored = quantisation.quantise(tree)
    assert jax.tree.map(jnp.shape, stored["layer"]["weight"]) == {
        "int8": (40, 24),
        "scale": (40, 1),
    }
    assert jax.tree.map(jnp.shape, stored["embedding"]["embedding"]) == {
        "int8": (40, 24),
        "scale": (40, 1),
    }
    assert stored["layer"]["weight"]["int8"].dtype == jnp.int8
    assert stored["layer"]["weight"]["scale"].dtype == jnp.float32
    assert stored["bias"]["table"] is tree["bias"]["table"]
    assert stored["layer"]["bias"] is tree["layer"]["bias"]
    assert stored["layer"]["norm"]["scale"] is tree["layer"]["norm"]["scale"]
    assert jax.tree.structure(quantisation.dequantise(stored)) == jax.tree.structure(tree)


@pytest.mark.parametrize("seed", range(3))
def test_no_weight_moves_by_more_than_half_a_scale(seed):
    tree = _tree(seed)
    stored = quantisation.quantise(tree)
    read = quantisation.dequantise(stored)
    for *path, last in (("layer", "weight"), ("embedding", "embedding")):
        before, after = (np.asarray(t[path[0]][last], np.float64) for t in (tree, read))
        scale = np.asarray(stored[path[0]][last]["scale"], np.float64)
        # the division is rounded, too
        assert (np.abs(before - after) <= scale * (0.5 + 1e-5)).all()
        assert np.abs(np.asarray(stored[path[0]][last]["int8"], int)).max() == 127


@pytest.mark.parametrize("seed", range(3))
def test_what_was_read_back_is_stored_as_itself(seed):
    stored = quantisation.quantise(_tree(seed))
    again = quantisation.quantise(quantisation.dequantise(stored))
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, stored, again)
    )


def test_every_significand_of_a_scale_survives():
    """A row per 16-bit significand: the largest weight is 127 times the scale, exactly."""
    largest = jnp.asarray(np.arange(2**16, 2**17, dtype=np.float32)) * 127
    stored = quantisation.quantise({"weight": largest[:, None]})
    again = quantisation.quantise(quantisation.dequantise(stored))
    assert (stored["weight"]["scale"] == again["weight"]["scale"]).all()
    assert (stored["weight"]["int8"] == 127).all() and (again["weight"]["int8"] == 127).all()


def test_reading_back_is_exact_so_that_it_cannot_depend_on_the_backend():
    stored = quantisation.quantise(_tree())["layer"]["weight"]
    wide = np.asarray(stored["int8"], np.float64) * np.asarray(stored["scale"], np.float64)
    assert (np.asarray(quantisation.dequantise(stored), np.float64) == wide).all()
    assert (jax.jit(quantisation.dequantise)(stored) == quantisation.dequantise(stored)).all()


def test_zero_and_subnormal_channels_become_zero():
    stored = quantisation.quantise(_tree())["layer"]["weight"]
    assert (stored["scale"][3:5] == 1.0).all()
    assert (stored["int8"][3:5] == 0).all()


def test_abstract_trees_work():
    shapes = jax.eval_shape(
        quantisation.quantise, {"weight": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    )
    assert shapes["weight"]["scale"].shape == (4, 1)


@pytest.mark.parametrize(("columns", "width"), [(256, 128), (192, 64), (96, 32), (40, 40)])
def test_int4_groups_are_as_large_as_divide_a_row_and_stored_again_as_themselves(columns, width):
    """A group of zeros, and groups that differ by orders of magnitude; scales of either sign."""
    rng = np.random.default_rng(columns)
    weight = rng.standard_normal((6, columns // width, width)) * 10.0 ** rng.uniform(
        -6, 6, (6, columns // width, 1)
    )
    weight[2, 0] = 0
    weight = jnp.asarray(weight.reshape(6, columns), jnp.float32)
    stored = quantisation.quantise({"weight": weight}, "int4")
    entries, scale = stored["weight"]["int4"], stored["weight"]["scale"]
    assert scale.shape == (6, columns // width) and entries.dtype == jnp.int4
    assert entries.shape == ((columns // width, 6, width) if columns > width else (6, width))
    assert (scale < 0).any() and (scale > 0).any() and scale[2, 0] == 1
    read = quantisation.dequantise(stored)
    again = quantisation.quantise(read, "int4")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), stored, again))
    groups = np.asarray(weight, np.float64).reshape(6, -1, width)
    most = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)
    # the scales by which no entry of this sign is cut off
    uncut = np.where(most == 0, 1, most) / -8
    plain = np.square(np.clip(np.round(groups / uncut), -8, 7) * uncut - groups).sum(axis=2)
    ours = np.square(np.asarray(read["weight"], np.float64).reshape(groups.shape) - groups).sum(
        axis=2
    )
    assert (ours <= 1.001 * plain).all() and (ours < 0.99 * plain).any()


def test_int4_leaves_embeddings_and_heads_int8():
    tree = _tree() | {"head": {"weight": jnp.ones((4, 64))}}
    stored = quantisation.quantise(tree, "int4")
    assert (
        set(stored["head"]["weight"]) == set(stored["embedding"]["embedding"]) == {"int8", "scale"}
    )
    assert set(stored["layer"]["weight"]) == {"int4", "scale"}
    assert quantisation.dtype_of(stored, "float32") == "int4" and quantisation.count(
        stored
    ) == quantisation.count(tree)
    widened = quantisation.as_dtype(
        (jax.tree_util.DictKey("layer"), jax.tree_util.DictKey("weight")),
        stored["layer"]["weight"],
        "int8",
    )
    np.testing.assert_array_equal(
        widened["int8"], stored["layer"]["weight"]["int4"].astype(jnp.int8)
    )


def test_int8_becomes_int4():
    wide = {"weight": jax.random.normal(jax.random.key(0), (8, 64))}
    narrow = quantisation.quantise(quantisation.quantise(wide), "int4")
    assert set(narrow["weight"]) == {"int4", "scale"}
    np.testing.assert_allclose(quantisation.dequantise(narrow)["weight"], wide["weight"], atol=0.3)
