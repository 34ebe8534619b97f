"""`jaxspec models`: its numbers are those of the networks."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxspec import model
from jaxspec.base import Prompt
from jaxspec.cli import models
from jaxspec.cli.main import app
from jaxspec.drafters import tables
from jaxspec.nets import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import orbax

runner = CliRunner()
T5 = T5Config(32, dim=16, ff_dim=24, heads=2, head_dim=4, encoder_layers=3, decoder_layers=2)
GPT = GPTConfig(32, dim=16, ff_dim=24, layers=3, heads=2, max_positions=16)
BOTH = pytest.mark.parametrize(("net", "config"), [(t5, T5), (gpt, GPT)], ids=["t5", "gpt"])
NGRAM = tables.NGramConfig(32, (5, 9), followers=2)


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@BOTH
def test_parameters_and_memory_are_those_of_the_whole_network(net, config):
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    row = models.describe("it", config)
    assert row["parameters"] == sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert row["memory_bytes"]["float32"] == nbytes(params)
    narrow = jax.eval_shape(lambda p: orbax.cast(p, jnp.bfloat16), params)
    assert row["memory_bytes"]["bfloat16"] == nbytes(narrow) < nbytes(params)


def test_tables_are_integers_whatever_the_dtype():
    params = jax.eval_shape(lambda: tables.init(NGRAM, jax.random.key(0)))
    row = models.describe("it", NGRAM)
    assert row["memory_bytes"] == dict.fromkeys(("float32", "bfloat16"), nbytes(params))
    assert row["parameters"] == sum(math.prod(x.shape) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(("net", "config"), [(t5, T5), (gpt, GPT), (tables, NGRAM)], ids=["t5", "gpt", "ngram"])
def test_the_cache_per_token_is_what_one_more_token_of_a_row_takes(net, config):
    lm = net.language_model(config)
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))

    def cache(rows, capacity):
        tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 4), (rows,)))
        return nbytes(jax.eval_shape(lambda p, q: lm.prefill(p, q, capacity)[1], params, Prompt(tokens, length)))

    more = [cache(rows, 9) - cache(rows, 8) for rows in (1, 2)]
    assert models.describe("it", config)["cache_bytes_per_token"]["float32"] == more[1] - more[0]


def test_the_papers_sizes():
    assert models.describe("base", t5.SIZES["t5-v1_1-base"])["parameters"] == 247_577_856


@pytest.fixture
def few(monkeypatch, tmp_path):
    """One size of each network, and one shipped checkpoint."""
    monkeypatch.setattr(t5, "SIZES", {"t5-tiny": T5})
    monkeypatch.setattr(gpt, "SIZES", {"gpt-tiny": GPT})
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in orbax.TOKENIZER:
        (tokenizer / file).write_text("{}")
    params = gpt.init(GPT, jax.random.key(0))
    given = dict(name="ours", family="gpt", dtype="bfloat16", about={"heldout_loss": 1.5})
    orbax.save(tmp_path / "shipped" / "ours", params, GPT, tokenizer, **given)
    monkeypatch.setattr(model, "SHIPPED", (tmp_path / "shipped",))


def test_tables(few):
    result = runner.invoke(app, ["models"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for part in ("ours", "bfloat16", "t5-tiny", "gpt-tiny", "parameters"):
        assert part in result.stdout


def test_json(few):
    result = runner.invoke(app, ["models", "--json"])
    report = json.loads(result.stdout)
    assert [row["name"] for row in report["t5"] + report["gpt"]] == ["t5-tiny", "gpt-tiny"]
    (ours,) = report["shipped"]
    assert (ours["name"], ours["stored_as"], ours["about"]) == ("ours", "bfloat16", {"heldout_loss": 1.5})
    assert ours["parameters"] == report["gpt"][0]["parameters"]
