"""Networks with int8 and int4 matrices: the function that they stand for, and no float copy of them
while decoding.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, Prompt, rules
from jaxspec.core import Room
from jaxspec.decode import loop, request
from jaxspec.nets import dense, net_of, on_cpu, quantised
from jaxspec.nets.decoder import decoder_config, gpt_config
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import quantisation
from tests.marks import marked

CONFIGS = {
    "t5-v1_1": T5Config(
        48, dim=16, ff_dim=24, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1
    ),
    "t5-1_0": T5Config(48, 16, 24, 2, 8, 1, 1, activation="relu", gated=False, tied_head=True),
    "gpt": gpt_config(48, dim=16, ff_dim=24, layers=1, heads=2, max_positions=32),
    "decoder": decoder_config(
        48, 16, 24, layers=1, heads=4, kv_heads=2, head_dim=4, qkv_bias=True, ff_bias=True
    ),
}
# three groups of 64, five of 32
GROUPED = decoder_config(48, 192, 160, layers=1, heads=4, kv_heads=2, head_dim=8)
PROMPT = Prompt(jnp.array([[3, 1, 2, 7], [2, 9, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32))


@functools.cache
def model(name: str, seed: int = 0, dtype: str = "int8") -> Model:
    """Random quantised weights, biases included."""
    config = GROUPED if name == "grouped" else CONFIGS[name]
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape), x.dtype), shapes
    )
    return Model(
        net_of(config).language_model(config),
        quantisation.quantise(params, dtype),
        None,
        config,
        name,
    )


def matrix(rows: int, columns: int, groups: int = 1, zero: bool = False) -> dict:
    random = np.random.default_rng(rows)
    if groups > 1 or zero:
        entries = random.integers(
            -8, 8, (groups, rows, columns // groups)[0 if groups > 1 else 1 :]
        )
        stored = {
            "int4": jnp.asarray(entries, jnp.int4),
            "scale": jnp.asarray(random.uniform(-2, 2, (rows, groups)), jnp.float32),
        }
        return stored | (
            {"zero": jnp.asarray(random.integers(-7, 9, (rows, groups)), jnp.int8)} if zero else {}
        )
    entries = random.integers(-127, 128, (rows, columns))
    return {
        "int8": jnp.asarray(entries, jnp.int8),
        "scale": jnp.asarray(random.uniform(0.5, 2, (rows, 1)), jnp.float32),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
# at once; even; uneven; prime
@pytest.mark.parametrize("shape", [(1, 5), (24, 16), (120, 40), (121, 40), (127, 40)])
def test_a_product_is_that_with_the_matrix_it_stands_for(monkeypatch, shape, dtype):
    monkeypatch.setattr(on_cpu, "BLOCK", 4 * 40 * 20)
    weight = matrix(*shape)
    x = jax.random.normal(jax.random.key(0), (2, 3, shape[1]), dtype)
    got = jax.jit(dense.product)(x, weight)
    expected = (
        np.asarray(x, np.float64) @ np.asarray(quantisation.dequantise_matrix(weight), np.float64).T
    )
    assert got.dtype == dtype and got.shape == expected.shape
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(
        np.asarray(got, np.float64), expected, atol=tolerance * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("rows", "groups", "zero"), [(120, 4, True), (121, 4, False), (9, 1, True)]
)
@pytest.mark.parametrize(
    "how", [quantised.at_once, on_cpu.quantised_product, quantised.apart_from_loops]
)
def test_groups_and_zero_points_are_those_of_their_columns(monkeypatch, rows, groups, zero, how):
    """Against NumPy, column by column: few rows of activations and many, which are multiplied in
    other ways.
    """
    monkeypatch.setattr(on_cpu, "BLOCK", 4 * 40 * 20)
    monkeypatch.setattr(on_cpu, "SMALL", 1)
    weight = matrix(rows, 40, groups, zero)
    entries = np.asarray(weight["int4"]).astype(np.float64).reshape(groups, rows, -1)
    columns = []
    for column in range(40):
        group, place = divmod(column, 40 // groups)
        q = entries[group, :, place] - (
            np.asarray(weight["zero"], np.float64)[:, group] if zero else 0
        )
        columns.append(q * np.asarray(weight["scale"], np.float64)[:, group])
    expected = np.stack(columns, axis=1)
    np.testing.assert_allclose(quantisation.dequantise_matrix(weight), expected, rtol=1e-6)
    assert (
        quantised.shape(weight) == (rows, 40)
        and quantised.is_whole(weight)
        and quantised.is_quantised(weight)
    )
    x = np.random.default_rng(0).standard_normal((2, quantised.APART, 40)).astype(np.float32)
    for part in (x[:, :3], x):
        got = jax.jit(quantised.product, static_argnames=("precision", "how"))(
            part, weight, how=how
        )
        np.testing.assert_allclose(
            got, part @ expected.T, atol=2e-5 * np.abs(part @ expected.T).max()
        )
    ids = jnp.array([[3, rows - 1], [0, 3]])
    np.testing.assert_array_equal(
        quantised.rows(ids, weight), quantisation.dequantise_matrix(weight)[ids]
    )
    taken = quantisation.dequantise_matrix(quantised.take_rows(weight, ids[0]))
    np.testing.assert_array_equal(taken, quantisation.dequantise_matrix(weight)[ids[0]])


def copies(program: str, shapes: set) -> list:
    """Float arrays of these shapes that a loop of a compiled program is given from outside."""
    carried = [re.sub(r"while\(.*", "", line) for line in program.splitlines() if " while(" in line]
    arrays = [
        (kind, tuple(map(int, dims.split(","))))
        for line in carried
        for kind, dims in ARRAYS.findall(line)
    ]
    return [array for array in arrays if array[0] not in ("s4", "s8") and array[1] in shapes]


ARRAYS = re.compile(r"(\w+)\[([\d,]+)\]")


@pytest.mark.parametrize("shape", [(32, 48), (128, 384)])  # widened at once; by blocks
def test_weights_are_not_widened_before_a_loop(shape):
    """XLA widens the matrix of the plain formula before the loop, and ours not."""

    def plainly(x, int8, scale):
        return x @ (int8.astype(jnp.float32) * scale).T

    forth, back = matrix(*shape), matrix(*shape[::-1])
    compiled = {}
    for name, product in (("plainly", lambda x, w: plainly(x, **w)), ("ours", dense.product)):

        def run(x, forth, back, count, product=product):
            return jax.lax.fori_loop(
                0, count, lambda i, x: jnp.tanh(product(product(x, forth), back)), x
            )

        compiled[name] = jax.jit(run).lower(jnp.ones((1, 2, shape[1])), forth, back, 3).compile()
    shapes = {shape, shape[::-1]}
    assert set(copies(compiled["plainly"].as_text(), shapes)) == {("f32", dims) for dims in shapes}
    assert copies(compiled["ours"].as_text(), shapes) == []
    if 4 * forth["int8"].size > on_cpu.SMALL:
        wide_bytes = 4 * forth["int8"].size
        temporary = {
            name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()
        }
        assert temporary["ours"] < 0.7 * wide_bytes < 2 * wide_bytes <= temporary["plainly"]


def test_looked_up_rows_are_those_of_the_matrix():
    weight, ids = matrix(24, 16), jnp.array([[3, 23], [0, 3]])
    assert (quantised.rows(ids, weight) == quantisation.dequantise_matrix(weight)[ids]).all()


@pytest.mark.parametrize("name", marked(CONFIGS, slow={"t5-v1_1"}))
def test_logits_are_those_of_the_float_network(name, compiled):
    """Prefill looks rows up and multiplies, with biases, and with tied and untied heads."""
    small = model(name)
    lm = compiled(small.lm)
    ours, cache = lm.prefill(small.params, PROMPT, Room(8))
    theirs, _ = lm.prefill(quantisation.dequantise(small.params), PROMPT, Room(8))
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    assert {x.dtype.name for x in jax.tree.leaves(cache)} <= {"float32", "int32", "bool"}


def test_int4_decoder_gives_the_logits_of_the_float_network_and_its_plain_text(compiled):
    small, draft = model("grouped", dtype="int4"), model("grouped", seed=1, dtype="int4")
    ff = small.params["layers_0"]["ff"]
    assert (ff["wi"]["weight"]["int4"].shape, ff["out"]["weight"]["int4"].shape) == (
        (3, 160, 64),
        (5, 192, 32),
    )
    assert {x.dtype.name for x in jax.tree.leaves(small.params)} == {"int4", "int8", "float32"}
    lm = compiled(small.lm)
    ours, _ = lm.prefill(small.params, PROMPT, Room(8))
    theirs, _ = lm.prefill(quantisation.dequantise(small.params), PROMPT, Room(8))
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    plain = jaxspec.generate(small, PROMPT, max_new_tokens=8, eos_ids=())
    out = jaxspec.generate(small, PROMPT, drafter=draft, gamma=3, max_new_tokens=8, eos_ids=())
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.drafted.sum() > 0


WIDE = [("t5-v1_1", "neither"), ("gpt", "target")]
WIDE_SELDOM = [("gpt", "neither"), ("t5-v1_1", "target"), ("t5-v1_1", "draft"), ("gpt", "draft")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wide"), marked([*WIDE, *WIDE_SELDOM], exhaustive=WIDE_SELDOM))
def test_speculative_text_is_plain_text_of_the_target(name, wide):
    """Greedy rows and, with the coupled rule, sampled ones. Where both are int8, no program holds a
    float matrix.
    """
    target, draft = model(name), model(name, seed=1)
    draft = draft._replace(
        params=jax.tree.map(lambda a, b: a if a.ndim == 2 else b, target.params, draft.params)
    )
    target = (
        target._replace(params=quantisation.dequantise(target.params))
        if wide == "target"
        else target
    )
    draft = (
        draft._replace(params=quantisation.dequantise(draft.params)) if wide == "draft" else draft
    )
    both = Prompt(jnp.tile(PROMPT.tokens, (2, 1)), jnp.tile(PROMPT.length, 2))
    shared = dict(
        temperature=np.array([0, 0, 1, 1], np.float32), max_new_tokens=12, key=jax.random.key(5)
    )
    shared |= dict(eos_ids=())
    plain = jaxspec.generate(target, both, **shared)
    out = jaxspec.generate(target, both, drafter=draft, gamma=3, rule=rules.coupled(), **shared)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()
    if wide == "neither":
        shapes = {x.shape for x in jax.tree.leaves(target.params) if x.dtype == jnp.int8}
        prepared = request.prepare(
            target, both, drafter=draft, gamma=3, rule=rules.coupled(), **shared
        )
        arguments = (
            prepared.decoder,
            prepared.weights,
            prepared.prompt,
            prepared.request,
            prepared.max_new_tokens,
        )
        assert copies(loop.generation.lower(*arguments).compile().as_text(), shapes) == []
