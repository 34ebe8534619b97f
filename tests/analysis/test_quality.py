"""BLEU and ROUGE-L on texts whose scores can be told by hand, and the report over a tiny pair."""

import builtins
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from jaxspec.analysis import report
from jaxspec.analysis.measure import quality
from jaxspec.base import Model
from jaxspec.nets import gpt, t5
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import word_tokenizer


def test_bleu_of_a_perfect_and_of_a_worthless_translation():
    references = ["Das ist ein kleiner Test für uns.", "Der Hund schläft heute im Garten."]
    assert quality.bleu(references, references) == pytest.approx(100.0)
    assert quality.bleu(["foo bar", "baz"], references) < 2


def test_bleu_by_hand():
    """Five words of six: precisions 5/6, 3/5, 2/4, 1/3 and no brevity penalty."""
    score = quality.bleu(["a b c d x f"], ["a b c d e f"])
    assert score == pytest.approx(100 * math.prod([5 / 6, 3 / 5, 2 / 4, 1 / 3]) ** 0.25, rel=1e-3)


def test_rouge_l_by_hand():
    assert quality.rouge_l(["a b c"], ["a b c"]) == pytest.approx(100.0)
    assert quality.rouge_l(["x"], ["a b c"]) == 0.0
    # the longest common subsequence is "b d": precision 2/3, recall 2/4; the mean with a perfect row
    assert quality.rouge_l(["b x d", "e"], ["a b c d", "e"]) == pytest.approx((100 * 4 / 7 + 100) / 2)


def test_bad_arguments():
    with pytest.raises(ValueError, match="2 hypotheses and 1 references"):
        quality.bleu(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="0 hypotheses"):
        quality.rouge_l([], [])
    with pytest.raises(ValueError, match="got one text"):
        quality.bleu("a", "a")


@pytest.mark.parametrize(("package", "call"), [("sacrebleu", quality.bleu), ("rouge_score", quality.rouge_l)])
def test_without_the_extra(monkeypatch, package, call):
    real = builtins.__import__

    def refusing(name, *rest, **more):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **more)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refusing)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "jaxspec-decoding\[train\]"'):
        call(["a"], ["a"])
    with pytest.raises(ImportError, match=package.replace("_", "-")):
        quality.check()


WORDS = ["<pad>", "</s>", "<unk>", "Das", "ist", "ein", "Haus", "a", "house", "is"]
T5 = T5Config(len(WORDS), dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
GPT = GPTConfig(len(WORDS), dim=16, ff_dim=16, layers=1, heads=2, max_positions=640)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS, pad_token="<pad>")


def data_folder(folder):
    """A data folder with a few held-out examples."""
    pair = {"input": "a house", "output": "ein Haus", "package": "x"}
    rows = [json.dumps(pair | {"task": task}) for task in ("translation", "synopsis")]
    (folder / "t5.heldout.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "gpt.heldout.jsonl").write_text(json.dumps({"text": "Das ist ein Haus a house is a house"}) + "\n")
    return folder


def pair(net, config, tokenizer) -> tuple[Model, Model]:
    made = [jax.jit(net.init, static_argnums=0)(config, jax.random.key(seed)) for seed in (0, 1)]
    lm = net.language_model(config)
    return Model(lm, made[0], tokenizer, config, "big"), Model(lm, made[1], tokenizer, config, "small")


@pytest.fixture(scope="module")
def found(tokenizer, tmp_path_factory):
    """The report of a translating pair of random models."""
    folder, done = data_folder(tmp_path_factory.mktemp("data")), []
    target, draft = pair(t5, T5, tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "GAMMAS", (3,))
        options = dict(rows=2, max_new_tokens=6)
        made = report.report(target, draft, folder, advance=lambda _, rows: done.append(rows), **options)
        assert sum(done) == report.steps(target, 2)
    return made


@pytest.mark.slow
def test_report_of_a_translating_pair(found):
    assert found["target"]["name"] == "big" and found["draft"]["parameters"] == found["target"]["parameters"]
    for task, metric in (("translation", "sacreBLEU"), ("synopsis", "ROUGE-L")):
        assert found["loss"][task]["target"] == pytest.approx(math.log(len(WORDS)), abs=2.0)
        results = found["tasks"][task]
        assert results["rows"] == 2 and results["quality"]["metric"] == metric
        assert results["same_text"] == results["compared"] == 2
        assert list(results["tokens_per_round"]) == ["3"]
        assert all(0 <= tokens <= int(gamma) + 1 for gamma, tokens in results["tokens_per_round"].items())
        assert all(0 <= alpha["low"] <= alpha["alpha"] <= alpha["high"] <= 1 for alpha in results["alpha"].values())
    assert json.loads(json.dumps(found))["environment"]["jax"] == jax.__version__


def test_loss_of_language_models_and_of_both_tasks(tokenizer, tmp_path):
    """The loss per token is that of the examples, computed here without batches."""
    folder = data_folder(tmp_path)
    target, _ = pair(gpt, GPT, tokenizer)
    row = tokenizer("</s> Das ist ein Haus a house is a house </s>")["input_ids"]
    logits = jax.jit(gpt.GPT(GPT).apply)({"params": target.params}, jnp.array([row[:-1]]))
    log_probs = jax.nn.log_softmax(logits)[0]
    expected = -float(np.mean([log_probs[i, token] for i, token in enumerate(row[1:])]))
    assert report.heldout_loss(target, folder, "text") == pytest.approx(expected, rel=1e-4)
    with pytest.raises(FileNotFoundError):
        report.heldout_loss(target, tmp_path / "nowhere", "text")


def test_a_single_row_has_no_error():
    alpha = {"alpha": 0.5, "stderr": None, "low": None, "high": None, "positions": 3}
    task = {"rows": 1, "alpha": {"0": alpha}, "tokens_per_round": {"3": 1.5}, "same_text": 1, "compared": 1}
    side = {"name": "big", "parameters": 10, "dtype": "float32"}
    loss = {"synopsis": {"target": 1.0, "draft": 2.0}}
    made = report.table({"target": side, "draft": side, "loss": loss, "tasks": {"synopsis": task}})
    assert "0.500" in list(made.columns[3].cells)


@pytest.mark.slow
def test_report_as_a_command(found, tokenizer, tmp_path, monkeypatch):
    named, asked = {"big": pair(t5, T5, tokenizer)[0], "small": pair(t5, T5, tokenizer)[1]}, []

    def reported(target, draft, folder, **options):
        asked.append((target.name, draft.name, folder, options["rows"], options["max_new_tokens"]))
        options["advance"]("translation: target", 2)
        return found

    monkeypatch.setattr(report, "load", named.get)
    monkeypatch.setattr(report, "report", reported)
    app = typer.Typer()
    app.command()(report.main)
    arguments = ["--target", "big", "--draft", "small", "--data", str(tmp_path), "--rows", "2", "--new-tokens", "4"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    assert asked == [("big", "small", tmp_path, 2, 4)]
    assert "sacreBLEU" in result.output and "tokens per round, γ = 3" in result.output
    assert f"jax {jax.__version__}, jaxlib" in result.output.replace("\n", " ")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(found))
