"""Mixtures of experts: what is computed, and that a token's experts do not depend on the tokens
beside it.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, sharding
from jaxspec.core import Model, Prompt, Room
from jaxspec.nets import decoder, experts, net_of
from jaxspec.nets.dense import FEW
from jaxspec.nets.experts import ExpertsShape
from jaxspec.weights import parameters, quantisation
from tests.marks import marked
from tests.small import near, random_params

DIM = 16
MIXTURES = {
    "Qwen 3": ExpertsShape(8, 3, 6, renormalised=False),
    "gpt-oss": ExpertsShape(6, 2, 10, "clamped", bias=True, limit=0.5),
}
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1]]


def config(name, dtype="float32"):
    plain = decoder.decoder_config(
        31, DIM, 24, layers=3, heads=4, kv_heads=2, head_dim=4, dtype=dtype
    )
    mixed = [dataclasses.replace(layer, ff=MIXTURES[name]) for layer in plain.layers]
    # the first layer is dense
    return dataclasses.replace(plain, layers=(plain.layers[0], *mixed[1:]))


@functools.cache
def model(name, seed=0, dtype="float32"):
    shape = config(name, dtype)
    return Model(
        decoder.language_model(shape), random_params(decoder.init, shape, seed, 0.3), config=shape
    )


def one_by_one(shape, params, x):
    """Every expert of every token, in NumPy."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    inwards, outwards, rows = params["experts"]["inwards"], params["experts"]["outwards"], []
    for token in np.asarray(x, np.float64).reshape(-1, x.shape[-1]):
        scores = params["router"]["matrix"] @ token + params["router"].get("bias", 0.0)
        chances, row = np.exp(scores - scores.max()), np.zeros_like(token)
        best = np.argsort(-scores)[: shape.top]
        total = chances[best].sum() if shape.renormalised else chances.sum()
        for e in best:
            pair = slice(2 * e, 2 * e + 2)
            gate, up = inwards["weight"][pair] @ token + (
                inwards["bias"][pair] if shape.bias else 0.0
            )
            if shape.activation == "clamped":
                gate, up = np.minimum(gate, shape.limit), np.clip(up, -shape.limit, shape.limit) + 1
            rate = shape.alpha if shape.activation == "clamped" else 1.0
            outputs = outwards["weight"][e] @ (up * gate / (1 + np.exp(-rate * gate)))
            row += chances[e] / total * (outputs + (outwards["bias"][e] if shape.bias else 0.0))
        rows.append(row)
    return np.array(rows).reshape(x.shape)


@pytest.mark.parametrize("tokens", [1, 6, 2 * FEW + 5])
@pytest.mark.parametrize("name", MIXTURES)
def test_each_token_goes_through_its_experts(name, tokens):
    shape, params = MIXTURES[name], model(name).params["layers_1"]["ff"]
    x = jax.random.normal(jax.random.key(tokens), (1, tokens, DIM))
    expected = one_by_one(shape, params, x)
    module = experts.Mixture(shape, DIM)
    np.testing.assert_allclose(
        jax.jit(module.apply)({"params": params}, x), expected, rtol=1e-4, atol=1e-5
    )
    # What a GPU does: blocks without a condition.
    scores = experts.Router(shape.count, shape.bias).apply({"params": params["router"]}, x)
    chosen = [array[0] for array in experts.choose(scores, shape.top, shape.renormalised)]
    stacks = [
        (params["experts"][end]["weight"], params["experts"][end].get("bias"))
        for end in ("inwards", "outwards")
    ]
    y = jax.jit(functools.partial(experts.by_blocks, shape.act, skips=False))(
        x[0], *chosen, *stacks
    )
    np.testing.assert_allclose(y, expected[0], rtol=1e-4, atol=1e-5)


def test_what_overflows_in_an_expert_is_no_part_of_other_tokens():
    """Blocks hold other tokens beside their own: what an expert makes of these reaches no sum, even
    as inf * 0.
    """
    shape = ExpertsShape(2, 1, 4, "relu")
    inwards = jnp.repeat(jnp.array([1e30, 1e30, 0, 0]), 4 * DIM).reshape(4, 4, DIM), None
    outwards = jnp.ones((2, DIM, 4)), None
    x, ids = jnp.ones((2, DIM)), jnp.array([[0], [1]])
    y = jax.jit(functools.partial(experts.by_blocks, shape.act))(
        x, ids, jnp.ones((2, 1)), inwards, outwards
    )
    assert not jnp.isfinite(y[0]).any() and y[1].tolist() == [0.0] * DIM


