"""A family with a mixture of experts is one file: this one. Each token takes TOP experts of COUNT,
by a router.

The configuration is `nets.decoder`'s: a layer's feed-forward block is another value, which says how
it is split over devices and which share of its matrices a token is multiplied with.
"""

import dataclasses
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, nets, sharding
from jaxspec.analysis import roofline
from jaxspec.nets import decoder
from jaxspec.nets.rotary import Rotary
from jaxspec.nets.shapes import AttentionShape, DecoderConfig, FeedForwardShape, LayerShape
from jaxspec.weights import orbax, parameters, quantisation
from jaxspec.weights.loading import find
from jaxspec.weights.orbax import CheckpointError
from tests.small import random_params

VOCAB, DIM = 11, 8


@dataclasses.dataclass(frozen=True)
class ExpertsShape:
    """`top` of `count` gated blocks of `dim` hidden units."""

    count: int
    top: int
    dim: int

    @property
    def parts(self):
        return {"experts": self.count}

    @property
    def layouts(self):
        return {
            "ff/inwards": ("experts", "positions", "dim"),
            "ff/outwards": ("experts", "dim", "positions"),
        }

    def share(self, path):
        return 1.0 if path.startswith("router") else self.top / self.count

    def module(self, config):
        return Experts(self, config.dim, parent=None)


class Stacked(nn.Module):
    """One matrix for each expert."""

    shape: tuple[int, int, int]

    @nn.compact
    def __call__(self):
        return self.param("weight", nn.initializers.normal(self.shape[-1] ** -0.5), self.shape)


class Experts(nn.Module):
    shape: ExpertsShape
    dim: int

    @nn.compact
    def __call__(self, x):
        count, top, hidden = self.shape.count, self.shape.top, self.shape.dim
        router = self.param("router", nn.initializers.normal(1.0), (count, self.dim))
        chances, chosen = jax.lax.top_k(jax.nn.softmax(jnp.einsum("btm,em->bte", x, router)), top)
        weights = jnp.sum(
            jax.nn.one_hot(chosen, count) * (chances / chances.sum(-1, keepdims=True))[..., None],
            axis=-2,
        )
        inwards, outwards = Stacked((count, 2 * hidden, self.dim), name="inwards")(), None
        outwards = Stacked((count, self.dim, hidden), name="outwards")()
        gate, up = jnp.split(jnp.einsum("btm,efm->btef", x, inwards), 2, axis=-1)
        return jnp.einsum("btef,emf,bte->btm", jax.nn.silu(gate) * up, outwards, weights)


ATTENTION = AttentionShape(heads=2, kv_heads=1, head_dim=4, rotary=Rotary(100.0))
EXPERTS = ExpertsShape(count=4, top=1, dim=6)
DENSE, SPARSE = LayerShape(ATTENTION, FeedForwardShape(12)), LayerShape(ATTENTION, EXPERTS)
CONFIG = DecoderConfig(VOCAB, DIM, (DENSE, SPARSE, SPARSE), tied_head=True)
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7], [1, 8, 2, 8, 1, 8]]


@functools.cache
def model(seed=0):
    params = random_params(decoder.init, CONFIG, seed, 0.5)
    return Model(decoder.language_model(CONFIG), params, config=CONFIG, name=f"experts-{seed}")


def test_drafted_text_is_plain_text():
    options = dict(max_new_tokens=14, eos_ids=())
    out = jaxspec.generate(model(), ROWS, drafter=model(5), gamma=3, **options)
    plain = jaxspec.generate(model(), ROWS, **options).tokens.tolist()
    assert out.tokens.tolist() == plain
    rows, module = [list(row) for row in ROWS], jax.jit(decoder.DecoderNet(CONFIG).apply)
    for row, _ in itertools.product(rows, range(4)):  # without a cache, whole rows
        padded = jnp.asarray([row + [0] * (16 - len(row))])
        row.append(int(jnp.argmax(module({"params": model().params}, padded)[0, len(row) - 1])))
    assert [row[-4:] for row in rows] == [tokens[:4] for tokens in plain]


def test_a_pass_reads_the_experts_that_its_tokens_choose():
    load = nets.net_of(CONFIG).load(CONFIG, row=20)
    experts = 2 * EXPERTS.count * 3 * EXPERTS.dim * DIM
    assert load.experts == ((EXPERTS.top / EXPERTS.count, experts),)
    attention, router = 2 * (2 + 1) * 4 * DIM, EXPERTS.count * DIM
    assert load.parameters == 3 * attention + 3 * 12 * DIM + 2 * router + VOCAB * DIM
    assert load.per_token == load.parameters + experts / 4
    union = np.mean([len(set(choice)) for choice in itertools.product(range(4), repeat=3)])
    assert load.bytes_read(3) == pytest.approx(4 * (load.parameters + experts * union / 4))
    slow = roofline.Machine(bandwidth=1.0, bfloat16=1e12, float32=1e12)
    # dense weights are read once, however many tokens
    assert roofline.verify_cost(slow, load, 2) > 1.1


def test_experts_are_split_over_devices():
    axes = nets.axes_of(CONFIG)
    assert axes.parts == {"heads": 2, "kv_heads": 1, "experts": 4, "ff": 12, "vocab": VOCAB}
    mesh = jax.sharding.AbstractMesh((1, 2), (sharding.DATA, sharding.MODEL))
    specs = parameters.flat(sharding.parameters(nets.net_of(CONFIG).shapes(CONFIG), axes, mesh))
    assert specs["layers_1/ff/inwards/weight"].spec == jax.sharding.PartitionSpec(
        "model", None, None
    )
    assert specs["layers_0/ff/wi/weight"].spec == jax.sharding.PartitionSpec("model", None)


def test_no_config_json_describes_it(tmp_path):
    options = {"name": "experts", "description": {}}
    tokenizer = find("debian-t5-base")
    with pytest.raises(
        CheckpointError, match=r"no manifest can hold this model: no family writes a config\.json"
    ):
        orbax.save(
            tmp_path / "experts", model().params, CONFIG, tokenizer, dtype="float32", **options
        )


def test_each_expert_is_rounded_by_itself():
    experts = quantisation.quantise(model().params, "int8")["layers_1"]["ff"]["inwards"]["weight"]
    assert (experts["int8"].shape, experts["scale"].shape) == ((4, 12, 8), (4, 12, 1))
