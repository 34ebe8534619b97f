"""`jaxspec compile`: what it prints of an estimate, and what it refuses; the estimate itself is that of test_aot."""

import importlib.util
import json
import re

import pytest
from typer.testing import CliRunner

from jaxspec.analysis import aot, roofline
from jaxspec.analysis.program_text import Part
from jaxspec.cli.main import app

PAIR = ("--target", "debian-t5-base", "--draft", "debian-t5-small", "--gamma", "3")


@pytest.fixture
def run(monkeypatch):
    """Runs the command with a compiler that makes of every program the same."""
    parts = {"prefill": Part(9, 9), "draft": Part(3, 3, 2), "draft step": Part(2, 2, 2), "target": Part(10, 10, 2, 1)}
    made = aot.Program(1.0, 100, 20, 3, 1, {"all-reduce": (2, 64)}, parts, {}, {})

    def estimate(prepared, topology, *, mesh, advance):
        machine = roofline.machine("h100" if topology.startswith("h100") else "tpu-v5p")
        floors = {"target": 5e6, "draft": 1e6}
        speculative = None if prepared.drafter is None else made
        batch = len(prepared.prompt.length)
        return aot.Estimate(topology, 4, mesh or "", machine, batch, 3, False, made, speculative, floors, {})

    monkeypatch.setattr(aot, "estimate", estimate)
    monkeypatch.setattr(aot, "devices_of", lambda topology: (topology, []))
    return lambda *options: CliRunner().invoke(app, ["compile", *options], env={"COLUMNS": "160"})


def test_an_estimate_is_printed_as_one(run):
    result = run(*PAIR, "--mesh", "model=4", "--batch", "2", "--alpha", "0.5")
    assert result.exit_code == 0, result.output
    for words in ("Estimates of the compiler, no measurement", "2 all-reduce (64 bytes)", "verify pass", "c = 0.2"):
        assert words in result.stdout
    assert "With α = 0.5: 1.88 tokens a round" in result.stdout


def test_of_gpus_kernels_are_counted_and_no_times_are_promised(run):
    """Of each pass two kernels, of which a round has its draft's steps twice."""
    result = run(*PAIR, "--topology", "h100:4")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "What the compiler made, no measurement" in said and "cycles" not in said and " kernels " in said
    assert "By bytes alone c = 0.233, v = 1.00" in said
    assert "A round of the speculative program runs 8 kernels, and the host waits for 1 condition" in said


def test_what_would_fit_is_said_of_what_does_not(run, monkeypatch):
    monkeypatch.setattr(aot.Estimate, "fits", False)
    result = run("--target", "llama-3.2-1b", "--prompt", "32768")
    assert result.exit_code == 0, result.output
    said = (
        r"Of 380\.0 GB weights take \S+ GB, and caches and rows \S+ kB for each token of 1 prompts, so that prompts of "
    )
    assert re.search(said + r"up to [\d,]{7,} tokens fit, less what passes make\.", " ".join(result.stdout.split()))


def test_json_has_programs_and_rows(run):
    result = run(*PAIR, "--alpha", "0.5", "--json")
    report = json.loads(result.stdout)
    assert [row["name"] for row in report["rows"]][-2:] == ["verify pass", "rest of a round"]
    assert report["v"] == 1.0 and report["fits"] and report["expected"]["tokens_per_round"] == 1.875


def test_plain_decoding_alone_can_be_estimated(run):
    result = run("--target", "debian-t5-base")
    assert result.exit_code == 0 and "verify" not in result.stdout, result.output


def test_what_counts_once_is_said(run):
    options = "--target", "llama-3.2-1b", "--max-new-tokens", "16", "--prompt"
    assert "counts once" not in run(*options, "64").stdout
    assert "Prefill is a loop over 512 tokens" in run(*options, "600").stdout


def test_heads_that_are_padded_otherwise_are_one_vocabulary(run):
    """Gemma 3 27B has 262,208 rows and 1B 262,144; models of other vocabularies are refused."""
    result = run("--target", "gemma-3-27b", "--draft", "gemma-3-1b")
    assert result.exit_code == 0, result.output
    result = run("--target", "gemma-3-27b", "--draft", "llama-3.2-1b")
    assert result.exit_code == 2 and "262208 token ids and the drafter (llama-3.2-1b) 128256" in result.output


@pytest.mark.parametrize(
    "draft",
    ["trim=4000:{}", "tree=2x1:trim=3000:{}", "cascade:{}:{}", "quantised=4", "trim=4000:early_exit=2", "greedy:{}"],
)
def test_drafters_are_made_of_shapes(run, draft):
    result = run(*PAIR[:2], "--draft", draft.replace("{}", PAIR[3]))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("draft", ["share:{}", "without_backoff:{}"])
def test_drafters_that_need_more_than_shapes_say_so(run, draft):
    result = run(*PAIR[:2], "--draft", draft.replace("{}", PAIR[3]))
    assert result.exit_code == 2 and ("no tokenizer" in result.output or "no n-gram tables" in result.output)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--alpha", "0.5"), "--alpha is of a drafter: add a --draft"),
        ((*PAIR, "--alpha", "1.5"), "--alpha is 1.5: expected a rate from 0 to 1"),
        (
            ("--target", PAIR[1], "--draft", f"tree=2x1:{PAIR[3]}", "--alpha", "0.5"),
            "--alpha is of a chain, and tree=2x1:debian-t5-small drafts trees: leave it out",
        ),
        (("--target", "llama-9b"), "no shape, folder or config.json 'llama-9b'"),
        ((*PAIR, "--topology", "h100", "--alpha", "0.5"), "--alpha is of TPUs, and --topology is h100"),
    ],
)
def test_what_cannot_be_estimated_is_refused(run, options, message):
    result = run(*options)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    ("topology", "command"),
    [
        ("v5p", "pip install --no-deps 'libtpu=="),
        ("h100", "pip install --no-deps --target ~/cuda jax-cuda13-pjrt=="),
    ],
)
def test_without_the_compiler_one_line_names_the_package(topology, command, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["compile", *PAIR, "--topology", topology], env={"COLUMNS": "400"})
    assert result.exit_code == 2 and command in result.output
