"""`jaxspec bench` at tiny shapes: what it reports, prints and refuses."""

import json

import jax
import pytest
import typer
from typer.testing import CliRunner

from jaxspec.cli import bench
from jaxspec.families import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import table_model

TINY_T5 = T5Config(64, dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
TINY_GPT = GPTConfig(64, dim=16, ff_dim=16, layers=1, heads=2, max_positions=64)


@pytest.fixture
def run(monkeypatch):
    """Runs the command on tiny shapes."""
    monkeypatch.setitem(t5.SIZES, "tiny-t5", TINY_T5)
    monkeypatch.setitem(gpt.SIZES, "tiny-gpt", TINY_GPT)
    app = typer.Typer()
    app.command()(bench.bench)

    def invoke(*arguments: str):
        return CliRunner().invoke(app, [*arguments, "--rows", "2", "--repeats", "1", "--source-tokens", "5"])

    return invoke


def test_plain_only_at_a_shape(run):
    result = run("--shape", "tiny-gpt", "--plain-only", "--batch", "1,2", "--new-tokens", "7", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["draft"] is None and found["alpha"] is None
    assert [row["tokens"] for row in found["results"]] == [
        14,
        14,
    ]  # exactly new_tokens per row: nothing ends it
    assert "ratio" not in found["results"][0]
    assert found["environment"]["jax"] == jax.__version__ and found["process"]["peak"]


def test_a_pair_of_shapes_widened_in_tables(run):
    arguments = [
        "--shape",
        "tiny-t5",
        "--draft-shape",
        "tiny-t5",
        "--widen",
        "48",
        "--gamma",
        "2",
        "--new-tokens",
        "6",
    ]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "random tiny-t5" in result.output and "2 of 2" in result.output
    assert "Peak memory: process" in result.output


def test_prompts_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n\nbd\nf\n")
    (tmp_path / "b.jsonl").write_text('{"input": "fed"}\n{"input": "a"}\n')
    model = table_model(jax.random.key(1), 6)
    assert bench._texts(model, tmp_path / "a.txt", 2) == ["abc", "bd"]
    assert bench._texts(model, tmp_path / "b.jsonl", 9) == ["fed", "a"]
    (tmp_path / "c.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        bench._texts(model, tmp_path / "c.txt", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "tiny-t5"], "has no drafter"),
        (["--draft-shape", "tiny-t5"], "is for a --shape"),
        (["--gamma", "1,x"], "--gamma is '1,x'"),
        (["--batch", "0"], "--batch is '0'"),
        (["--shape", "tiny-t4", "--plain-only"], "did you mean 'tiny-t5'"),
        (["--shape", "tiny-t5", "--plain-only", "--dtype", "int4"], "dtype is 'int4'"),
        (["--shape", "tiny-t5", "--plain-only", "--widen", "4"], "ff_dim is 4"),
        (["--shape", "tiny-t5", "--draft-shape", "tiny-gpt"], "drafter (random tiny-gpt) decoder-only"),
    ],
)
def test_bad_arguments(run, arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
