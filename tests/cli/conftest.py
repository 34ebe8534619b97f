"""`jaxspec generate` on table models, and what is printed as text, for the tests of several files."""

import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner

from jaxspec import model
from jaxspec.analysis.measure import cost
from jaxspec.cli.main import app
from jaxspec.testing import table_model
from jaxspec.weights.orbax import CheckpointError

WORDS = ["<pad>", "</s>", "<unk>", "▁der", "▁die", "▁das", "▁alte", "▁neue", "▁Hund", "▁Katze", "▁sah", "▁und"]
WORDS += ["n", "s", ".", ",", "▁ein", "▁klein"]
SMALL = ("-n", "12", "-g", "3", "--count", "2")  # few shapes: every test shares the same few programs


def tokenizer(words=WORDS):
    """Words and word ends, as a T5's; what it does not know is <unk>."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **special)


def made(name, seed, encoder=True, words=WORDS):
    table = table_model(jax.random.key(seed), len(WORDS), order=1, sharpness=3.0, encoder=encoder)
    return table._replace(name=name, tokenizer=tokenizer(words))


@pytest.fixture(scope="session")
def zoo():
    base = made("debian-t5-large", 1)
    gpt = made("debian-gpt-base", 3, encoder=False)
    return {
        "debian-t5-large": base,
        "debian-t5-draft": made("debian-t5-draft", 2)._replace(params=base.params * 0.7),  # often right
        "debian-gpt-base": gpt._replace(lm=gpt.lm._replace(max_positions=512)),
        "debian-gpt-small": made("debian-gpt-small", 4, encoder=False),
        "stranger": made("stranger", 2, words=[*WORDS[:5], *reversed(WORDS[5:])]),
        "broken": base._replace(params=base.params * np.nan),
    }


@pytest.fixture
def loading(zoo, monkeypatch):
    """The zoo instead of checkpoints."""

    def load(name, dtype, mesh=None):
        assert (dtype, mesh) == ("float32", None)
        if name not in zoo:
            raise CheckpointError(f"no checkpoint at {name}")
        return zoo[name]

    monkeypatch.setattr(model, "load", load)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # the zoo's programs are few, and serve other tests, too
    monkeypatch.setattr(cost, "MIN_SECONDS", 0.0)  # of what a table model's passes cost nothing is expected
    monkeypatch.setattr(model, "shipped", lambda: {name: Path(name) for name in zoo})
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)


@pytest.fixture
def invoke(loading):
    """Runs `jaxspec generate` on the zoo, on small shapes."""

    def invoke(*arguments, **options):
        return CliRunner().invoke(app, ["generate", *SMALL, *arguments], **{"env": {"COLUMNS": "160"}, **options})

    return invoke


@pytest.fixture
def run(invoke):
    """What a command that succeeds prints."""

    def run(*arguments, **options):
        result = invoke(*arguments, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def report(run):
    """What a command that succeeds reports as JSON."""
    return lambda *arguments, **options: json.loads(run(*arguments, "--json", **options))


@pytest.fixture
def shown():
    """What a renderable looks like."""

    def shown(renderable, width=100):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(renderable)
        return console.file.getvalue()

    return shown
