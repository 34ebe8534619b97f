"""`jaxspec bench` on tiny models: its counts, its texts and its arithmetic; never its speed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import jaxspec
from jaxspec.base import Prompt
from jaxspec.cli import bench
from jaxspec.nets import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import table_model

PROMPT = Prompt(jnp.array([[3, 1, 2], [2, 0, 0], [5, 4, 0]], jnp.int32), jnp.array([3, 1, 2], jnp.int32))
TARGET, DRAFT = table_model(jax.random.key(1), 6), table_model(jax.random.key(2), 6)
TINY_T5 = T5Config(64, dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
TINY_GPT = GPTConfig(64, dim=16, ff_dim=16, layers=1, heads=2, max_positions=64)


@pytest.fixture(scope="module")
def found():
    ask = bench.Ask(gammas=(2, 3), batches=(1, 2), new_tokens=9, rows=3, repeats=2)
    done = []
    result = bench.collect(TARGET, DRAFT, PROMPT, ask, advance=done.append)
    assert len(done) == ask.steps == 7
    return result


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


def test_one_result_for_plain_and_each_gamma_at_each_batch_size(found):
    assert [(row["batch"], row["gamma"]) for row in found["results"]] == [(b, g) for b in (1, 2) for g in (0, 2, 3)]
    for row in found["results"]:
        assert row["prompts"] == (3 if row["batch"] == 1 else 2)  # whole batches only
        assert row["tokens"] == 9 * row["prompts"]
        for name in ("tokens_per_second", "first_token_ms"):
            assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]
        assert 0 < row["token_ms"]["p50"] <= row["token_ms"]["p95"]


def test_texts_agree_and_rounds_are_counted(found):
    prompt = Prompt(PROMPT.tokens[:2], PROMPT.length[:2])
    for row in found["results"]:
        if row["gamma"]:
            assert row["same_text"] == row["prompts"]
        if row["gamma"] and row["batch"] == 2:
            out = jaxspec.generate(TARGET, prompt, drafter=DRAFT, gamma=row["gamma"], max_new_tokens=9)
            expected = (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
            assert row["tokens_per_round"] == pytest.approx(expected)
            assert row["passes_saved"] == pytest.approx(8 / out.stats.rounds.max())


def test_predictions_follow_theorem_3_8(found):
    alpha = found["alpha"]["alpha"]
    assert found["alpha"]["positions"] == 27
    for row in found["results"]:
        if row["gamma"]:
            cost = row["gamma"] * row["c"] + row["v"]
            expected = sum(alpha**n for n in range(row["gamma"] + 1))
            assert row["predicted_from_alpha"] == pytest.approx(expected / cost)
            assert row["predicted"] == pytest.approx(row["passes_saved"] / cost)


def test_memory_is_accounted(found):
    row = found["results"][-1]  # batch 2, gamma 3
    assert row["memory"]["weights"] == TARGET.params.nbytes + DRAFT.params.nbytes
    assert row["memory"]["logits"] == 2 * 2 * 4 * 6 * 4  # models, rows, positions, ids, bytes
    capacity = 16 + 16 + 3 + 1
    assert row["memory"]["caches"] == 2 * (2 * capacity * 4 + 2 * 4 + 2 * 4)  # tokens, length and topic of both
    assert row["memory"]["program"] is None or row["memory"]["program"] > row["memory"]["weights"]
    plain = found["results"][0]["memory"]
    assert plain["weights"] == TARGET.params.nbytes and plain["logits"] == 6 * 4


def test_texts_that_disagree_are_noticed():
    one = _outcome([[1, 2, 3], [4, 5, 0]], [3, 2])
    other = _outcome([[1, 2, 3], [4, 6, 0]], [3, 2])
    seconds = np.array([2.0, 4.0])
    compared = bench._compare([one], [other], seconds, seconds / 2)
    assert compared["same_text"] == 1
    assert compared["ratio"] == {"median": 2.0, "min": 2.0, "max": 2.0}


def _outcome(tokens, length):
    from jaxspec.base import Stats
    from jaxspec.decode.loop import Outcome

    length = np.array(length)
    return Outcome(np.array(tokens), length, length > 9, Stats(length - 1, length, length, length), None)


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


def test_bfloat16_shapes(monkeypatch):
    monkeypatch.setitem(t5.SIZES, "tiny-t5", TINY_T5)
    model = bench.random_model("tiny-t5", "bfloat16", seed=0)
    assert model.config.dtype == "bfloat16"
    assert model.params["embedding"]["embedding"].dtype == jnp.bfloat16


def test_prompts_from_files(tmp_path):
    class Letters:
        eos_token_id = 0

        def __len__(self):
            return 6

        def __call__(self, texts):
            return {"input_ids": [[ord(letter) - ord("a") for letter in text] for text in texts]}

    model = TARGET._replace(tokenizer=Letters())
    (tmp_path / "a.txt").write_text("abc\n\nbd\nf\n")
    (tmp_path / "b.jsonl").write_text('{"input": "fed"}\n{"input": "a"}\n')
    assert bench._prompts(model, tmp_path / "a.txt", 2).length.tolist() == [3, 2]
    assert bench._prompts(model, tmp_path / "b.jsonl", 9).tokens[0, :3].tolist() == [5, 4, 3]
    (tmp_path / "c.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        bench._prompts(model, tmp_path / "c.txt", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "tiny-t5"], "has no drafter"),
        (["--draft-shape", "tiny-t5"], "is for a --shape"),
        (["--gamma", "1,x"], "--gamma is '1,x'"),
        (["--batch", "0"], "--batch is '0'"),
        (["--shape", "tiny-t4", "--plain-only"], "did you mean 'tiny-t5'"),
        (["--shape", "tiny-t5", "--plain-only", "--dtype", "int8"], "dtype is 'int8'"),
        (["--shape", "tiny-t5", "--plain-only", "--widen", "4"], "ff_dim is 4"),
        (["--shape", "tiny-t5", "--draft-shape", "tiny-gpt"], "both must be of one kind"),
    ],
)
def test_bad_arguments(run, arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
