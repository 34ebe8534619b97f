"""`jaxspec generate`: what it decodes, what it prints and what it refuses, with tables for models."""

import io
import json
import sys

import jax
import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner

import jaxspec
from jaxspec import model
from jaxspec.analysis import acceptance, cost
from jaxspec.cli import generate, render
from jaxspec.cli.main import app
from jaxspec.testing import table_model
from jaxspec.weights.orbax import CheckpointError

runner = CliRunner()
SMALL = ("-n", "12", "-g", "3", "--count", "2")  # few shapes: every test shares the same few programs
PROMPT = generate.heldout("translation", 1)[0]
WORDS = ["<pad>", "</s>", "<unk>", "▁der", "▁die", "▁das", "▁alte", "▁neue", "▁Hund", "▁Katze", "▁sah", "▁und"]
WORDS += ["n", "s", ".", ",", "▁ein", "▁klein"]


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


@pytest.fixture(scope="module")
def zoo():
    base = made("debian-t5-base", 1)
    gpt = made("debian-gpt-base", 3, encoder=False)
    return {
        "debian-t5-base": base,
        "debian-t5-small": made("debian-t5-small", 2)._replace(params=base.params * 0.7),  # often right
        "debian-gpt-base": gpt._replace(lm=gpt.lm._replace(max_positions=512)),
        "debian-gpt-small": made("debian-gpt-small", 4, encoder=False),
        "stranger": made("stranger", 2, words=[*WORDS[:5], *reversed(WORDS[5:])]),
        "broken": base._replace(params=base.params * np.nan),
    }


@pytest.fixture(autouse=True)
def loading(zoo, monkeypatch):
    def load(name, dtype):
        assert dtype == "float32"
        if name not in zoo:
            raise CheckpointError(f"no checkpoint at {name}")
        return zoo[name]

    monkeypatch.setattr(model, "load", load)
    monkeypatch.setattr(model, "shipped", lambda: dict.fromkeys(zoo))
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)


def run(*arguments, **options):
    result = runner.invoke(app, ["generate", *arguments], **{"env": {"COLUMNS": "160"}, **options})
    assert result.exit_code == 0, result.output
    return result.stdout


def report(*arguments, **options):
    return json.loads(run(*arguments, "--json", *SMALL, **options))


