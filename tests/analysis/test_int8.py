"""The comparison of dtypes on a tiny pair: what is the same is reported so, and what is smaller is smaller."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from jaxspec import Model
from jaxspec.analysis import int8 as script
from jaxspec.nets import gpt
from jaxspec.nets.gpt import GPTConfig
from jaxspec.testing import word_tokenizer
from jaxspec.weights import int8, orbax

WORDS = ["<pad>", "</s>", "<unk>", "das", "ist", "ein", "haus", "a", "house", "is"]
TINY = GPTConfig(len(WORDS), dim=32, ff_dim=64, layers=1, heads=2, max_positions=32)


def loaded(name: str, dtype: str) -> Model:
    """As `load` does, of random weights that are rounded by int8."""
    tokenizer = word_tokenizer(WORDS, pad_token="<pad>")
    params = jax.jit(gpt.init, static_argnums=0)(TINY, jax.random.key(len(name)))
    params = jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)  # so that texts differ
    config = dataclasses.replace(TINY, dtype="float32" if dtype == "int8" else dtype)
    return Model(gpt.language_model(config), orbax.cast(params, jnp.dtype(dtype)), tokenizer, config, name)


def tree(seed: int) -> dict:
    """Quantised channels of many sizes, one of zeros, and leaves that are no matrices."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal((400, 257)) * 10.0 ** random.uniform(-30, 30, (400, 1))
    weight[3], weight[4] = 0.0, 1.0
    made = {"weight": jnp.asarray(weight, jnp.float32), "bias": jnp.ones(400), "table": jnp.ones((32, 4))}
    return int8.quantise({"layer": made})


@pytest.mark.parametrize("seed", range(3))
def test_unrounded_matrices_are_others_that_round_to_the_same(seed):
    stored = tree(seed)
    drawn = script.unrounded(stored, jax.random.key(seed))
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), int8.quantise(drawn), stored)
    assert jax.tree.all(same), same
    assert drawn["layer"]["bias"] is stored["layer"]["bias"]
    q, scale = (np.asarray(x, np.float64) for x in stored["layer"]["weight"].values())
    moved = np.asarray(drawn["layer"]["weight"], np.float64) / scale - q
    assert (moved[np.abs(q) == 127] == 0).all() and (moved[3] == 0).all()
    assert np.std(moved[np.abs(q) < 127]) == pytest.approx(12**-0.5, rel=0.01)  # as uniform as rounding errors are
    assert np.abs(moved).max() > 0.499


def test_unrounded_pairs(monkeypatch):
    """Each side, in each dtype, is the cast of one draw; the int8 one is what is stored."""
    monkeypatch.setattr(script, "load", loaded)
    stored, drawn, others = (script.pairs_of(("target", "draft"), seed) for seed in (None, 0, 1))

    def equal(ours: Model, theirs: Model) -> bool:
        pairs = zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True)
        return all(a.dtype == b.dtype and bool((a == b).all()) for a, b in pairs)

    for side in range(2):
        assert equal(drawn["int8"][side], stored["int8"][side])
        assert not equal(drawn["float32"][side], others["float32"][side])
        half = drawn["float32"][side]._replace(params=orbax.cast(drawn["float32"][side].params, jnp.bfloat16))
        assert equal(drawn["bfloat16"][side], half)
        assert drawn["bfloat16"][side].config.dtype == "bfloat16"
    target, draft = drawn["float32"]
    assert not equal(target, draft)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0])
def test_the_command(monkeypatch, tmp_path, seed):
    monkeypatch.setattr(script, "load", loaded)
    monkeypatch.setattr(script, "DTYPES", ("float32", "int8"))
    rows = [{"input": "das ist", "reference": "ein haus"}, {"input": "a house is", "reference": "a house"}]
    monkeypatch.setattr(script.heldout, "rows", lambda task: {"text": rows}[task])
    app = typer.Typer()
    app.command()(script.main)
    options = ["--new-tokens", "8", "--gamma", "2", "--repeats", "2", "--json", str(tmp_path / "out.json")]
    options += [] if seed is None else ["--unrounded", str(seed)]
    result = CliRunner().invoke(app, ["--target", "target", "--draft", "draft", *options])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["unrounded"] == seed
    wide, narrow = found["dtypes"].values()
    assert 2 * narrow["bytes"]["target"] < wide["bytes"]["target"]
    assert narrow["program"]["arguments"] < wide["program"]["arguments"]
    ours, theirs = narrow["tasks"]["text"], wide["tasks"]["text"]
    assert ours["same_text"] == theirs["same_text"] == ours["rows"] == 2
    assert theirs["overlap"] == pytest.approx(1, abs=1e-5)
    assert 0.9 < ours["overlap"] < 1 - 1e-5  # rounding moves the distribution, but not far
    assert 0 < ours["alpha"]["1"] < 1
    assert set(narrow["speed"]) == {"plain", "speculative"}
    assert "overlap" in result.output and "int8" in result.output
