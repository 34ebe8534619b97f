"""`jaxspec batch`: what it writes, and what it refuses to go on with."""

import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec import files
from jaxspec import progress as bars
from jaxspec.analysis import cost
from jaxspec.cli import batch as batch_module
from jaxspec.cli import main, options
from jaxspec.cli.batch import BatchSettings
from jaxspec.cli.main import app
from jaxspec.cli.pair import Pair
from jaxspec.cli.prompts import heldout
from jaxspec.cli.signals import INTERRUPTED, TERMINATED
from jaxspec.decode.options import OPTIONS
from jaxspec.files import folders
from jaxspec.jobs import openai
from jaxspec.jobs import resume as job_resume
from jaxspec.jobs.fields import JobOptions
from jaxspec.jobs.input_files import Source
from jaxspec.jobs.many import WidePrompt
from jaxspec.jobs.resume import InputShard, Output, manifest_of
from jaxspec.weights import loading as model_loading

PROMPTS = heldout("translation", 7)


@pytest.fixture
def batch(loading, tmp_path):
    """Runs `jaxspec batch` on the zoo, on some prompts."""
    path = tmp_path / "prompts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(
            json.dumps({"id": f"p{n}", "text": prompt}) + "\n" for n, prompt in enumerate(PROMPTS)
        )

    def batch(*arguments):
        fixed = [
            "--input",
            str(path),
            "--output",
            str(tmp_path / "out"),
            "--field",
            "text",
            "-n",
            "12",
            "--slots",
            "2",
        ]
        return CliRunner().invoke(
            app, ["batch", *fixed, "--chunk", "3", *arguments], env={"COLUMNS": "200"}
        )

    return batch


def written_in(folder):
    """What a job has written, by the names of its files; the lock is no part of it."""
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def rows_in(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("part-*"))
        for line in path.read_text().splitlines()
    ]


def test_a_job_is_written_in_chunks_and_goes_on_at_the_first_that_is_missing(batch, zoo, tmp_path):
    assert (result := batch("--tokens")).exit_code == 0, result.output
    chunks = sorted((tmp_path / "out").glob("part-*"))
    assert [len(path.read_text().splitlines()) for path in chunks] == [3, 3, 1]
    rows, contents = rows_in(tmp_path / "out"), [path.read_bytes() for path in chunks]
    assert [row["id"] for row in rows] == [f"p{n}" for n in range(7)]
    assert "7 texts" in result.stderr and result.stderr.endswith("; 0 of 7 failed\n")
    summary = tmp_path / "out" / "summary-00000-of-00001.json"
    whole, written = json.loads(summary.read_text()), summary.read_text()
    assert (whole["done"], whole["failed"], sum(whole["finish"].values())) == (7, 0, 7)
    assert whole["new_tokens"] == sum(len(row["tokens"]) for row in rows)
    chunks[1].unlink()
    chunks[2].unlink()
    refused = batch("--tokens")
    assert refused.exit_code == 2 and "give --resume" in refused.stderr
    result = batch("--tokens", "--resume")
    assert result.exit_code == 0 and "3 of 7 lines were done before" in result.stderr
    assert [path.read_bytes() for path in chunks] == contents
    assert summary.read_text() == written  # also of the chunk that was there


def test_a_job_of_an_old_drafters_name_goes_on_by_either_name(batch, zoo, tmp_path):
    old, new = "prompt_lookup=2+debian-t5-draft", "fallback(prompt_lookup(3, 2), 'debian-t5-draft')"
    result = batch("--draft", old)
    assert result.exit_code == 0, result.output
    assert f'--draft {old} is now spelt --draft "{new}"' in result.stderr
    written = written_in(tmp_path / "out")
    manifest = tmp_path / "out" / "manifest-00000-of-00001.json"
    stored = json.loads(manifest.read_text())
    assert stored["models"]["draft"][0] == new
    assert stored["models"]["draft"][1].keys() == {"debian-t5-draft"}
    stored["models"]["draft"][0] = old
    manifest.write_text(json.dumps(stored))
    for name in (old, new):
        (tmp_path / "out" / "part-00000-of-00001-000001.jsonl").unlink()
        result = batch("--draft", name, "--resume")
        assert result.exit_code == 0, result.output
        del written[manifest.name]
        assert {**written_in(tmp_path / "out"), **written} == written_in(tmp_path / "out")
        written[manifest.name] = manifest.read_bytes()
    result = batch("--draft", "prompt_lookup(3, 2)", "--resume")
    assert result.exit_code == 2 and "is of another job" in result.stderr


def test_lines_say_how_far_a_job_is_where_there_is_no_terminal(batch, monkeypatch):
    monkeypatch.setattr(bars, "EVERY", 0.0)
    lines = batch().stderr.splitlines()
    shown = r"[\d,]+ tokens/s, \d\.\d\d a round, [0-2] live: [0-7] of 7, \d:\d\d:\d\d(, \d:\d\d:\d\d left)?"
    assert len(lines) > 2 and all(re.fullmatch(shown, line) for line in lines[:-1]), lines
    assert ", 0 live: 7 of 7, " in lines[-2]


def test_what_was_done_is_printed_as_json(batch, zoo, tmp_path):
    """The counts of what this call has decoded, and those of the whole job, under the names of
    vLLM.
    """
    first = json.loads(batch("--json").stdout)
    assert (
        first["environment"]["jax"]
        and first["whole"]["complete"]
        and first["run"]["tokens_per_second"] > 0
    )
    target, draft = zoo["debian-t5-large"], zoo["debian-t5-draft"]
    out = jaxspec.generate(target, PROMPTS, drafter=draft, gamma=3, max_new_tokens=12)
    assert first["run"]["metrics"] == first["whole"]["metrics"] == out.to_dict()["metrics"]
    sorted((tmp_path / "out").glob("part-*"))[-1].unlink()
    again = json.loads(batch("--json", "--resume").stdout)
    assert again["whole"] == first["whole"] and again["run"]["done"] == 1
    histogram = again["run"]["metrics"]["speculative_decoding"]["acceptance_histogram"]
    assert histogram == rows_in(tmp_path / "out")[-1]["acceptance_histogram"]