def refused(*arguments, **options):
    result = runner.invoke(app, ["generate", *SMALL, *arguments], **options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_json_says_what_the_library_says(zoo):
    found = report(PROMPT)
    out = jaxspec.generate(zoo["debian-t5-base"], [PROMPT], drafter=zoo["debian-t5-small"], gamma=3, max_new_tokens=12)
    assert found["prompts"] == [PROMPT]
    assert found["texts"] == out.texts
    assert found["tokens"] == [out.tokens[0, : out.lengths[0]].tolist()]
    for name, values in out.stats._asdict().items():
        assert found["stats"][name] == values.tolist()
    total = found["stats"]["total"]
    assert total["emitted"] == len(found["tokens"][0])
    assert total["drafted"] > 0
    assert total["acceptance_rate"] == total["accepted"] / total["drafted"]
    assert found["settings"]["draft"] == "debian-t5-small"
    assert found["versions"]["jax"] == jax.__version__
    assert found["device"]["device"] == "cpu"


def test_plain_decoding_has_the_same_text_and_no_guesses():
    plain, speculative = report(PROMPT, "--draft", "none"), report(PROMPT)
    assert plain["texts"] == speculative["texts"]
    assert plain["stats"]["drafted"] == [0]
    assert plain["settings"]["draft"] is None


def test_without_prompts_it_takes_held_out_ones():
    found = report()
    assert found["prompts"] == generate.heldout("translation", 2)
    assert all(p.startswith("translate English to German: ") for p in found["prompts"])


def test_a_decoder_only_target_continues_held_out_texts_with_its_small_sibling():
    found = report("--target", "debian-gpt-base")
    assert found["prompts"] == generate.heldout("text", 2)
    assert found["settings"]["draft"] == "debian-gpt-small"


@pytest.mark.parametrize("mode", [(), ("--batch",)])
def test_rounds_are_reported_whole(mode):
    found = report("--trace", "-t", "1", *mode)
    for rounds, tokens, count in zip(found["rounds"], found["tokens"], found["stats"]["rounds"], strict=True):
        assert [t for step in rounds for t in step["tokens"]] == tokens
        assert len(rounds) == count + 1
        for step in rounds[1:]:
            kept = min(step["accepted"], len(step["tokens"]))
            assert step["tokens"][:kept] == step["draft"][:kept]


def test_a_samples_text_depends_on_the_seed_alone():
    one, batch, other = report("-t", "1"), report("-t", "1", "--batch"), report("-t", "1", "--seed", "1")
    assert one["tokens"] == batch["tokens"]
    assert one["tokens"] != other["tokens"]


@pytest.mark.parametrize("mode", [(), ("--batch",)])
def test_text_and_counts_are_printed(mode):
    found, shown = report(), run(*SMALL, *mode)
    assert "English" in shown
    for text in found["texts"]:
        assert text in shown
    assert "target" in shown
    assert f"{found['stats']['total']['drafted']}" in shown
    assert "the work of" in shown


@pytest.mark.parametrize("mode", [(), ("--batch",)])
def test_a_trace_has_a_line_for_each_round(mode, zoo):
    found, lines = report("--trace"), run("--trace", *SMALL, *mode).splitlines()
    numbered = [line for line in lines if line[:3].strip().isdigit()]
    steps = [(n, step) for rounds in found["rounds"] for n, step in enumerate(rounds)]
    assert len(numbered) == len(steps)
    done: list[int] = []
    for line, (n, step) in zip(numbered, steps, strict=True):
        done = [] if n == 0 else done
        told = render.Round(done, step["tokens"], step["draft"], step["accepted"])
        words = zoo["debian-t5-base"].tokenizer
        assert line == render.trace(words, n, told, width=160, colour=False).plain
        done = done + step["tokens"]


def test_a_terminal_gets_colours_and_growing_text():
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "160"}
    assert "\x1b[34m" in run("--trace", *SMALL, env=terminal)
    assert run(*SMALL, env=terminal).count("\x1b[2K") > 5  # lines drawn again


def test_prompts_come_a_line_each_from_a_file_or_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"das alte\r\n\n  \ndie neue")
    expected = ["das alte", "die neue"]
    assert generate._given_prompts(None, str(file)) == expected
    for prompt, source in (("-", None), (None, "-"), (None, None)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(file.read_text()))
        assert generate._given_prompts(prompt, source) == expected


def test_what_is_piped_in_is_decoded():
    assert report(input=f"{PROMPT}\n\n{PROMPT}")["prompts"] == [PROMPT, PROMPT]


