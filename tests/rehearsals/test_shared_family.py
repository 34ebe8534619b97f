"""A family whose layers differ in head size, share keys and read embeddings of their own is one
file: this one.

It is a value of `nets.decoder`'s configuration. Local layers have small heads and a window, global
ones large heads and another rotary base. The last two layers have no keys: they attend to what the
last layer of their kind attends to. Each layer ends with a block that reads the token's embedding
for that layer, and scales the stream (Gemma 4).
"""

import dataclasses
import functools
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, nets
from jaxspec.nets import decoder
from jaxspec.nets.attention import Norm
from jaxspec.nets.rotary import Rotary
from jaxspec.nets.shapes import AttentionShape, DecoderConfig, FeedForwardShape, LayerShape
from tests.marks import marked
from tests.small import random_params

VOCAB, DIM, SIDE = 11, 8, 3


@dataclasses.dataclass(frozen=True)
class SideShape:
    """Embeddings of `dim` numbers for each layer, to which a projection of the token's own
    embedding is added.
    """

    dim: int
    parts: ClassVar = {}
    layouts: ClassVar = {"side/table": ("vocab", "sides"), "side/projection": ("sides", "dim")}

    def share(self, path):
        return 0.0 if path.startswith("table") else 1.0

    def module(self, config):
        return SideEmbedding(config.vocab_size, len(config.layers), self.dim)


class SideEmbedding(nn.Module):
    vocab: int
    layers: int
    dim: int

    @nn.compact
    def __call__(self, tokens, x):
        table = self.param(
            "table", nn.initializers.normal(1.0), (self.vocab, self.layers * self.dim)
        )
        projection = self.param(
            "projection", nn.initializers.normal(1.0), (self.layers * self.dim, x.shape[-1])
        )
        shape = (*tokens.shape, self.layers, self.dim)
        return table[tokens].reshape(shape) + Norm()((x @ projection.T).reshape(shape))


@dataclasses.dataclass(frozen=True)
class GateShape:
    """The block at a layer's end: what the stream lets through of the layer's embedding; and a
    scalar.
    """

    dim: int
    parts: ClassVar = {}
    layouts: ClassVar = {
        "last/gate": ("sides", "dim"),
        "last/out": ("dim", "sides"),
        "last/scalar": ("one",),
    }

    def share(self, path):
        return 1.0

    def module(self, config):
        return Gate(self.dim, parent=None)


class Gate(nn.Module):
    dim: int

    @nn.compact
    def __call__(self, x, side):
        gate = self.param("gate", nn.initializers.normal(0.5), (self.dim, x.shape[-1]))
        out = self.param("out", nn.initializers.normal(0.5), (x.shape[-1], self.dim))
        scalar = self.param("scalar", nn.initializers.ones, (1,))
        return (x + (nn.gelu(x @ gate.T) * side) @ out.T) * scalar[None, None]


LOCAL = AttentionShape(
    heads=2,
    kv_heads=1,
    head_dim=4,
    window=3,
    rotary=Rotary(10.0),
    query_scalar=1.0,
    value_norm=True,
)
GLOBAL = AttentionShape(heads=2, kv_heads=1, head_dim=8, rotary=Rotary(100.0), keys_are_values=True)
SHARED = dataclasses.replace(GLOBAL, shares=1), dataclasses.replace(LOCAL, shares=2)
CONFIG = DecoderConfig(
    VOCAB,
    DIM,
    tuple(
        LayerShape(
            attention, FeedForwardShape(6 if attention.shares is None else 12), last=GateShape(SIDE)
        )
        for attention in (LOCAL, GLOBAL, LOCAL, *SHARED)
    ),
    side=SideShape(SIDE),
)
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1, 8]]


@functools.cache
def model(seed=0):
    params = random_params(decoder.init, CONFIG, seed, 0.1)
    return Model(decoder.language_model(CONFIG), params, None, CONFIG, name=f"shared-{seed}")


def whole_rows(params, rows):
    """The logits of whole rows, without a cache."""
    return decoder.DecoderNet(CONFIG).apply({"params": params}, rows)


def network(seed=0):
    """The family's language model, and its parameters."""
    return model(seed).lm, model(seed).params


def test_layers_without_keys_hold_nothing():
    cache = jax.eval_shape(lambda: decoder.empty_cache(CONFIG, 2, jaxspec.core.Room(20, rewind=4)))
    assert [keys.shape for keys in cache.keys] == [(2, 1, 7, 4), (2, 1, 20, 8), (2, 1, 7, 4)]
    shapes = nets.net_of(CONFIG).shapes(CONFIG)
    assert ["key" in shapes[f"layers_{i}"]["attention"] for i in range(5)] == [True] * 3 + [
        False
    ] * 2
    assert shapes["side"]["table"].shape == (VOCAB, 5 * SIDE)


def test_amounts_are_those_of_its_arrays():
    """Added up from networks that have each shape of layer once: layers that share keys find them
    there, too.
    """
    network = nets.net_of(CONFIG)
    leaves = jax.tree_util.tree_leaves_with_path(network.shapes(CONFIG))
    size = lambda config: sum(x.size for x in jax.tree.leaves(network.shapes(config)))  # noqa: E731
    assert network.total(CONFIG, size) == sum(x.size for _, x in leaves)
    tables = ("embedding", "side")  # which are looked up, but for the side's projection
    read = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.size
        for path, x in leaves
        if x.ndim > 1
    }
    multiplied = [
        n for path, n in read.items() if not path.startswith(tables) or path == "side/projection"
    ]
    assert network.load(CONFIG).parameters == sum(multiplied)


def test_each_layer_reads_its_part_of_the_side_inputs():
    """Whatever is changed in one layer's part changes the streams after that layer, and none before
    it.
    """
    params, rows = model().params, jnp.array(ROWS[:1])
    read = jax.jit(
        lambda params: decoder.DecoderNet(CONFIG).apply({"params": params}, rows, method="streams")
    )
    streams = read(params)
    for layer in range(5):
        table = params["side"]["table"].at[:, layer * SIDE].add(1.0)
        changed = params | {"side": params["side"] | {"table": table}}
        same = [np.array_equal(x, y) for x, y in zip(streams, read(changed), strict=True)]
        assert same == [True] * layer + [False] * (5 - layer)


DRAFTERS = {
    "itself": lambda: model(),
    "a tree": lambda: drafters.tree(model(), (2, 1)),
    "its first layers": lambda: drafters.early_exit(model(), 2),
    "all but some": lambda: drafters.skip_layers(model(), attention=[3], mlp=[1]),
}


@pytest.mark.parametrize("name", marked(DRAFTERS, slow={*DRAFTERS} - {"its first layers"}))
def test_drafted_text_is_plain_text(name):
    options = dict(max_new_tokens=14, eos_ids=())
    out = jaxspec.generate(model(), ROWS, drafter=DRAFTERS[name](), gamma=3, **options)
    assert out.tokens.tolist() == jaxspec.generate(model(), ROWS, **options).tokens.tolist()
    assert out.stats.accepted.sum() > 0


def test_keys_that_are_skipped_cannot_be_shared():
    with pytest.raises(
        ValueError, match=r"layer 4 .* keys of layer 2, whose attention is skipped: expected both"
    ):
        drafters.skip_layers(model(), attention=[2, 3])