@pytest.mark.parametrize(
    "change", [("--seed", "1"), ("-n", "13"), ("--temperature", "1"), ("--chunk", "4")]
)
def test_another_job_is_not_gone_on_with(batch, change):
    assert batch("--tokens").exit_code == 0
    result = batch("--tokens", "--resume", *change)
    assert result.exit_code == 2
    assert "is of another job" in result.stderr


def test_an_option_that_nobody_has_thought_of_is_a_part_of_the_job(tmp_path):
    """A manifest has every option but those of a short list, so that a new one cannot be
    forgotten.
    """
    fields = BatchSettings._field_defaults | {"input": [], "output": tmp_path, "fancy": 1}
    newer = typing.NamedTuple("newer", [(name, object) for name in fields])
    pair, output = Pair(target="random:gpt-6m", draft=None), Output(tmp_path, InputShard(), 4)

    def manifest(**changed):
        described = batch_module._description(newer(**fields | changed), pair, None, {})
        return manifest_of(output, *described, **Source([]).description())

    output.begin(manifest())
    output.begin(manifest(options=JobOptions(slots=3)))
    with pytest.raises(
        ValueError, match=r"is of another job \(options: fancy is 1 there and 2 here\)"
    ):
        output.begin(manifest(fancy=2))
    older = json.loads(output.manifest.read_text())
    del older["options"]["fancy"]  # as a version without the option has written it
    output.manifest.write_text(json.dumps(older))
    with pytest.raises(
        ValueError,
        match=r"options: fancy is None there and 1 here\): resume with what it began with",
    ):
        output.begin(manifest())


def test_every_option_of_the_command_is_a_part_of_the_job_or_known_not_to_be():
    """Those of sampling are all described. Three are of one call and not of the job."""
    described = {*options.flat(BatchSettings([], Path())), *OPTIONS}
    assert {param.name for param in main.command("batch").params} - described == {
        "resume",
        "max_errors",
        "as_json",
    }
    named = batch_module.INDEPENDENT | {*batch_module.DESCRIBED_APART}
    assert named < {*options.flat(BatchSettings([], Path()))}
    assert "slots" in batch_module.INDEPENDENT and "too_long" not in batch_module.INDEPENDENT


def test_a_wide_prompts_warning_names_the_option():
    warning = WidePrompt("p0 has 9 tokens.")
    assert str(warning) == "p0 has 9 tokens. max_prompt_tokens bounds how long a prompt may be"
    bar = batch_module._Bar(1, None)
    with bar._bar.console.capture() as shown:
        bar._warn(warning)
        bar._warn(UserWarning("other"))
    assert (
        shown.get()
        == "p0 has 9 tokens. --max-prompt-tokens bounds how long a prompt may be\nother\n"
    )


def test_an_adapter_is_a_part_of_the_job(batch, zoo, loading, tmp_path, monkeypatch):
    """Another one, and the same folder with other weights."""
    plain_load = model_loading.load
    monkeypatch.setattr(
        model_loading, "load", lambda *names, adapter=None, **options: plain_load(*names, **options)
    )
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
    one, other = ("--adapter", str(tmp_path / "one")), ("--adapter", str(tmp_path / "other"))
    assert (result := batch("--tokens", *one)).exit_code == 0, result.output
    assert batch("--tokens", *one, "--resume").exit_code == 0
    for changed in (other, ()):
        result = batch("--tokens", *changed, "--resume")
        assert result.exit_code == 2 and "is of another job (models: adapter" in " ".join(
            result.stderr.split()
        )
    (tmp_path / "one" / "adapter_model.safetensors").write_text("trained again")
    assert batch("--tokens", *one, "--resume").exit_code == 2


def test_wrong_lines_have_errors_and_the_others_texts(batch, tmp_path):
    path = tmp_path / "wrong.jsonl"
    lines = [
        b'{"text": "a file"}',
        b"text",
        b'{"text": "\xff"}',
        b'{"other": 1}',
        b'{"text": ""}',
        b"[3]",
    ]
    path.write_bytes(b"\n".join(lines))
    assert (result := batch("--input", str(path))).exit_code == 3, result.output
    wrong = rows_in(tmp_path / "out")[7:]
    assert [row["error"] is None for row in wrong] == [True, False, False, False, True, False]
    said = ["not JSON", "not UTF-8", "--field", "expected a JSON object"]
    assert all(
        word in row["error"] for word, row in zip(said, [*wrong[1:4], wrong[5]], strict=True)
    )
    assert [row["number"] for row in wrong] == list(range(7, 13))
    assert "the first error: wrong.jsonl: line 2: the line is not JSON" in result.stderr
    assert "13 texts" in result.stderr and result.stderr.endswith("; 4 of 13 failed\n")


def test_a_field_is_that_of_json_lines(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    arguments = [
        "--input",
        str(tmp_path / "prompts.txt"),
        "--output",
        str(tmp_path / "out"),
        "--field",
        "text",
    ]
    result = CliRunner().invoke(app, ["batch", *arguments])
    assert (
        result.exit_code == 2
        and "input without JSON lines (.jsonl, .ndjson) does not read --field" in result.stderr
    )


@pytest.mark.parametrize(
    "name", ["prompts.json", "prompts.json.gz", "prompts.jsonl.zst", "A.CSV", "a.tsv.gz"]
)
def test_files_that_are_no_lines_by_their_names_are_refused(batch, tmp_path, name):
    (tmp_path / name).write_text('[{"text": "a file"}]')
    result = batch("--input", str(tmp_path / name))
    assert result.exit_code == 2 and f"{name} is not a file of lines by its name" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_a_line_is_its_own_in_shards_and_restarts(batch, tmp_path):
    path = tmp_path / "limits.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": "a file", "max_new_tokens": 99 * (n == 10) + 1}) + "\n"
            for n in range(12)
        )
    )
    shard = ("--input", str(path), "--shard", "1", "--num-shards", "2")
    assert (result := batch(*shard)).exit_code == 3, result.output
    rows = rows_in(tmp_path / "out")
    assert [row["number"] for row in rows] == list(range(1, 19, 2))
    # seven lines of the fixture come before
    assert [row["number"] for row in rows if row["error"]] == [17]
    for chunk in sorted((tmp_path / "out").glob("part-*"))[1:]:
        chunk.unlink()
    assert (result := batch(*shard, "--resume")).exit_code == 3, result.output
    assert rows_in(tmp_path / "out") == rows


