"""`python -m data_prep.debian`: what it makes, and what it says where something is missing."""

import re

import pytest

from data_prep.debian import catalogues, edits, examples, index, tokenizers
from data_prep.debian.__main__ import main


def call(*arguments):
    main(arguments)


def test_a_folder_without_indices_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*i18n_Translation-en"):
        call("--lists", str(tmp_path), "--data", str(tmp_path / "data"))


@pytest.fixture
def preparing(tmp_path, monkeypatch):
    """The steps of preparing, recorded."""
    monkeypatch.chdir(tmp_path)
    steps = []

    def train(data, t5_dir, gpt_dir):
        for folder in (t5_dir, gpt_dir):
            folder.mkdir(parents=True)
            (folder / "tokenizer.json").write_text("{}")
        steps.append("tokenizers")

    monkeypatch.setattr(index, "fetch", lambda lists: steps.append(f"fetch {lists}"))
    monkeypatch.setattr(
        examples,
        "build",
        lambda lists, data: steps.append(f"build {data}") or {"t5.train.jsonl": 1234},
    )
    monkeypatch.setattr(
        edits, "build", lambda data: steps.append(f"edits {data}") or {"edit.train.jsonl": 56}
    )
    monkeypatch.setattr(tokenizers, "train_tokenizers", train)
    return steps


def test_preparing_fetches_builds_and_trains_tokenizers(preparing, capsys):
    call("--data", "d")
    assert preparing == ["fetch d/lists", "build d", "edits d", "tokenizers"]
    printed = capsys.readouterr().out
    assert "1,234 rows" in printed and "56 rows" in printed


def test_tokenizers_that_are_there_are_not_made_again(preparing, capsys):
    call("--lists", "mine")
    call("--lists", "mine")
    assert preparing == ["build data", "edits data", "tokenizers", "build data", "edits data"]
    assert "are not made again" in capsys.readouterr().out


def test_packages_that_were_not_to_be_had_are_named(preparing, monkeypatch, capsys):
    monkeypatch.setattr(
        catalogues, "fetch", lambda folder: preparing.append(f"fetch {folder}") or ["zim"]
    )
    monkeypatch.setattr(catalogues, "build", lambda folder, data: {"t5-catalogues.train.jsonl": 78})
    call("--catalogues")
    printed = capsys.readouterr().out
    assert "fetch data/packages" in preparing
    assert "1 packages were not to be had" in printed and "78 rows" in printed


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("apt-get was not found"), "error: apt-get was not found"),
        (ImportError('pip install ".[train]"'), 'error: pip install ".[train]"'),
    ],
)
def test_what_preparing_lacks_is_named(preparing, monkeypatch, error, said):
    def fetch(lists):
        raise error

    monkeypatch.setattr(index, "fetch", fetch)
    with pytest.raises(SystemExit, match=re.escape(said)):
        call()
