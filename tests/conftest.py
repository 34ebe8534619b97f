"""Fixtures that tests of more than one package use."""

import html.parser
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import rules
from jaxspec.analysis import cost
from jaxspec.core import Rule, noise, token_rows
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model
from jaxspec.weights import loading as model_loading
from jaxspec.weights import orbax
from jaxspec.weights.orbax import CheckpointError

collect_ignore = ["scripts"]  # they are run by tests, in processes of their own, or by hand
ROOT = Path(__file__).resolve().parents[1]
# last on the path: an installed jaxspec stays the one that is tested
if (ROOT / "benchmarks").is_dir():
    sys.path.append(str(ROOT))
else:
    collect_ignore += ["benchmarks", "data_prep", "pairs"]


def compiled_cases(script, *arguments):
    """Compiles the cases of a script in a process that has no other backend than the CPU; returns
    them by name.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [
        line.removeprefix("compiled ")
        for line in done.stdout.splitlines()
        if line.startswith("compiled ")
    ]
    return {case["name"]: case for case in map(json.loads, lines)}


class Bytes:
    """A tokenizer, as far as spelling needs one: a token is a byte, and there is one special
    token.
    """

    end = 256

    def decode(self, tokens, skip_special_tokens, clean_up_tokenization_spaces):
        assert skip_special_tokens and not clean_up_tokenization_spaces
        return bytes(token for token in tokens if token != self.end).decode(
            "utf-8", errors="replace"
        )

    def convert_ids_to_tokens(self, token):
        return "<end>" if token == self.end else f"<{token}>"


@pytest.fixture(scope="session")
def chromium_command():
    """A Chromium or Chrome, and the flags that keep it quiet and off the network: the beginning of
    a command.
    """
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.skip("there is no Chromium or Chrome on the PATH")
    quiet = (
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
    )
    return [path, "--no-sandbox", "--disable-gpu", *quiet, "--disable-sync"]


@pytest.fixture
def spelling():
    """A tokenizer of bytes."""
    return Bytes()


class Markup(html.parser.HTMLParser):
    """The text of HTML, its tags, and the text of each span with its style. Tags must be closed in
    order.
    """

    def __init__(self, markup):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.spans, self.said = [], [], [], ""
        self.feed(markup)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append((tag, dict(attributes).get("style", "")))
            self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.said += data
        if self.open and self.open[-1][0] == "span":
            self.spans.append((data, self.open[-1][1]))


@pytest.fixture
def read():
    """Reads HTML."""
    return Markup


@pytest.fixture
def wrong_rule():
    """The rejection rule with the mistake that is made most often: after a rejection it draws from
    p.
    """

    def verify(keys, position, draft, target):
        verdict = rules.rejection().verify(keys, position, draft, target)
        again = noise.at(keys, position, noise.Purpose.RESIDUAL)
        return verdict._replace(next_token=noise.categorical(again, target.log_probs[:, 0]))

    return Rule(verify, "wrong", exact=True)  # or so it states


@pytest.fixture
def permuted():
    """New tokens and counts of each row of a batch, decoded as it is, and permuted for three rounds
    on the way.
    """

    def texts(state):
        tokens, start, length, stats = jax.device_get(
            (state.tokens, state.start, state.length, state.stats)
        )
        assert not np.asarray(state.failed).any()
        rows = zip(tokens, start, length, np.array(stats).T.tolist(), strict=True)
        return [(row[first:last].tolist(), counts) for row, first, last, counts in rows]

    def permuted(target, drafter, vocab=3):
        rows = [np.arange(row + 2) % vocab for row in range(4)]
        limits, heats = np.array([9, 14, 5, 11]), np.array([1.0, 0.0, 0.7, 1.0])
        keys = jax.random.split(jax.random.key(5), 4)
        options = dict(max_new_tokens=limits, temperature=heats, key=keys, eos_ids=())
        prepared = prepare(target, token_rows.pad(rows, 8), drafter=drafter, gamma=2, **options)

        def start():
            return loop.start(
                prepared.decoder,
                prepared.weights,
                prepared.prompt,
                prepared.request,
                prepared.max_new_tokens,
            )

        def advanced(state, rounds=100):
            for _ in range(rounds):
                if bool(state.done.all()):
                    break
                state, _ = loop.advance(prepared.decoder, prepared.weights, state)
            return state

        order = np.array([2, 0, 3, 1])
        state = advanced(token_rows.take_rows(advanced(start(), 1), order), 3)
        return texts(advanced(start())), texts(
            advanced(token_rows.take_rows(state, np.argsort(order)))
        )

    return permuted


WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "▁der",
    "▁die",
    "▁das",
    "▁alte",
    "▁neue",
    "▁Hund",
    "▁Katze",
    "▁sah",
    "▁und",
]
WORDS += ["n", "s", ".", ",", "▁ein", "▁klein"]


def tokenizer(words=WORDS):
    """Words and word ends, as a T5's; what it does not know is <unk>."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, clean_up_tokenization_spaces=False, **special
    )


def word_model(name, seed, encoder=True, words=WORDS):
    table = table_model(jax.random.key(seed), len(WORDS), order=1, sharpness=3.0, encoder=encoder)
    return table._replace(name=name, tokenizer=tokenizer(words))


@pytest.fixture(scope="session")
def zoo():
    base = word_model("debian-t5-large", 1)
    gpt = word_model("debian-gpt-base", 3, encoder=False)
    return {
        "debian-t5-large": base,
        # often right
        "debian-t5-draft": word_model("debian-t5-draft", 2)._replace(params=base.params * 0.7),
        "debian-gpt-base": gpt._replace(
            lm=gpt.lm._replace(limits=gpt.lm.limits._replace(max_positions=512))
        ),
        "debian-gpt-small": word_model("debian-gpt-small", 4, encoder=False),
        "stranger": word_model("stranger", 2, words=[*WORDS[:5], *reversed(WORDS[5:])]),
        "broken": base._replace(params=base.params * np.nan),
    }


@pytest.fixture
def loading(zoo, monkeypatch):
    """The zoo instead of checkpoints."""

    def load(
        name,
        dtype="float32",
        compute=None,
        mesh=None,
        chat_template=None,
        adapter=None,
        **languages,
    ):
        assert (dtype, mesh, adapter) == ("float32", None, None) and not any(languages.values())
        if name not in zoo:
            raise CheckpointError(f"no checkpoint at {name}")
        if chat_template is not None:
            monkeypatch.setattr(zoo[name].tokenizer, "chat_template", chat_template.read_text())
        return zoo[name]

    # first: asking for it keeps the real one in the module
    monkeypatch.setattr(jaxspec, "load", load)
    monkeypatch.setattr(model_loading, "load", load)
    # the zoo's programs are few, and serve other tests, too
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    # of what a table model's passes cost nothing is expected
    monkeypatch.setattr(cost, "MIN_SECONDS", 0.0)
    by_marker = {orbax.MANIFEST: {name: Path(name) for name in zoo}}
    monkeypatch.setattr(
        model_loading, "shipped", lambda marker=orbax.MANIFEST: by_marker.get(marker, {})
    )
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