def test_a_name_says_what_a_file_is_however_it_is_spelled(batch, tmp_path):
    path = tmp_path / "MORE.NDJSON"
    path.write_text('{"text": "a file"}\n')
    assert (result := batch("--input", str(path))).exit_code == 0, result.output
    assert rows_in(tmp_path / "out")[7]["prompt_tokens"] < 9  # not the line's


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\n \n", "holds no prompt"), ("a\nb\n".encode("utf-16"), "is not UTF-8 text but UTF-16")],
)
def test_an_input_without_prompts_is_refused(tmp_path, content, said):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    result = CliRunner().invoke(
        app, ["batch", "--input", str(path), "--output", str(tmp_path / "out")]
    )
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_no_input(batch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "-"):
        result = batch("--input", name)
        assert result.exit_code == 2 and f"{name} is not a regular file" in " ".join(
            result.stderr.split()
        )
    assert not (tmp_path / "out").exists()


def test_an_input_that_has_become_shorter_is_no_end(batch, tmp_path, monkeypatch):
    monkeypatch.setattr(Source, "count", lambda *_: 9)
    result = batch()
    assert result.exit_code == 2 and "had 9 lines, and then 7" in " ".join(result.stderr.split())


def test_a_rule_that_is_inexact_is_named(batch):
    result = batch("--rule", "lenient=0.5", "--json")
    assert (
        "The rule lenient=0.5 is inexact" in result.stderr
        and not json.loads(result.stdout)["whole"]["exact"]
    )


@pytest.mark.parametrize("option", [("--rule", "block"), ("--draft-dtype", "int8")])
def test_options_of_a_drafter_need_one(batch, option):
    result = batch("--draft", "none", *option)
    assert (
        result.exit_code == 2
        and f"plain decoding (no --draft) does not read {option[0]}" in result.stderr
    )


def test_damaged_files_of_a_job_are_named(batch, tmp_path):
    assert batch().exit_code == 0
    for path in (
        sorted((tmp_path / "out").glob("manifest*")) + sorted((tmp_path / "out").glob("part*"))[:1]
    ):
        whole = path.read_text()
        path.write_text(whole[: len(whole) // 2])
        result = batch("--resume")
        assert result.exit_code == 2 and path.name in result.stderr, result.stderr
        path.write_text(whole)


def test_an_interrupt_says_how_to_go_on(batch, tmp_path, monkeypatch):
    read = Source.prompts

    def prompts(self, done=()):
        yield from list(read(self, done))[:4]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Source, "prompts", prompts)
        result = batch("--tokens")
    assert (
        result.exit_code == INTERRUPTED
        and "interrupted: give the same command with --resume" in result.stderr
    )
    result = batch("--tokens", "--resume")
    assert result.exit_code == 0, result.output
    assert len(rows_in(tmp_path / "out")) == 7


COUNTS = ("rounds", "drafted", "accepted", "acceptance_histogram")
JOBS = {
    "log probabilities": ("--top-log-probs", "2", "-t", "1"),
    "a shard": ("--tokens", "--shard", "1", "--num-shards", "2"),
    # their counts depend on what is decoded beside them
    "rows that agree": ("--policy", "adaptive"),
}


@pytest.mark.parametrize("kill", [1, 3, 9])
@pytest.mark.parametrize("name", JOBS)
def test_no_row_that_is_done_is_decoded_again(batch, tmp_path, monkeypatch, name, kill):
    """A job that is killed while it writes a row, in slots beside others, and some lines of which
    are wrong.
    """
    costs = cost.PolicyCosts(0.2, np.array([1.0, 1.1, 1.3, 1.6]))
    monkeypatch.setattr(cost, "policy_costs", lambda *_, **__: costs)
    path = tmp_path / "more.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": f"a file {n}"}) + "\n" + "no JSON\n" * (n % 3 == 0)
            for n in range(9)
        )
    )
    options = (*JOBS[name], "--input", str(path), "--output")
    code = 0 if name == "a shard" else 3  # the wrong lines are in the other one
    assert (result := batch(*options, str(tmp_path / "reference"))).exit_code == code, result.output
    append, written = job_resume.append, 0

    def killed(file, line):
        nonlocal written
        written += len(line) > 0
        append(file, line if written < kill else line[: len(line) // 2])
        if written == kill:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job_resume, "append", killed)
        assert batch(*options, str(tmp_path / "out")).exit_code == INTERRUPTED
    result = batch(*options, str(tmp_path / "out"), "--resume", "--json")
    assert result.exit_code == code, result.output
    rows = rows_in(tmp_path / "reference")
    assert json.loads(result.stdout)["run"]["done"] == len(rows) - (kill - 1)
    if name == "rows that agree":
        neutral = dict.fromkeys(COUNTS)
        assert [row | neutral for row in rows_in(tmp_path / "out")] == [
            row | neutral for row in rows
        ]
    else:
        contents = [
            {p.name: p.read_bytes() for p in (tmp_path / folder).glob("[!.]*")}
            for folder in ("reference", "out")
        ]
        assert contents[0] == contents[1]


def test_lines_that_are_skipped_are_done(batch, tmp_path):
    """A job of them goes on, and ends, with chunks that have other lines or none."""
    path = tmp_path / "more.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": "a file " * (9 * (n not in (2, 5)) + 1)}) + "\n" for n in range(6)
        )
    )
    options = (
        "--max-prompt-tokens",
        "5",
        "--too-long",
        "skip",
        "--json",
        "--input",
        str(path),
        "--chunk",
        "2",
    )
    first = json.loads(batch(*options).stdout)["whole"]
    assert first["lines"] == 13 and first["complete"]
    chunks = sorted((tmp_path / "out").glob("part-*"))
    contents = [path.read_bytes() for path in chunks]
    assert len(chunks) == 7 and b"" in contents
    for index in (1, -1, -2):
        chunks[index].unlink()
    assert json.loads(batch(*options, "--resume").stdout)["whole"] == first
    assert [path.read_bytes() for path in chunks] == contents


