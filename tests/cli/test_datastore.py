"""`jaxspec datastore`: from texts to a folder that `drafters.retrieval` drafts from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec import drafters
from jaxspec.cli.main import app
from jaxspec.drafters.lookups import datastore
from jaxspec.files import folders
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.weights import huggingface, loading, orbax
from tests.small import tiny_gpt

WORDS = ["<pad>", "</s>", "<unk>", "the", "old", "dog", "saw", "a", "new", "cat"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a target and texts, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    word_tokenizer(WORDS, pad_token="<pad>").save_pretrained(tmp_path / "words")
    config = tiny_gpt(len(WORDS))
    options = dict(name="target", dtype="float32", description={})
    orbax.save(
        tmp_path / "target",
        decoder.init(config, jax.random.key(0)),
        config,
        tmp_path / "words",
        **options,
    )
    (tmp_path / "texts.txt").write_text("the old dog\n\nthe old cat saw a new dog\n")
    rows = [{"task": task, "output": f"a {task} dog"} for task in ("old", "new")]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, ["datastore", *arguments])


@pytest.mark.slow
def test_texts_become_a_datastore_that_is_drafted_from(project):
    result = call("texts.txt", "--tokenizer", "target", "--out", "store")
    assert result.exit_code == 0, result.output
    assert "store: 12 tokens of 2 texts, " in result.stdout
    target = loading.load("target")
    drafter = drafters.retrieval("store", target)
    out = jaxspec.generate(target, "the old", drafter=drafter, gamma=2, max_new_tokens=6)
    assert (out.tokens == jaxspec.generate(target, "the old", max_new_tokens=6).tokens).all()
    description = datastore.read_manifest("store").about
    assert description == {
        "texts": ["texts.txt"],
        "field": "text",
        "tasks": [],
        "tokenizer": "target",
    }


@pytest.mark.parametrize("where", ["build", "save"])
def test_an_interrupted_build_leaves_nothing(project, monkeypatch, where):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    before = set(project.iterdir())
    monkeypatch.setattr(
        *(datastore, "build") if where == "build" else (folders, "put_in_place"), interrupt
    )
    assert call("texts.txt", "--tokenizer", "target", "--out", "store").exit_code == 130
    assert set(project.iterdir()) == before


@pytest.mark.slow
def test_a_terminated_build_leaves_nothing(project):
    """By SIGTERM, as a scheduler ends what it started: the process clears away what it has
    written.
    """
    before = set(project.iterdir())
    code = (
        "import os, signal; from jaxspec.files import folders; from jaxspec.cli.main import app\n"
        "folders.put_in_place = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "app(['datastore', 'texts.txt', '--tokenizer', 'target', '--out', 'store'])"
    )
    environment = {"PYTHONPATH": str(Path(datastore.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=False)
    assert ended.returncode == 143
    assert set(project.iterdir()) == before


def test_a_field_of_one_task(project):
    options = ("--tokenizer", "target", "--field", "output", "--task", "new", "--out", "store")
    assert call("pairs.jsonl", *options).exit_code == 0
    wanted = [WORDS.index(word) + 1 for word in ("a", "new", "dog", "</s>")]
    assert datastore.load("store").tokens.tolist() == [*wanted, 0]
    result = call("pairs.jsonl", *options)
    assert result.exit_code == 2 and "store exists: give --overwrite to replace it" in result.stderr
    assert call("pairs.jsonl", *options, "--overwrite").exit_code == 0


def test_the_target_may_be_a_hugging_face_folder(project):
    huggingface.save(loading.load("target"), "theirs")
    for tokenizer in ("target", "theirs"):
        assert (
            call("texts.txt", "--tokenizer", tokenizer, "--out", f"for-{tokenizer}").exit_code == 0
        )
    ours, theirs = datastore.load("for-target"), datastore.load("for-theirs")
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.vocabulary == theirs.vocabulary
    assert datastore.read_manifest("for-theirs").about["tokenizer"] == "theirs"


def test_what_cannot_work_is_refused(project, monkeypatch):
    for arguments, said in [
        (("none.txt", "--tokenizer", "target"), "no text at none.txt"),
        (("texts.txt", "--tokenizer", "nobody"), "no checkpoint at nobody"),
        (("pairs.jsonl", "--tokenizer", "target"), "line 1 has no 'text'"),
        (
            ("texts.txt", "--tokenizer", "target", "--task", "a"),
            "does not read --task: leave it out",
        ),
        (
            ("texts.txt", "--tokenizer", "target", "--field", "a", "--task", "b"),
            "does not read --field, --task: leave",
        ),
    ]:
        result = call(*arguments, "--out", "store")
        assert result.exit_code == 2 and said in result.stderr
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    result = call("texts.txt", "--tokenizer", "target", "--out", "store")
    assert result.exit_code == 2 and 'pip install ".[datastore]"' in result.stderr
    assert not (project / "store").exists()
