"""`jaxspec batch`: what it writes, and what it refuses to go on with."""

import errno
import gzip
import json

import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec import files
from jaxspec.cli.main import app
from jaxspec.cli.prompts import heldout

PROMPTS = heldout("translation", 7)


@pytest.fixture
def batch(loading, tmp_path):
    """Runs `jaxspec batch` on the zoo, on some prompts."""
    path = tmp_path / "prompts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps({"id": f"p{n}", "text": prompt}) + "\n" for n, prompt in enumerate(PROMPTS))

    def batch(*arguments):
        fixed = ["--input", str(path), "--output", str(tmp_path / "out"), "--field", "text", "-n", "12", "--slots", "2"]
        return CliRunner().invoke(app, ["batch", *fixed, "--chunk", "3", *arguments], env={"COLUMNS": "200"})

    return batch


def rows_in(folder):
    return [json.loads(line) for path in sorted(folder.glob("part-*")) for line in path.read_text().splitlines()]


def test_a_job_is_written_in_chunks_and_goes_on_at_the_first_that_is_missing(batch, zoo, tmp_path):
    assert (result := batch("--tokens")).exit_code == 0, result.output
    chunks = sorted((tmp_path / "out").glob("part-*"))
    assert [len(path.read_text().splitlines()) for path in chunks] == [3, 3, 1]
    rows, contents = rows_in(tmp_path / "out"), [path.read_bytes() for path in chunks]
    assert [row["id"] for row in rows] == [f"p{n}" for n in range(7)]
    assert "7 prompts" in result.stderr
    chunks[1].unlink()
    chunks[2].unlink()
    refused = batch("--tokens")
    assert refused.exit_code == 2 and "give --resume" in refused.stderr
    assert batch("--tokens", "--resume").exit_code == 0
    assert [path.read_bytes() for path in chunks] == contents


@pytest.mark.parametrize("change", [("--seed", "1"), ("-n", "13"), ("--temperature", "1"), ("--chunk", "4")])
def test_another_job_is_not_gone_on_with(batch, change):
    assert batch("--tokens").exit_code == 0
    result = batch("--tokens", "--resume", *change)
    assert result.exit_code == 2
    assert "is of another job" in result.stderr


def test_wrong_lines_have_errors_and_the_others_texts(batch, tmp_path):
    path = tmp_path / "wrong.jsonl"
    lines = [b'{"text": "a file"}', b"text", b'{"text": "\xff"}', b'{"other": 1}', b'{"text": ""}', b"[3]"]
    path.write_bytes(b"\n".join(lines))
    assert (result := batch("--input", str(path))).exit_code == 0, result.output
    wrong = rows_in(tmp_path / "out")[7:]
    assert [row["error"] is None for row in wrong] == [True, False, False, False, True, False]
    said = ["no JSON", "not UTF-8", "--field", "expected a JSON object"]
    assert all(word in row["error"] for word, row in zip(said, [*wrong[1:4], wrong[5]], strict=True))
    assert [row["number"] for row in wrong] == list(range(7, 13))
    assert "13 prompts" in result.stderr and "4 prompts with errors" in result.stderr


@pytest.mark.parametrize("command", ["batch", "chat"])
def test_a_policy_needs_a_drafter(batch, command):
    arguments = ("--draft", "none", "--policy", "heuristic")
    runner = CliRunner().invoke(app, ["chat", *arguments]) if command == "chat" else batch(*arguments)
    assert runner.exit_code == 2 and "got a policy and no drafter" in runner.stderr


def test_shards_must_be_of_one_job(batch, tmp_path):
    assert batch("--shard", "0", "--num-shards", "2").exit_code == 0
    assert batch("--shard", "1", "--num-shards", "2").exit_code == 0
    assert sorted(row["number"] for row in rows_in(tmp_path / "out")) == list(range(7))
    assert batch("--shard", "2", "--num-shards", "2").exit_code == 2
    result = batch("--shard", "1", "--num-shards", "3")
    assert result.exit_code == 2 and "num_shards is 2 there and 3 here" in result.stderr


def test_a_policy_keeps_the_costs_that_it_measured(batch, tmp_path):
    """Other costs may make other drafts, and these another text."""
    adaptive = ("--policy", "adaptive", "-t", "1", "--chunk", "4")
    assert (result := batch(*adaptive)).exit_code == 0, result.output
    manifest = tmp_path / "out" / "manifest-00000-of-00001.json"
    costs = json.loads(manifest.read_text())["costs"]
    assert costs["v"][0] == 1.0
    chunks = sorted((tmp_path / "out").glob("part-*"))
    contents = [path.read_bytes() for path in chunks]
    chunks[-1].unlink()
    assert (result := batch(*adaptive, "--resume")).exit_code == 0, result.output
    assert json.loads(manifest.read_text())["costs"] == costs
    assert [path.read_bytes() for path in chunks] == contents


def test_a_full_disk_ends_a_job_that_goes_on_when_there_is_space(batch, tmp_path, monkeypatch):
    """The second chunk finds no space; the first stays, and what is written later is what would have been."""
    assert batch("--tokens").exit_code == 0
    chunks = sorted((tmp_path / "out").glob("part-*"))
    contents = [path.read_bytes() for path in chunks]
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    write = files.write_jsonl

    def cut(rows):
        yield json.dumps(rows[0])
        raise OSError(errno.ENOSPC, "No space left on device")

    def full(path, rows):
        files.write_text(path, cut(rows)) if chunks[0].exists() else write(path, rows)

    monkeypatch.setattr(files, "write_jsonl", full)
    result = batch("--tokens")
    assert result.exit_code == 2 and "Traceback" not in result.output
    said = " ".join(result.stderr.split())
    assert f"the disk is full, and the chunks before {chunks[1].name} are whole" in said
    assert [path.name for path in sorted((tmp_path / "out").glob("*part-*"))] == [chunks[0].name]
    assert batch("--tokens", "--resume").exit_code == 2  # still full
    monkeypatch.setattr(files, "write_jsonl", write)
    assert batch("--tokens", "--resume").exit_code == 0
    assert [path.read_bytes() for path in chunks] == contents


def test_lines_follow_a_prefix(batch, zoo, tmp_path):
    target, names = zoo["debian-gpt-base"], ("--target", "debian-gpt-base", "--draft", "debian-gpt-small")
    assert (result := batch(*names, "--tokens", "--prefix", "das alte Hund")).exit_code == 0, result.output
    prefix = jaxspec.prefix(target, "das alte Hund")
    options = dict(prefix=prefix, max_new_tokens=12, slots=2, in_order=True)
    assert [row["tokens"] for row in rows_in(tmp_path / "out")] == [
        row.tokens for row in jaxspec.generate_many(target, PROMPTS, **options)
    ]
    result = batch(*names, "--tokens", "--prefix", "das neue Hund", "--resume")
    assert result.exit_code == 2 and "is of another job (options: prefix is 'das alte Hund' there" in result.stderr