def test_lines_that_are_cut_say_so(batch, tmp_path):
    """And so does the command; those that fit are not marked."""
    (tmp_path / "short.jsonl").write_text('{"text": "a file"}\n')
    options = ("--max-prompt-tokens", "9", "--too-long", "truncate", "--json")
    result = batch(*options, "--input", str(tmp_path / "short.jsonl"))
    *long, short = rows_in(tmp_path / "out")
    assert all(row["truncated"] > 0 and row["prompt_tokens"] == 9 for row in long)
    assert not short["truncated"] and short["prompt_tokens"] < 9
    assert json.loads(result.stdout)["whole"]["truncated"] == len(long)
    assert f"{len(long)} of {len(long) + 1} prompts are too long, and were cut" in result.stderr


def test_chunks_without_a_manifest_are_not_gone_on_with(batch, tmp_path):
    assert batch().exit_code == 0
    next((tmp_path / "out").glob("manifest-*")).unlink()
    for resume in ((), ("--resume",)):
        result = batch(*resume)
        assert result.exit_code == 2 and "is of a job whose manifest" in " ".join(
            result.stderr.split()
        )
    assert batch("--shard", "1", "--num-shards", "2").exit_code == 0


@pytest.mark.parametrize("command", ["batch", "chat"])
def test_a_policy_needs_a_drafter(batch, command):
    arguments = ("--draft", "none", "--policy", "heuristic")
    runner = (
        CliRunner().invoke(app, ["chat", *arguments]) if command == "chat" else batch(*arguments)
    )
    assert runner.exit_code == 2 and "got a policy and no drafter" in runner.stderr


def test_shards_must_be_of_one_job(batch, tmp_path):
    assert batch("--shard", "0", "--num-shards", "2").exit_code == 0
    assert batch("--shard", "1", "--num-shards", "2").exit_code == 0
    shards, whole = rows_in(tmp_path / "out"), tmp_path / "whole"
    assert batch("--output", str(whole)).exit_code == 0
    assert sorted(shards, key=lambda row: row["number"]) == rows_in(whole) and len(shards) == 7
    assert batch("--shard", "2", "--num-shards", "2").exit_code == 2
    result = batch("--shard", "1", "--num-shards", "3")
    assert result.exit_code == 2 and "num_shards is 2 there and 3 here" in result.stderr


def test_a_policy_keeps_the_costs_that_it_measured(batch, tmp_path, monkeypatch):
    """Other costs may make other drafts, and these another text: they are measured once for all
    parts of a job.
    """
    monkeypatch.setattr(cost, "policy_costs", lambda *_, **__: measured.pop())
    measured = [cost.PolicyCosts(0.2, np.array([1.0, 1.1, 1.3, 1.6]))]
    adaptive = ("--policy", "adaptive", "-t", "1", "--chunk", "2", "--num-shards", "2")
    assert (result := batch(*adaptive, "--shard", "1")).exit_code == 0, result.output
    chunks = sorted((tmp_path / "out").glob("part-*"))
    contents = [path.read_bytes() for path in chunks]
    chunks[-1].unlink()
    assert (result := batch(*adaptive, "--shard", "1", "--resume")).exit_code == 0, result.output
    assert [path.read_bytes() for path in chunks] == contents
    assert (result := batch(*adaptive, "--shard", "0")).exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "costs.json").read_text()) == {
        "c": 0.2,
        "v": [1.0, 1.1, 1.3, 1.6],
    }


@pytest.mark.parametrize("prefix", [None, "das alte Hund"])
def test_costs_are_those_of_slots_full_of_the_jobs_prompts(
    batch, zoo, tmp_path, monkeypatch, prefix
):
    """Their tokens, after the prefix, in slots as wide as the job's; lines with errors are none of
    them.
    """
    target, names = (
        zoo["debian-gpt-base"],
        ("--target", "debian-gpt-base", "--draft", "debian-gpt-small"),
    )
    path, states = tmp_path / "few.jsonl", []
    path.write_text(
        "no JSON\n"
        + "".join(json.dumps({"text": text}) + "\n" for text in ("a file", "a", "files"))
    )

    def policy_costs(prepared, *, repeats, begin):
        state = begin(prepared)
        states.append((np.asarray(state.tokens), np.asarray(state.start)))
        return measure(prepared, repeats=1, inner=1, begin=begin)

    measure = cost.policy_costs
    monkeypatch.setattr(cost, "policy_costs", policy_costs)
    options = (
        *names,
        "--policy",
        "adaptive",
        "--max-prompt-tokens",
        "30",
        "--slots",
        "3",
        "-n",
        "5",
    )
    result = CliRunner().invoke(
        app,
        [
            "batch",
            *("--input", str(path), "--output", str(tmp_path / "out"), "--field", "text", *options),
            *(() if prefix is None else ("--prefix", prefix)),
        ],
    )
    assert result.exit_code == 3, result.output
    shared = [] if prefix is None else jaxspec.prefix(target, prefix).tokens
    ((tokens, start),) = states
    # of the first three lines, one of which is wrong
    for row, text in enumerate(("a file", "a", "a file")):
        assert tokens[row, : start[row]].tolist() == shared + target.tokenizer(text)["input_ids"]
    assert json.loads((tmp_path / "out" / "costs.json").read_text()).keys() == {"c", "v"}


def test_rows_that_agree_on_their_drafts_have_the_texts_of_any_restart(batch, tmp_path):
    """At temperature 0 what is drafted depends on what is decoded beside a row: its counts may, its
    text may not.
    """
    adaptive = ("--policy", "adaptive", "--tokens", "--chunk", "2")
    assert (result := batch(*adaptive)).exit_code == 0, result.output
    rows = rows_in(tmp_path / "out")
    for chunk in sorted((tmp_path / "out").glob("part-*"))[1:]:
        chunk.unlink()
    assert (result := batch(*adaptive, "--resume")).exit_code == 0, result.output
    again = [row | dict.fromkeys(COUNTS) for row in rows_in(tmp_path / "out")]
    assert again == [row | dict.fromkeys(COUNTS) for row in rows]


