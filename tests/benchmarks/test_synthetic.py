"""Models nobody trained: random weights have the shape asked for, wide copies the same text,
verdicts their alpha.
"""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import jaxspec
from benchmarks.synthetic import random_verdicts_for_benchmarks, widen
from jaxspec import nets
from jaxspec.analysis import formulas
from jaxspec.analysis import random_model as random_models
from jaxspec.core import Distribution, Draft, Model, Prompt, Room, noise
from jaxspec.nets import decoder, t5
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import table_model
from jaxspec.weights import quantisation
from jaxspec.weights.hf_families import t5 as t5_family
from tests.small import tiny_gpt, tiny_t5

ROWS, GAMMA = 20_000, 4


def verdict(alpha, distribution, length=GAMMA):
    draft = Draft(jnp.zeros((ROWS, GAMMA), jnp.int32), jnp.full((ROWS,), length, jnp.int32))
    keys = noise.row_keys(jax.random.key(7), ROWS)
    return random_verdicts_for_benchmarks(alpha).verify(
        keys, jnp.full((ROWS,), 3, jnp.int32), draft, distribution
    )


@pytest.mark.parametrize("alpha", [0.53, 0.75])
def test_rounds_accept_draft_tokens_with_the_distribution_behind_equation_1(alpha):
    """The target would never generate what was drafted."""
    judged = verdict(alpha, Distribution(tokens=jnp.ones((ROWS, GAMMA + 1), jnp.int32)))
    counts = np.bincount(np.asarray(judged.num_accepted), minlength=GAMMA + 1)
    expected = [alpha**k * (1 - alpha) for k in range(GAMMA)] + [alpha**GAMMA]
    for count, share in zip(counts, expected, strict=True):
        low, high = scipy.stats.binom.interval(1 - 1e-6, ROWS, share)
        assert low <= count <= high
    mean = float(formulas.expected_tokens(alpha, GAMMA))
    assert np.mean(np.asarray(judged.num_accepted) + 1) == pytest.approx(mean, rel=0.02)
    assert (judged.next_token == 1).all()


def test_no_draft_token_beyond_the_real_ones_is_accepted():
    judged = verdict(1.0, Distribution(tokens=jnp.ones((ROWS, GAMMA + 1), jnp.int32)), length=2)
    assert (judged.num_accepted == 2).all()


def test_the_token_after_them_is_the_targets():
    distribution = Distribution(
        log_probs=jnp.broadcast_to(jnp.log(jnp.array([0.0, 0.3, 0.7])), (ROWS, GAMMA + 1, 3))
    )
    drawn = np.bincount(np.asarray(verdict(0.5, distribution).next_token), minlength=3)
    low, high = scipy.stats.binom.interval(1 - 1e-6, ROWS, 0.7)
    assert drawn[0] == 0 and low <= drawn[2] <= high


def test_what_it_decodes_is_called_inexact_and_no_public_name_leads_to_it():
    model = table_model(jax.random.key(1), vocab=5)
    prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
    rule = random_verdicts_for_benchmarks(0.5)
    out = jaxspec.generate(model, prompt, drafter=model, gamma=2, max_new_tokens=6, rule=rule)
    assert not out.exact and not rule.exact and out.lengths.tolist() == [6]
    assert not any("random" in name or "benchmark" in name for name in jaxspec.rules.__all__)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_a_probability(alpha):
    with pytest.raises(ValueError, match="expected a probability"):
        random_verdicts_for_benchmarks(alpha)


def test_the_package_does_not_have_it():
    home = Path(jaxspec.__file__).parent
    assert [
        file for file in home.rglob("*.py") if "random_verdicts" in file.read_text(encoding="utf-8")
    ] == []


