"""The names of T5X's arrays: the network is read off them, and those of another one are refused."""

from pathlib import Path

import numpy as np
import pytest

import jaxspec
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import t5x_names
from jaxspec.weights.hf_families import t5 as family
from jaxspec.weights.orbax import CheckpointError
from tests.weights.t5x_files import (
    NETWORKS,
    V11,
    Network,
    arrays_of,
    rewrite,
    scalable,
    shapes_of,
    write_early_orbax,
    write_legacy,
)


@NETWORKS
def test_the_network_is_read_off_the_arrays(network, tmp_path):
    n, gated = network, network == V11
    expected = T5Config(
        24, 8, 12, 2, 3, 2, 3, "gelu" if gated else "relu", gated, tied_head=not gated
    )
    assert jaxspec.load(write_early_orbax(tmp_path, 0, arrays_of(n))).config == expected


def test_published_sizes_are_told_by_their_shapes():
    """Names and shapes of T5X's configurations of the published models; nothing is read."""
    sizes = {"t5-small": (512, 8, 6, 6, 64, 2048), "t5-v1_1-xl": (2048, 32, 24, 24, 64, 5120)}
    sizes |= {"mt5-base": (768, 12, 12, 12, 64, 2048), "byt5-small": (1472, 6, 12, 4, 64, 3584)}
    vocabulary = {"mt5-base": 250_112, "byt5-small": 384}
    for name, numbers in sizes.items():
        small = Network(vocabulary.get(name, 32128), *numbers)
        network = (
            small._replace(mlp_activations=("relu",), logits_via_embedding=True)
            if name == "t5-small"
            else small
        )
        shapes = shapes_of(network)
        config = t5x_names.infer(Path(name), shapes)
        assert config == (family.SIZES | family.MT5_SIZES)[name]
        assert {tensor.name for tensor in t5x_names.names(config).values()} == shapes.keys()


def test_arrays_of_another_model_are_listed(checkpoint):
    def change(target):
        del target["decoder"]["layers_1"]["mlp"]["wi_1"]
        target["decoder"]["layers_1"]["mlp"]["wi_2"] = {"kernel": np.ones((8, 12), np.float32)}

    rewrite(checkpoint, change)
    with pytest.raises(CheckpointError) as caught:
        jaxspec.load(checkpoint)
    message = str(caught.value)
    assert "checkpoint_1000: the weights are not those of the T5 of its names and shapes" in message
    assert "missing (1): decoder/layers_1/mlp/wi_1/kernel" in message
    assert "unexpected (1): decoder/layers_1/mlp/wi_2/kernel" in message


def test_an_array_of_another_shape_is_named(checkpoint):
    rewrite(
        checkpoint,
        lambda target: target["encoder"]["encoder_norm"].update(scale=np.ones(9, np.float32)),
    )
    with pytest.raises(
        CheckpointError, match=r"wrong \(1\): encoder/encoder_norm/scale is \[9\], expected \[8\]"
    ):
        jaxspec.load(checkpoint)


def test_no_t5_at_all(checkpoint):
    rewrite(checkpoint, lambda target: target.pop("token_embedder"))
    with pytest.raises(
        CheckpointError,
        match=r"holds no T5 of T5X's examples: token_embedder/embedding is absent. Th",
    ):
        jaxspec.load(checkpoint)


def test_heads_that_do_not_fit(checkpoint):
    bias = {"rel_embedding": np.ones((5, 32), np.float32)}
    rewrite(checkpoint, lambda target: target["encoder"].update(relpos_bias=bias))
    with pytest.raises(
        CheckpointError, match=r"query/kernel is \[8, 6\], which is not made for the 5 heads"
    ):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize("stacked", [True, False])
def test_heads_of_another_count_are_not_cut_anew(stacked, tmp_path):
    """3 heads of 2 have as many columns as 2 of 3: the bias says which they are."""
    arrays = scalable(arrays_of(V11), V11, stacked)
    for name in [name for name in arrays if name.endswith("attention/query/kernel")]:
        arrays[name] = arrays[name].reshape(*arrays[name].shape[:-2], 3, 2)
    with pytest.raises(
        CheckpointError, match=r"query/kernel is \[8, .*3, 2\], which is not made for the 2 heads"
    ):
        jaxspec.load(write_legacy(tmp_path, 1, arrays, inside=("",)))


def test_integers_are_refused(checkpoint):
    rewrite(
        checkpoint,
        lambda target: target["encoder"]["encoder_norm"].update(scale=np.ones(8, np.int8)),
    )
    with pytest.raises(
        CheckpointError,
        match=r"encoder/encoder_norm/scale is int8, so it is quantised.* expected one of float32, bf",
    ):
        jaxspec.load(checkpoint)


@pytest.mark.parametrize("stacked", [True, False])
def test_biases_of_each_layer_are_refused_where_they_differ(stacked, tmp_path):
    """Biases differ in umT5, which is another network."""
    arrays = scalable(arrays_of(V11), V11, stacked)
    name = f"decoder/{'decoder' if stacked else 'layers_1'}/relpos_bias/rel_embedding"
    arrays[name] = arrays[name].copy()
    arrays[name][(0, 1, 0) if stacked else (0, 0)] += 1
    first, second = (f"decoder/layers_{i}/relpos_bias/rel_embedding" for i in (0, 1))
    with pytest.raises(
        CheckpointError, match=f"{second} differs from {first}, which it should repeat.*umT5"
    ):
        jaxspec.load(write_legacy(tmp_path, 1, arrays, inside=("",)))