class FullDisk:
    """A disk on which one file finds no space, at one step of writing it: so it stays until
    `is_full` is False.
    """

    def __init__(self, monkeypatch, name, step):
        self.is_full, self._name = True, name
        patched = {
            "touch": [(Path, "touch")],
            "fsync": [(folders, "flush")],
            "rename": [(os, "replace"), (os, "link")],
            "open": [(Path, "open")],
            "write": [],
            "append": [],
        }
        for owner, function in patched[step]:
            monkeypatch.setattr(owner, function, self._failing(getattr(owner, function)))
        if step == "write":
            write = files.write_text

            def cut(path, chunks, **options):
                write(path, self._cut(chunks) if self._is_hit(path) else chunks, **options)

            monkeypatch.setattr(files, "write_text", cut)
        if step == "append":
            append = job_resume.append

            def append_some(file, line):
                for piece in self._cut([line]) if self._is_hit(file.name) else [line]:
                    append(file, piece)

            monkeypatch.setattr(job_resume, "append", append_some)

    def _is_hit(self, *paths):
        return self.is_full and any(self._name in Path(path).name for path in paths)

    def _failing(self, function):
        def call(*arguments, **options):
            if self._is_hit(*[part for part in arguments if isinstance(part, Path)]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*arguments, **options)

        return call

    def _cut(self, chunks):
        """The first half of the first piece of a text."""
        piece = next(iter(chunks))
        yield piece[: len(piece) // 2]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


CHUNK, JOURNAL = "part-00000-of-00001-000001.jsonl", "journal-00000-of-00001-000001"
FULL = {
    "manifest": "no chunk was begun",
    "costs": "no chunk was begun",
    "summary": "all chunks are whole",
}
PLACES = [(CHUNK, step) for step in ("touch", "write", "fsync", "rename")]
PLACES += [(JOURNAL, step) for step in ("open", "append")]
LEFT = {JOURNAL: 4, CHUNK: 1, "summary": 0}  # rows to decode
PLACES += [("manifest", "write"), ("costs", "rename"), ("summary", "fsync"), ("summary", "touch")]


@pytest.mark.parametrize(("name", "step"), PLACES)
def test_a_full_disk_ends_a_job_that_goes_on_when_there_is_space(
    batch, tmp_path, monkeypatch, name, step
):
    """What was whole stays, nothing half-written does, and what is written later is what would have
    been.
    """
    costs = cost.PolicyCosts(0.2, np.array([1.0, 1.1, 1.3, 1.6]))
    monkeypatch.setattr(cost, "policy_costs", lambda *_, **__: costs)
    options = ("--tokens", "--slots", "1", "--policy", "adaptive", "--output")
    assert batch(*options, str(tmp_path / "reference")).exit_code == 0
    reference, folder = (
        {path.name: path for path in (tmp_path / "reference").glob("[!.]*")},
        tmp_path / "out",
    )
    disk = FullDisk(monkeypatch, name, step)
    for resume in ((), ("--resume",)):  # it stays full
        result = batch(*options, str(folder), *resume)
        assert result.exit_code == 2 and "Traceback" not in result.output, result.output
        said = " ".join(result.stderr.split())
        assert f"the disk is full, and {FULL.get(name, job_resume.KEPT)}" in said
        for path in folder.glob("[!.]*"):
            assert path.name == JOURNAL or path.read_bytes() == reference[path.name].read_bytes()
        chunks = sorted(path.name for path in folder.glob("part-*"))
        before = CHUNK if name == JOURNAL else name
        assert chunks == sorted(
            n for n in reference if n.startswith("part-") and (name == "summary" or n < before)
        )
    disk.is_full = False
    result = batch(*options, str(folder), "--resume", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run"]["done"] == LEFT.get(name, len(PROMPTS))
    assert {path.name: path.read_bytes() for path in folder.glob("[!.]*")} == {
        name: path.read_bytes() for name, path in reference.items()
    }


def test_lines_follow_a_prefix(batch, zoo, tmp_path):
    target, names = (
        zoo["debian-gpt-base"],
        ("--target", "debian-gpt-base", "--draft", "debian-gpt-small"),
    )
    assert (result := batch(*names, "--tokens", "--prefix", "das alte Hund")).exit_code == 0, (
        result.output
    )
    prefix = jaxspec.prefix(target, "das alte Hund")
    options = dict(prefix=prefix, max_new_tokens=12, slots=2, in_order=True)
    assert [row["tokens"] for row in rows_in(tmp_path / "out")] == [
        row.tokens for row in jaxspec.generate_many(target, PROMPTS, **options)
    ]
    result = batch(*names, "--tokens", "--prefix", "das neue Hund", "--resume")
    assert (
        result.exit_code == 2
        and "is of another job (options: prefix is 'das alte Hund' there" in result.stderr
    )


def test_inputs_are_those_of_the_job_in_their_order(batch, tmp_path):
    """Files that are given in another order have other lines in each chunk; two of one name are
    two.
    """
    paths = [tmp_path / folder / "more.jsonl" for folder in "xy"]
    for n, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(json.dumps({"id": f"m{n}", "text": PROMPTS[n]}))
    more = [argument for path in paths for argument in ("--input", str(path))]
    assert (result := batch(*more)).exit_code == 0, result.output
    assert batch(*more, "--resume").exit_code == 0
    refused = batch(*more[2:], *more[:2], "--resume")
    assert (
        refused.exit_code == 2
        and "is of another job (input: number 1: number 1 is" in refused.stderr
    )
    paths[0].write_text(json.dumps({"id": "m0", "text": "another"}))
    assert batch(*more, "--resume").exit_code == 2


LINES = {  # of a job: what the error of each says; None where it has a text
    '{"prompt": [1180591620717411303424]}': "token id 1180591620717411303424",
    '{"prompt": [-1180591620717411303424]}': "token id -1180591620717411303424",
    '{"id": "\\ud800", "prompt": "a file"}': None,
    '{"id": {"\\ud800": 1}, "prompt": "a \\ud800"}': "half of a surrogate pair",
    '{"id": NaN, "prompt": "a file"}': "id cannot be written",
    '{"id": 1e999, "prompt": "a file"}': "id cannot be written",
    '{"id": "a7", "text": "a file"}': "--field",
    '{"id": "a8", "prompt": null}': "expected text",
    '{"id": "a9", "prompt": "a file", "max_new_tokens": 1e99}': "max_new_tokens is 1e+99",
    '{"id": "b0", "messages": 3}': "chat",
    '{"id": "b1", "messages": []}': "chat",
    '{"id": "b2", "messages": [3]}': "chat",
    '{"id": "b3", "messages": [{"role": "user", "content": "\\ud800"}]}': "chat",
    '{"id": "b4", "prompt": {"role": "user"}}': "chat",
    '{"id": "b5", "messages": [{"role": "user", "content": null}]}': "chat",
    '{"prompt": "a file", "temperature": "warm"}': "temperature is 'warm'",
    '{"id": "b6", "prompt": "a file", "messages": [{"role": "user", "content": "a"}]}': "either prompt or messages",
    "\0{\0}\0": "the line has a NUL character",
}


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m.content + '' }}{% endfor %}"]
)
def test_no_line_ends_a_job(batch, zoo, tmp_path, monkeypatch, template):
    """Each bad line is an error, with the id that it has; what comes after it is decoded."""
    monkeypatch.setattr(zoo["debian-t5-large"].tokenizer, "chat_template", template)
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(line + "\n" for line in LINES) + '{"id": "last", "prompt": "a file"}')
    arguments = ("--input", str(path), "--field", "prompt")
    assert (result := batch(*arguments)).exit_code == 3, result.output
    rows = rows_in(tmp_path / "out")[len(PROMPTS) :]
    for row, (line, said) in zip(rows, [*LINES.items(), ("{}", None)], strict=True):
        assert (row["error"] is None) == (said is None), (line, row["error"])
        assert said is None or said in row["error"], (line, row["error"])
        id_of_line = None if line.startswith("\0") else json.loads(line).get("id")
        if said != "id cannot be written" and id_of_line is not None:
            assert row["id"] == id_of_line
    assert rows[-1]["id"] == "last"
    assert rows[4]["id"] == rows[4]["number"] == len(PROMPTS) + 4


