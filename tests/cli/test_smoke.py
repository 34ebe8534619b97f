"""Every command does its main job once, on tiny networks in real folders."""

import json

import jax
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli import main
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.weights import orbax
from tests.small import tiny_gpt

WORDS = ["<pad>", "</s>", "<unk>", "the", "old", "dog", "saw", "a", "new", "cat"]
PAIR = ("--target", "target", "--draft", "draft")
FEW = ("--max-new-tokens", "6")
RECIPE = """
name = "table"
family = "ngram"
[data]
train = "texts.jsonl"
heldout = "texts.jsonl"
[tables]
target = "target"
order = 2
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with a target, a drafter, prompts and texts."""
    folder = tmp_path_factory.mktemp("project")
    word_tokenizer(WORDS, pad_token="<pad>").save_pretrained(folder / "words")
    config = tiny_gpt(len(WORDS))
    for seed, name in enumerate(("target", "draft")):
        params = decoder.init(config, jax.random.key(seed))
        options = dict(name=name, dtype="float32", description={})
        orbax.save(folder / name, params, config, folder / "words", **options)
    (folder / "template.jinja").write_text(
        "{% for message in messages %}{{ message.content }} {% endfor %}the"
    )
    (folder / "prompts.txt").write_text("the old dog\na new cat\n")
    rows = [{"text": "the old dog saw a new cat"}, {"text": "a cat saw the dog"}]
    (folder / "data").mkdir()
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "data" / "texts.jsonl").write_bytes((folder / "texts.jsonl").read_bytes())
    (folder / "table.toml").write_text(RECIPE)
    return folder


@pytest.fixture
def run(project, monkeypatch):
    """Runs a command in the project's folder; returns what it prints."""
    monkeypatch.chdir(project)
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    # these programs serve the tests that follow
    monkeypatch.setattr(jax, "clear_caches", lambda: None)

    def run(*arguments, code=0, typed=None):
        result = CliRunner().invoke(main.app, [*arguments], input=typed, env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    return run


@pytest.fixture
def plain_texts(project):
    """Returns the greedy texts of the target by itself."""
    target = jaxspec.load(project / "target")
    return lambda *prompts: list(jaxspec.generate(target, list(prompts), max_new_tokens=6).texts)


def test_every_command_has_a_test_here():
    assert {f"test_{name}" for name in main.COMMANDS} <= set(globals())


def test_generate(run, plain_texts):
    report = json.loads(run("generate", "the old dog", *PAIR, *FEW, "--gamma", "2", "--json"))
    assert report["texts"] == plain_texts("the old dog")


def test_chat(run):
    printed = run(
        "chat", *PAIR, *FEW, "--gamma", "2", "--chat-template", "template.jinja", typed="old dog\n"
    )
    assert "of 3 prompt tokens read before" in printed


def test_batch(run, project, plain_texts):
    command = (
        "batch",
        *PAIR,
        *FEW,
        "--gamma",
        "2",
        "--input",
        "prompts.txt",
        "--output",
        "answers",
        "--slots",
        "2",
    )
    run(*command)
    (part,) = (project / "answers").glob("part-*")
    written = part.read_bytes()
    rows = [json.loads(line) for line in written.decode().splitlines()]
    assert [row["text"] for row in rows] == plain_texts("the old dog", "a new cat")
    run(*command, "--resume")  # nothing is left to do
    assert part.read_bytes() == written


def test_transcribe(run):
    assert "nothing.wav" in run("transcribe", "nothing.wav", "--target", "target", code=2)


def test_score(run, project):
    run("score", "--target", "target", "--input", "texts.jsonl", "--output", "scores.jsonl")
    rows = [json.loads(line) for line in (project / "scores.jsonl").read_text().splitlines()]
    expected = jaxspec.score(
        jaxspec.load(project / "target"), ["the old dog saw a new cat", "a cat saw the dog"]
    )
    assert [row["log_prob"] for row in rows] == pytest.approx(
        [score.log_prob for score in expected], rel=1e-5
    )


def test_bench(run):
    options = (
        "--prompts",
        "prompts.txt",
        "--count",
        "1",
        "--rows",
        "1",
        "--repeats",
        "1",
        "--gamma",
        "2",
    )
    plain, drafted = json.loads(run("bench", *PAIR, *FEW, *options, "--json"))["rows"]
    assert drafted["same_text"] == drafted["texts"] == 1 and plain["setting"]["gamma"] == 0


def test_bench_of_alpha(run):
    options = (
        "--prompts",
        "prompts.txt",
        "--count",
        "2",
        "--gamma",
        "2",
        "--measure",
        "alpha",
    )
    rows = json.loads(run("bench", *PAIR, *FEW, *options, "-t", "0", "--json"))["rows"]
    assert 0 <= rows[-1]["alpha"]["value"] <= 1


def test_plan(run):
    report = json.loads(run("plan", "--alpha", "0.8", "--c", "0", "--gamma", "2", "--json"))
    assert "2.44" in json.dumps(report)  # 1 + 0.8 + 0.64


def test_verify(run, monkeypatch):
    from jaxspec.rules import catalogue

    # a rule of chains: fewer kinds of drafters are enumerated
    monkeypatch.setattr(catalogue, "RULES", {"block": catalogue.RULES["block"]})
    (row,) = json.loads(run("verify", "--gamma", "1", "--steps", "2", "--json"))["rules"]
    assert row["exact"] and max(row["total_variation"].values()) < 1e-5


def test_compare(run):
    options = ("--prompts", "prompts.txt", "--count", "1", "-n", "4")
    report = json.loads(run("compare", "target", "draft", *options, "--json"))
    assert len(report["prompts"]) == 1


def test_models(run):
    assert "debian-t5-large" in run("models")


def test_convert(run, project, plain_texts):
    run("convert", "target", "theirs", "--format", "huggingface")
    again = jaxspec.generate(jaxspec.load(project / "theirs"), "the old dog", max_new_tokens=6)
    assert list(again.texts) == plain_texts("the old dog")


def test_train(run):
    assert "contexts" in run("train", "table.toml")


def test_datastore(run):
    printed = run("datastore", "texts.jsonl", "--tokenizer", "target", "--out", "store")
    assert "of 2 texts" in printed