@pytest.mark.slow
# coarse numbers show it
@pytest.mark.parametrize("dtype", marked(["float32", "bfloat16"], exhaustive=["float32"]))
def test_the_experts_of_a_token_are_the_same_in_a_wide_pass_and_in_narrow_ones(dtype, monkeypatch):
    target, chosen, choose = model("gpt-oss", dtype=dtype), [], experts.choose

    def recorded(*arguments):
        ids, weights = choose(*arguments)
        chosen.append(np.asarray(ids))
        return ids, weights

    monkeypatch.setattr(experts, "choose", recorded)
    tokens = jax.random.randint(jax.random.key(1), (3, 9), 0, 31)
    _, cache = target.lm.prefill(
        target.params, Prompt(tokens[:, :1], jnp.ones(3, jnp.int32)), Room(16)
    )
    chosen.clear()
    target.lm.extend(target.params, cache, tokens[:, 1:])  # a pass over 8 tokens
    wide, narrow = np.stack(chosen), []
    for i in range(1, 9):
        chosen.clear()
        _, cache = target.lm.extend(target.params, cache, tokens[:, i : i + 1])
        narrow.append(np.stack(chosen))
    assert wide.shape == (2, 3, 8, 2)  # layers, rows, tokens, experts
    np.testing.assert_array_equal(wide, np.concatenate(narrow, axis=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(MIXTURES, exhaustive=["Qwen 3"]))
def test_drafted_text_is_plain_text(name):
    target, options = model(name), {"max_new_tokens": 14}
    draft = near(target, model(name, 1), 0.97)
    plain = jaxspec.generate(target, ROWS, **options)
    for drafter in (draft, drafters.tree(draft, (2, 1))):
        drafted = jaxspec.generate(target, ROWS, drafter=drafter, gamma=3, **options)
        np.testing.assert_array_equal(drafted.tokens, plain.tokens)
        assert (drafted.stats.acceptance_rate > 0).all() and (
            drafted.stats.acceptance_rate < 1
        ).all()


def test_gradients_reach_the_router_and_the_experts_that_were_used():
    shape, params = MIXTURES["gpt-oss"], model("gpt-oss").params["layers_1"]["ff"]
    x = jax.random.normal(jax.random.key(3), (1, 1, DIM))

    def size(way, params):
        scores = experts.Router(shape.count, True).apply({"params": params["router"]}, x)
        stacks = [
            (params["experts"][end]["weight"], params["experts"][end]["bias"])
            for end in ("inwards", "outwards")
        ]
        chosen = [array[0] for array in experts.choose(scores, shape.top)]
        return jnp.square(way(shape.act, x[0], *chosen, *stacks)).sum()

    ways = experts.by_blocks, functools.partial(experts.by_blocks, skips=False)
    in_turn, all_blocks = (jax.jit(jax.grad(functools.partial(size, way)))(params) for way in ways)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), in_turn, all_blocks
    )
    assert np.abs(in_turn["router"]["matrix"]).max() > 0
    assert (
        np.abs(in_turn["experts"]["outwards"]["weight"]).max(axis=(1, 2)) > 0
    ).sum() == shape.top


def test_a_pass_reads_the_experts_that_its_tokens_choose():
    shape = config("Qwen 3")
    load = net_of(shape).load(shape)
    assert load.experts == ((3 / 8, 2 * 8 * 3 * 6 * DIM),)
    assert load.bytes_read(1) == 4 * (load.parameters + load.experts[0][1] * 3 / 8)
    router = 2 * 8 * DIM
    dense = dataclasses.replace(shape, layers=(shape.layers[0],) * 3)
    assert load.parameters == net_of(dense).load(dense).parameters - 2 * 3 * 24 * DIM + router


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 9}, "given to 9 experts of 8: expected at most all"),
        ({"top": 0}, "top is 0: expected at least 1"),
        ({"activation": "swiglu"}, "activation is 'swiglu': expected one of .*clamped"),
    ],
)
def test_shapes_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MIXTURES["Qwen 3"], **options)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_mesh_splits_every_expert(dtype):
    """Each device has a part of each expert's hidden units, and of its outputs, and all of the
    router.
    """
    target = model("gpt-oss")
    params, axes = (
        quantisation.quantise(target.params, dtype),
        net_of(target.config).axes(target.config),
    )
    mesh = jax.sharding.AbstractMesh((1, 2), (sharding.DATA, sharding.MODEL))
    places = parameters.flat(sharding.parameters(params, axes, mesh))  # pyright: ignore[reportArgumentType]
    end = "/int8" if dtype == "int8" else ""
    assert tuple(places[f"layers_1/ff/experts/inwards/weight{end}"].spec) == (None, "model", None)
    assert tuple(places[f"layers_1/ff/experts/outwards/weight{end}"].spec) == (None, "model", None)
    assert tuple(places["layers_1/ff/experts/inwards/bias"].spec) == (None, "model")
    assert tuple(places["layers_1/ff/router/matrix"].spec) == ()


ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jaxspec import sharding
from benchmarks.estimates.absent import collectives
from jaxspec.core import Prompt, Room
from jaxspec.nets import experts, net_of
from jaxspec.weights import quantisation
from tests.nets.test_experts import DIM, MIXTURES, model

for name in ("gpt-oss", "Qwen 3"):
    target = model(name)
    axes = net_of(target.config).axes(target.config)
    placed = jax.device_put(target.params, sharding.parameters(target.params, axes, sharding.mesh("model=2")))
    prompt = Prompt(jnp.asarray([[3, 1, 4, 1], [5, 9, 2, 6]]), jnp.array([4, 3]))
    prefill = jax.jit(lambda params: target.lm.prefill(params, prompt, Room(8))[0].logits)
    np.testing.assert_allclose(prefill(placed), prefill(target.params), rtol=1e-4, atol=1e-4)
    # Gate and other projection of an expert lie on one device: only hidden units and sums go from one to another.
    for dtype in ("float32", "int8"):
        params = quantisation.quantise(target.params, dtype)
        placed = jax.device_put(params, sharding.parameters(params, axes, sharding.mesh("model=2")))
        block = jax.jit(experts.Mixture(MIXTURES[name], DIM).apply)
        compiled = block.lower({"params": placed["layers_1"]["ff"]}, jnp.ones((1, 3, DIM))).compile()
        assert set(collectives(compiled.as_text())) == {"all-gather"}, collectives(compiled.as_text())
"""


@pytest.mark.slow
def test_on_a_mesh_logits_are_those_of_one_device_and_gates_meet_without_a_transfer():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        check=True,
        cwd=root,
        env=environment | {"PYTHONPATH": root},
    )