def test_a_damaged_input_is_refused_before_models_are_loaded(batch, tmp_path, monkeypatch):
    """And before a manifest is written: with the file that was meant the job is the same, and
    begins.
    """
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(json.dumps({"text": "a file"}).encode() * 99)
    load = jaxspec.load
    monkeypatch.setattr(jaxspec, "load", lambda *_, **__: pytest.fail("was loaded"))
    for content in (whole[:-9], whole[:20] + b"\xff" * 9 + whole[29:], b"plain"):
        path.write_bytes(content)
        result = batch("--input", str(path))
        assert result.exit_code == 2 and "cut.jsonl.gz is cut off or damaged" in " ".join(
            result.stderr.split()
        )
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(jaxspec, "load", load)
    path.write_bytes(whole)


@pytest.mark.parametrize("last", [False, True])
def test_a_job_that_is_told_to_end_decodes_what_it_has_read(batch, tmp_path, monkeypatch, last):
    """SIGTERM when a line is read: no more are. After the last line nothing is missing."""
    arguments = ("--chunk", "16", "--tokens", "--json", "--input", str(tmp_path / "many.jsonl"))
    (tmp_path / "many.jsonl").write_text(
        "".join(json.dumps({"text": f"a file {n}"}) + "\n" for n in range(41))
    )
    assert (result := batch(*arguments)).exit_code == 0, result.output
    chunks = sorted((tmp_path / "out").glob("part-*"))
    contents = [path.read_bytes() for path in chunks]
    assert len(chunks) == 3
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    read = Source.prompts

    def prompts(self, done=()):
        for number, prompt in enumerate(read(self, done), 1):
            if number == (48 if last else 21):
                os.kill(os.getpid(), signal.SIGTERM)
            yield prompt

    with monkeypatch.context() as patched:
        patched.setattr(Source, "prompts", prompts)
        result = batch(*arguments)
    assert result.exit_code == (0 if last else TERMINATED), result.output
    assert ("terminated" in result.stderr) == (not last)
    assert json.loads(result.stdout)["run"]["done"] == (48 if last else 21)
    left = sorted((tmp_path / "out").glob("part-*"))
    assert [path.read_bytes() for path in left] == contents[: 3 if last else 1]
    result = batch(*arguments, "--resume")
    assert result.exit_code == 0 and json.loads(result.stdout)["run"]["done"] == (0 if last else 27)
    assert [path.read_bytes() for path in chunks] == contents


def test_other_files_of_a_model_are_another_job(batch, zoo, tmp_path, monkeypatch):
    """Any byte of a visible file of target or drafter counts, and any of the template; a date does
    not.
    """
    folders_of_models = [tmp_path / "target", tmp_path / "draft"]
    for folder, model in zip(
        folders_of_models, ("debian-t5-large", "debian-t5-draft"), strict=True
    ):
        (folder / "words").mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(64))
        (folder / "words" / "tokenizer.json").write_text("{}")
        monkeypatch.setitem(zoo, str(folder), zoo[model])
    template = tmp_path / "template"
    template.write_text(TEMPLATE)
    options = (
        "--target",
        str(folders_of_models[0]),
        "--draft",
        f"greedy('{folders_of_models[1]}')",
    )
    options += ("--chat", "--chat-template", str(template), "-g", "1")
    assert (result := batch(*options)).exit_code == 0, result.output
    for path in (
        folders_of_models[0] / "weights",
        folders_of_models[1] / "words" / "tokenizer.json",
        template,
    ):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        result = batch(*options, "--resume")
        assert (
            result.exit_code == 2
            and f"{path.name}" in result.stderr
            and "is of another job" in result.stderr
        )
        path.write_bytes(content)
    (folders_of_models[0] / ".lock").touch()
    os.utime(folders_of_models[0] / "weights", (0, 0))
    assert (result := batch(*options, "--resume")).exit_code == 0, result.output


