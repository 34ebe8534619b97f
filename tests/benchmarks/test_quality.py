"""BLEU and ROUGE-L on texts whose scores can be told by hand, and the model card of a tiny pair."""

import builtins
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import model_card, quality
from jaxspec.core import Model
from jaxspec.nets import decoder, t5
from jaxspec.testing import word_tokenizer
from tests.small import tiny_gpt, tiny_t5


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
    # the longest common subsequence is "b d": precision 2/3, recall 2/4; the mean with a perfect
    # row
    assert quality.rouge_l(["b x d", "e"], ["a b c d", "e"]) == pytest.approx(
        (100 * 4 / 7 + 100) / 2
    )


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="2 hypotheses and 1 references"):
        quality.bleu(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="0 hypotheses"):
        quality.rouge_l([], [])
    with pytest.raises(ValueError, match="got one text"):
        quality.bleu("a", "a")


@pytest.mark.parametrize(
    ("package", "call"), [("sacrebleu", quality.bleu), ("rouge_score", quality.rouge_l)]
)
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
    with pytest.raises(ImportError, match=r'pip install "\.\[train\]"'):
        call(["a"], ["a"])
    with pytest.raises(ImportError, match=package.replace("_", "-")):
        quality.check()


WORDS = ["<pad>", "</s>", "<unk>", "Das", "ist", "ein", "Haus", "a", "house", "is"]
T5 = tiny_t5(len(WORDS))
GPT = tiny_gpt(len(WORDS), max_positions=640)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS, pad_token="<pad>")


def data_folder(folder):
    """A data folder with a few held-out examples."""
    pair = {"input": "a house", "output": "ein Haus", "package": "x"}
    rows = [json.dumps(pair | {"task": task}) for task in ("translation", "synopsis")]
    (folder / "t5.heldout.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "gpt.heldout.jsonl").write_text(
        json.dumps({"text": "Das ist ein Haus a house is a house"}) + "\n"
    )
    return folder


def pair(net, config, tokenizer) -> tuple[Model, Model]:
    params = [jax.jit(net.init, static_argnums=0)(config, jax.random.key(seed)) for seed in (0, 1)]
    lm = net.language_model(config)
    return Model(lm, params[0], tokenizer, config, "big"), Model(
        lm, params[1], tokenizer, config, "small"
    )


@pytest.mark.slow
def test_card_of_a_translating_pair(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "GAMMAS", (3,))
    target, draft = pair(t5, T5, tokenizer)
    cards = model_card.card(target, draft, data_folder(tmp_path), rows=2, new_tokens=6)
    assert [(card.task, card.metric) for card in cards] == [
        ("translation", "sacreBLEU"),
        ("synopsis", "ROUGE-L"),
    ]
    for card in cards:
        assert card.loss == pytest.approx((math.log(len(WORDS)),) * 2, abs=2.0)
        assert card.quality is not None and all(0 <= score <= 100 for score in card.quality)
        assert len(card.thirds) == 2 and all(fewest <= most for fewest, most, *_ in card.thirds)
        drafting = [row for row in card.rows if not row.setting.is_plain]
        assert [(row.setting.temperature, row.setting.gamma, row.texts) for row in drafting] == [
            (0.0, 3, 2),
            (1.0, 3, 2),
        ]
        assert drafting[0].same_text == 2
        assert all(0 <= row.alpha.low <= row.alpha.value <= row.alpha.high <= 1 for row in drafting)
    cells = [
        str(cell)
        for column in model_card.table(cards, "big", "small").columns
        for cell in column.cells
    ]
    assert {"sacreBLEU", "tokens per round, γ = 3"} <= set(cells)


@pytest.mark.slow
def test_loss_of_language_models_and_of_both_tasks(tokenizer, tmp_path):
    """The loss per token is that of the examples, computed here without batches."""
    folder = data_folder(tmp_path)
    target, _ = pair(decoder, GPT, tokenizer)
    row = tokenizer("</s> Das ist ein Haus a house is a house </s>")["input_ids"]
    logits = jax.jit(decoder.DecoderNet(GPT).apply)(
        {"params": target.params}, jnp.array([row[:-1]])
    )
    log_probs = jax.nn.log_softmax(logits)[0]
    expected = -float(np.mean([log_probs[i, token] for i, token in enumerate(row[1:])]))
    assert model_card.heldout_loss(target, folder, "text") == pytest.approx(expected, rel=1e-4)
    with pytest.raises(FileNotFoundError):
        model_card.heldout_loss(target, tmp_path / "nowhere", "text")