def imports(file: Path, names: tuple[str, ...]) -> bool:
    modules = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules += [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
    return any(name in module for module in modules for name in names)


TINY_T5 = tiny_t5(64)


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_a_shape_is_stored_in_the_dtype_asked_for(stored, monkeypatch):
    monkeypatch.setitem(t5_family.SIZES, "tiny-t5", TINY_T5)
    model = random_models.random_model("tiny-t5", stored, seed=0)
    matrix = model.params["embedding"]["embedding"]
    assert model.config.dtype == ("float32" if stored == "int8" else stored)
    assert (
        (matrix["int8"].shape == (64, 16)) if stored == "int8" else (matrix.dtype == jnp.bfloat16)
    )


CONFIGS = {
    "t5-v1_1": tiny_t5(40),
    "t5-1_0": tiny_t5(40, activation="relu", gated=False, tied_head=True),
    "gpt": tiny_gpt(40),
}
PROMPT = Prompt(jnp.array([[3, 1, 2, 7], [2, 9, 0, 0]], jnp.int32), jnp.array([4, 2], jnp.int32))


def model(name: str) -> Model:
    """Random parameters, biases included."""
    config = CONFIGS[name]
    net = t5 if isinstance(config, T5Config) else decoder
    random = np.random.default_rng(0)
    params = jax.jit(net.init, static_argnums=0)(config, jax.random.key(0))
    params = jax.tree.map(
        lambda x: x + 0.1 * random.standard_normal(x.shape).astype(x.dtype), params
    )
    return Model(net.language_model(config), params, None, config, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_text_and_logits(name):
    small = model(name)
    wide = widen(small, 100)
    assert nets.short_form(wide.config).ff_dim == 100 and wide.name == name
    ours, theirs = (
        jax.jit(m.lm.prefill)(m.params, PROMPT, Room(8))[0].logits for m in (wide, small)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    # a greedy row, too
    options = dict(temperature=np.array([0.0, 1.0]), key=jax.random.key(0), max_new_tokens=24)
    text, expected = (jaxspec.generate(m, PROMPT, **options) for m in (wide, small))
    np.testing.assert_array_equal(text.tokens, expected.tokens)
    assert len(np.unique(text.tokens)) > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_feed_forward_block_grows_and_nothing_else(name):
    small = model(name)
    wide = widen(small, 100)
    sizes = {}
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(wide.params), jax.tree.leaves(small.params), strict=True
    ):
        names = [entry.key for entry in path]
        if "ff" in names and names[-2:] != ["out", "bias"]:
            assert 100 in x.shape and 24 in y.shape
            assert x.dtype == y.dtype
            sizes[names[0]] = sizes.get(names[0], 0) + x.size - y.size
        else:
            np.testing.assert_array_equal(x, y)
    assert len(sizes) == {"t5-v1_1": 2, "t5-1_0": 2, "gpt": 1}[name]
    matrices = 3 if name == "t5-v1_1" else 2
    biases = 1 if name == "gpt" else 0
    assert set(sizes.values()) == {76 * (16 * matrices + biases)}


def test_the_parameters_have_the_shapes_of_a_model_of_that_size():
    wide = widen(model("gpt"), 100)
    fresh = jax.eval_shape(lambda: decoder.init(wide.config, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, wide.params) == jax.tree.map(lambda x: x.shape, fresh)


@pytest.mark.slow
def test_bfloat16_stays_bfloat16():
    small = model("t5-v1_1")
    wide = widen(
        small._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), small.params)), 32
    )
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(wide.params))


@pytest.mark.parametrize("name", ["t5-v1_1", "gpt"])
def test_int8_stays_int8(name):
    small = model(name)
    small = small._replace(params=quantisation.quantise(small.params))
    wide = widen(small, 32)
    expected = widen(small._replace(params=quantisation.dequantise(small.params)), 32)
    read = quantisation.dequantise(wide.params)
    assert wide.params["encoder_0" if name != "gpt" else "layers_0"]["ff"]["out"]["weight"][
        "int8"
    ].shape == (16, 32)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), read, expected.params))


def test_widening_to_its_own_size_changes_nothing():
    small = model("gpt")
    same = widen(small, 24)
    assert same.config == small.config
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), same.params, small.params))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="ff_dim is 8: expected at least the model's own, 24"):
        widen(model("gpt"), 8)
    with pytest.raises(TypeError, match="got one with a TableConfig"):
        widen(table_model(jax.random.key(0), 3), 8)