@pytest.mark.parametrize(
    "wrong", [("--too-long", "cut"), ("--temperature", "-1"), ("--stop", ""), ("--chat",)]
)
def test_what_is_refused_begins_no_job(batch, tmp_path, wrong):
    """Or the command that was meant would be another job."""
    assert batch(*wrong).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_errors_count_for_no_rounds(batch, tmp_path):
    path = tmp_path / "wrong.jsonl"
    path.write_text("no JSON\n" * 200)
    result = batch("--input", str(path), "-n", "2")
    assert result.exit_code == 3
    assert float(" ".join(result.stderr.split()).split("a second, ")[1].split(" a round")[0]) >= 0


TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}{{ tools | length }} file{% "
    "endif %}"
)


def lines_of(tmp_path, *rows):
    """Writes a file of lines; returns the options that read it alone."""
    path = tmp_path / "lines.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return [
        "batch",
        "--input",
        str(path),
        "--output",
        str(tmp_path / "out"),
        "-n",
        "12",
        "--slots",
        "2",
    ]


def run(arguments, *more):
    return CliRunner().invoke(app, [*arguments, *more], env={"COLUMNS": "200"})


MESSAGES = {"messages": [{"role": "user", "content": "a file"}]}


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([MESSAGES] * 70, (), "has no chat template"),
        ([{"text": "a file"}] * 3, (), "choose one of these with --field"),
        ([{"prompt": "a file", "n": 2}] * 3, (), "n is 2 at temperature 0"),
        ([{"prompt": "a file"}] * 3, ("--max-prompt-tokens", "1"), "tokens: expected at most 1"),
        (
            [{"prompt": "a file"}] * 3,
            ("--max-prompt-tokens", "1", "--too-long", "skip"),
            "All prompts are too long",
        ),
    ],
)
def test_a_job_that_no_line_survives_is_refused_before_anything_is_written(
    loading, tmp_path, rows, options, said
):
    result = run(lines_of(tmp_path, *rows), *options)
    assert (
        result.exit_code == 2 and f"none of the {len(rows)} lines can be decoded" in result.stderr
    ), result.output
    assert said in result.stderr and not (tmp_path / "out").exists()


def test_messages_of_lines_are_written_in_a_template_that_is_given(loading, tmp_path):
    (tmp_path / "template").write_text(TEMPLATE)
    result = run(lines_of(tmp_path, MESSAGES), "--chat-template", str(tmp_path / "template"))
    assert result.exit_code == 0 and rows_in(tmp_path / "out")[0]["prompt_tokens"] > 0, (
        result.output
    )


def test_a_job_ends_at_the_most_errors_that_are_allowed(loading, tmp_path):
    arguments = lines_of(
        tmp_path, {"prompt": "a file"}, "no JSON", *[{"prompt": 3}] * 30, {"prompt": "a file"}
    )
    result = run(arguments, "--max-errors", "3", "--json")
    assert result.exit_code == 3 and "ended, since more than 3 texts are errors" in result.stderr, (
        result.output
    )
    assert (
        json.loads(result.stdout)["whole"]["failed"] == 4
        and "the first error: lines.jsonl: line 2" in result.stderr
    )
    assert not list((tmp_path / "out").glob("summary*"))
    result = run(arguments, "--resume", "--max-errors", "31")
    assert result.exit_code == 3 and result.stderr.endswith("; 31 of 33 failed\n"), result.output
    assert len(rows_in(tmp_path / "out")) == 33


def test_ids_that_stand_twice_are_noticed(loading, tmp_path):
    rows = [{"id": name, "prompt": "a file"} for name in ("a", {"b": 1}, 2, "a", {"b": 1}, "2")]
    result = run(lines_of(tmp_path, *rows))
    assert result.exit_code == 0, result.output
    assert (
        "the id 'a' stands twice, at lines.jsonl: line 1 and lines.jsonl: line 4 (1 more lines "
        "repeat" in result.stderr
    )
    rows = [{"custom_id": "a", "body": {"prompt": "a file"}}] * 2
    refused = run([*lines_of(tmp_path, *rows), "--output", str(tmp_path / "other"), "--openai"])
    assert refused.exit_code == 2 and "expected each custom_id once" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_a_second_process_on_one_part_of_a_folder_is_refused(loading, tmp_path):
    """Another part is not; and the lock ends with the process."""
    arguments = lines_of(tmp_path, {"prompt": "a file"}, {"prompt": "a file"})
    output = Output(tmp_path / "out", InputShard(0, 2), 1024)
    part = ("--num-shards", "2", "--shard")
    with output.locked():
        result = run(arguments, *part, "0")
        assert result.exit_code == 2 and f"(process {os.getpid()})" in result.stderr, result.output
        assert run(arguments, *part, "1").exit_code == 0
    assert run(arguments, *part, "0").exit_code == 0
    with output.locked():
        result = run(arguments, *part, "0", "--resume")
        assert result.exit_code == 2 and "is using this folder" in result.stderr


def test_several_texts_of_a_prompt_are_lines_of_their_own(loading, tmp_path):
    """Each with its number; a job that goes on has all of them, and a line may ask for another
    number of texts.
    """
    rows = [
        {"prompt": "a file"},
        {"prompt": "files", "n": 1},
        {"prompt": "", "n": 3},
        {"prompt": "a", "n": 2},
    ]
    arguments = [
        *lines_of(tmp_path, *rows),
        "--num-samples",
        "3",
        "-t",
        "5",
        "--tokens",
        "--chunk",
        "2",
    ]
    result = run(arguments, "--json")
    assert result.exit_code == 0, result.output
    whole, lines = json.loads(result.stdout)["whole"], rows_in(tmp_path / "out")
    numbers = [(row["number"], row.get("sample", 0)) for row in lines]
    assert numbers == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]
    assert whole["done"] == 9 and len({tuple(row["tokens"]) for row in lines[:3]}) > 1
    chunk = sorted((tmp_path / "out").glob("part-*"))[0]
    content = chunk.read_bytes()
    chunk.unlink()
    again = json.loads(run(arguments, "--json", "--resume").stdout)
    assert again["whole"] == whole and chunk.read_bytes() == content


