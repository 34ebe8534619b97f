"""The comparison of dtypes on a tiny pair: what is the same is said to be, and what is smaller is smaller."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
import typer
from typer.testing import CliRunner

from jaxspec import Model
from jaxspec.analysis import int8 as script
from jaxspec.nets import gpt
from jaxspec.nets.gpt import GPTConfig
from jaxspec.testing import word_tokenizer
from jaxspec.weights import orbax

WORDS = ["<pad>", "</s>", "<unk>", "das", "ist", "ein", "haus", "a", "house", "is"]
TINY = GPTConfig(len(WORDS), dim=32, ff_dim=64, layers=1, heads=2, max_positions=32)


def loaded(name: str, dtype: str) -> Model:
    """As `load` does, of random weights that are rounded by int8."""
    tokenizer = word_tokenizer(WORDS, pad_token="<pad>")
    params = jax.jit(gpt.init, static_argnums=0)(TINY, jax.random.key(len(name)))
    params = jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, params)  # so that texts differ
    config = dataclasses.replace(TINY, dtype="float32" if dtype == "int8" else dtype)
    return Model(gpt.language_model(config), orbax.cast(params, jnp.dtype(dtype)), tokenizer, config, name)


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(script, "load", loaded)
    monkeypatch.setattr(script, "DTYPES", ("float32", "int8"))
    rows = [{"input": "das ist", "reference": "ein haus"}, {"input": "a house is", "reference": "a house"}]
    monkeypatch.setattr(script.heldout, "rows", lambda task: {"text": rows}[task])
    app = typer.Typer()
    app.command()(script.main)
    options = ["--new-tokens", "8", "--gamma", "2", "--repeats", "2", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["--target", "target", "--draft", "draft", *options])
    assert result.exit_code == 0, result.output
    wide, narrow = json.loads((tmp_path / "out.json").read_text())["dtypes"].values()
    assert 2 * narrow["bytes"]["target"] < wide["bytes"]["target"]
    assert narrow["program"]["arguments"] < wide["program"]["arguments"]
    ours, theirs = narrow["tasks"]["text"], wide["tasks"]["text"]
    assert ours["same_text"] == theirs["same_text"] == ours["rows"] == 2
    assert theirs["overlap"] == pytest.approx(1, abs=1e-5)
    assert 0.9 < ours["overlap"] < 1 - 1e-5  # rounding moves the law, but not far
    assert 0 < ours["alpha"]["1"] < 1
    assert set(narrow["speed"]) == {"plain", "speculative"}
    assert "overlap" in result.output and "int8" in result.output