def test_a_silent_pipe_does_not_hang(monkeypatch, capsys):
    import os

    read, write = os.pipe()
    monkeypatch.setattr(generate, "PATIENCE", 0.01)
    with os.fdopen(read) as stdin, os.fdopen(write, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert generate._given_prompts(None, None) == []
    assert "standard input" in capsys.readouterr().err


def test_a_terminal_is_not_read(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("not to be read"))
    assert generate._given_prompts(None, None) == []


def test_text_ends_before_a_stop_string():
    wholes = report()["texts"]
    row, whole = next((i, text) for i, text in enumerate(wholes) if " " in text)
    stop = whole.split(" ")[1]
    cut = whole[: whole.index(stop)]
    assert report("--stop", stop)["texts"][row] == cut
    assert whole not in run("--stop", stop, *SMALL)


@pytest.fixture
def costs(monkeypatch):
    """Comparisons that take little: two runs of each side, and given alpha, c and v."""

    def alpha(target, prompts, *, drafter, temperature, top_k, top_p, max_new_tokens, key):
        assert (target.name, drafter.name, len(prompts.length)) == ("debian-t5-base", "debian-t5-small", 2)
        return acceptance.Acceptance(np.array([3.0, 5.0]), np.array([5, 5]))

    def passes(target, drafter, prompts, *, gamma, repeats, max_new_tokens):
        rows.append(len(prompts.length))
        return cost.Cost(gamma, 1, target=np.array([10.0]), verify=np.array([20.0]), draft=np.array([5.0]))

    rows: list[int] = []
    monkeypatch.setattr(acceptance, "measure", alpha)
    monkeypatch.setattr(cost, "measure", passes)
    monkeypatch.setattr(generate, "REPEATS", 2)
    return rows


def test_a_comparison(costs):
    found = report("--compare")["compare"]
    assert found["identical"] is True
    assert found["ratio"] == pytest.approx(found["speculative"] / found["plain"])
    assert (found["alpha"], found["c"], found["v"]) == (0.8, 0.5, 2.0)
    assert found["predicted"] == pytest.approx((1 - 0.8**4) / 0.2 / (3 * 0.5 + 2))
    assert costs == [1]


def test_a_comparison_is_printed(costs):
    shown = run("--compare", *SMALL)
    for part in ("plain", "speculative, γ = 3", "Theorem 3.8", "α = 0.800", "identical"):
        assert part in shown


def test_batches_are_compared_as_batches(costs, monkeypatch):
    monkeypatch.setattr(generate, "_run", lambda jobs: [[3]] * sum(len(job.prompt.length) for job in jobs))
    assert report("--compare", "--batch")["compare"]["identical"] is True
    assert costs == [2]


def test_samples_are_not_compared_for_identity(costs, monkeypatch):
    monkeypatch.setattr(generate, "_run", lambda jobs: [[3]] * len(jobs))
    assert report("--compare", "-t", "1")["compare"]["identical"] is None


def test_texts_that_differ_are_shown_where(costs, monkeypatch):
    said = iter([[[4, 3, 5], [7, 8]], [[4, 3, 5], [7, 9]]] * 3)
    monkeypatch.setattr(generate, "_run", lambda jobs: next(said))
    found = report("--compare")["compare"]
    assert found["identical"] is False
    assert (
        "1 of 2 prompts; first in prompt 2, token 2: ' Hund' where plain decoding has ' Katze'" in found["difference"]
    )


def test_a_text_that_stops_early_differs_there(zoo, monkeypatch):
    session = generate.Session(None, zoo["debian-t5-base"], None, [], None, None)
    assert "token 3: 'nothing'" in generate._first_difference(session, [[4, 3]], [[4, 3, 5]])
    assert generate._first_difference(session, [[4, 3]], [[4, 3]]) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "prompt 0 is empty"),
        (["a", "--gamma", "-1"], "gamma is -1"),
        (["a", "-n", "0"], "max_new_tokens is 0"),
        (["a", "-t", "-1"], "temperature is -1"),
        (["a", "-t", "nan"], "temperature is nan"),
        (["a", "--top-p", "0", "-t", "1"], "top_p is 0"),
        (["a", "--top-p", "1.5", "-t", "1"], "top_p is 1.5"),
        (["a", "--top-k", "0", "-t", "1"], "top_k is 0"),
        (["a", "--target", "nowhere", "--draft", "none"], "no checkpoint at nowhere"),
        (["a", "--target", "stranger"], "needs a --draft"),
        (["a", "--draft", "stranger"], "different tokenizers"),
        (["a", "--draft", "debian-gpt-small"], "both must be of one kind"),
        (["das " * 600, "--target", "debian-gpt-base"], "positions"),
        (["a", "--file", "b"], "expected one of them"),
        (["--file", "/no/such/file"], "/no/such/file: No such file"),
        (["-"], "standard input holds no prompt"),
        (["a", "--compare", "--draft", "none"], "--compare"),
        (["a", "--compare", "--gamma", "0"], "--compare"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, said):
    assert said in refused(*arguments)


def test_logits_that_are_not_finite_are_refused():
    assert "not finite" in refused("--target", "broken", "--draft", "none", "--json")


def test_a_file_that_is_no_text(tmp_path):
    file = tmp_path / "prompts.bin"
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused("--file", str(file))


def test_held_out_prompts_are_counted():
    assert len(generate.heldout("synopsis", 3)) == 3
    with pytest.raises(ValueError, match="count is 0"):
        generate.heldout("text", 0)