def test_requests_in_the_form_of_openai_are_answered_in_it(loading, zoo, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo["debian-t5-large"].tokenizer, "chat_template", TEMPLATE)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "file"}]
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": parts}],
        "max_completion_tokens": 3,
    }
    image = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        ]
    }

    def request(name, body, url="/v1/chat/completions"):
        return {"custom_id": name, "method": "POST", "url": url, "body": body}

    rows = [
        request("a", chat),
        request(
            "b", {"prompt": "a file", "max_tokens": 4, "n": 2, "temperature": 1}, "/v1/completions"
        ),
        request("c", image),
        request("d", {"input": "a"}, "/v1/embeddings"),
        request("e", chat | {"guided_grammar": "root"}),
        request(
            "f",
            chat
            | {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        ),
    ]
    arguments = lines_of(tmp_path, *rows)
    result = run([*arguments, "--openai", "--json"])
    assert result.exit_code == 3, result.output
    a, b, c, d, e, f = rows_in(tmp_path / "out")
    assert [line["custom_id"] for line in (a, b, c, d, e, f)] == list("abcdef")
    assert a["response"]["body"]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
    }
    choice = a["response"]["body"]["choices"][0]
    assert (
        choice["message"]["role"] == "assistant"
        and choice["finish_reason"] == "length"
        and a["error"] is None
    )
    assert a["jaxspec"][0]["fields"] == {"url": "/v1/chat/completions", "model": "m"}
    assert [choice["index"] for choice in b["response"]["body"]["choices"]] == [0, 1]
    assert (
        b["response"]["body"]["object"] == "text_completion"
        and "text" in b["response"]["body"]["choices"][1]
    )
    said = [
        "a part of type 'image_url'",
        "url is '/v1/embeddings'",
        "the field 'guided_grammar' is not obeyed",
    ]
    assert all(word in line["error"]["message"] for word, line in zip(said, (c, d, e), strict=True))
    assert all(line["response"] is None for line in (c, d, e))
    assert f["response"]["body"]["usage"]["prompt_tokens"] > 3  # the template has written the tools
    whole, content = json.loads(result.stdout)["whole"], written_in(tmp_path / "out")
    next((tmp_path / "out").glob("part-*")).unlink()
    assert json.loads(run([*arguments, "--openai", "--json", "--resume"]).stdout)["whole"] == whole
    assert written_in(tmp_path / "out") == content


def test_a_request_has_one_prompt():
    """OpenAI's field takes a list; a list of one is that prompt, and several are refused with what
    to do.
    """

    def read(prompt):
        return openai.fields_of(
            {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": prompt}}
        )["prompt"]

    assert [read(prompt) for prompt in ("a", ["a"], [5, 6], [[5, 6]])] == ["a", "a", [5, 6], [5, 6]]
    for prompts in (["a", "b"], [[5], [6]]):
        with pytest.raises(
            ValueError,
            match="prompt is a list of 2 prompts: expected one; write a request for each",
        ):
            read(prompts)


def test_a_line_without_fields_is_told_what_it_lacks():
    for line, said in (
        (b"{}", "the line is an object without fields: expected 'prompt' or 'messages'"),
        (
            b'{"text": 1}',
            "the line has no 'prompt', but ['text']: choose one of these with --field",
        ),
    ):
        assert str(Source([])._line(0, "a: line 1", True, line).fields) == said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"top_k": "a"}, "top_k is 'a'"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"min_p": "0.1"}, "min_p is '0.1'"),
    ],
)
def test_a_wrong_value_of_a_line_is_no_reason_to_refuse_the_job(loading, tmp_path, wrong, said):
    rows = [{"prompt": "a file", "temperature": 1, **wrong}, {"prompt": "a file"}]
    result = run(lines_of(tmp_path, *rows))
    assert result.exit_code == 3, result.output
    first, second = rows_in(tmp_path / "out")
    assert f"line 1: {said}" in first["error"] and second["error"] is None


def test_settings_of_a_line_are_obeyed_refused_or_carried_through(loading, zoo, tmp_path):
    bias = {"logit_bias": {"5": 30, "1": -100}}  # as JSON has it: ids are names
    rows = [
        {"prompt": "a file", "label": {"x": [1]}, "number": 9, "max_tokens": 2},
        {"prompt": "a file", **bias},
        {"prompt": "a file", "eos_token_id": 3},
        {"prompt": "a file", "topP": 0.5},
        {"prompt": "a file", "max_tokens": 2, "max_new_tokens": 2},
        {"prompt": "a file", "tools": []},
        {"prompt": "a file", "tools": [{}]},
        {"prompt": "a file", "label": float("nan")},
    ]
    result = run(lines_of(tmp_path, *rows), "--tokens")
    assert result.exit_code == 3, result.output
    lines = rows_in(tmp_path / "out")
    assert lines[0]["fields"] == {"label": {"x": [1]}, "number": 9} and lines[0]["new_tokens"] <= 2
    assert lines[1]["tokens"] == [5] * 12
    said = [
        "'eos_token_id' is not obeyed",
        "is spelled 'top_p'",
        "mean the same",
        "give messages",
        "give messages",
    ]
    said.append("label cannot be written")
    rows = lines[2:5] + lines[6:]
    assert lines[5]["error"] is None and "fields" not in lines[5]
    said = said[:3] + said[4:]
    assert all(word in line["error"] for word, line in zip(said, rows, strict=True)), [
        line["error"] for line in rows
    ]
    assert [line["error"].split(": ")[1] for line in rows] == [f"line {n}" for n in (3, 4, 5, 7, 8)]


@pytest.mark.slow
def test_an_interrupt_is_answered_while_the_interpreter_waits(tmp_path):
    """In a library that neither looks for signals nor returns, as a compiler does."""
    program = """
import hashlib, signal, sys, threading
from jaxspec.cli import signals
with signals.leaving_soon(lambda: print("soon", file=sys.stderr)):
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2_000_000_000)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "soon\n")
