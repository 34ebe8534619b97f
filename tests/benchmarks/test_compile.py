"""`benchmarks.estimates.compile`: what it prints of compiled programs, and which options it
rejects.
"""

import importlib.util
import json
import re
from types import SimpleNamespace

import jax
import pytest

from benchmarks.estimates import absent, chips
from benchmarks.estimates import compile as command
from jaxspec.analysis import aot, roofline

PAIR = ("--target", "debian-t5-base", "--draft", "debian-t5-small", "--gamma", "3")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command with a compiler that makes of every program the same."""
    program = aot.Compiled(aot.Program(1.0, 100, 20, 3, 1), None, {})

    def compile_for(prepared, topology, *, mesh, advance):
        machine = roofline.machine("h100" if topology.startswith("h100") else "tpu-v5p")
        floors, names = (
            {"target": 5e6, "draft": 1e6},
            ["plain", "speculative"][: 1 + (prepared.drafter is not None)],
        )
        batch = len(prepared.prompt.length)
        compiled, moved = dict.fromkeys(names, program), {"all-reduce": (2, 64)}
        return absent.Programs(
            *(topology, 4, mesh or "", machine, batch, 3, False, floors, compiled),
            collectives=dict.fromkeys(names, moved),
        )

    monkeypatch.setattr(absent, "compile_for", compile_for)
    monkeypatch.setattr(chips, "devices_of", lambda topology: (topology, []))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *options: result_of(capsys, options)


def result_of(capsys, options):
    """Runs the command; returns what it printed, and its exit code."""
    code = 0
    try:
        command.main(options)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    return SimpleNamespace(
        exit_code=code, stdout=printed.out, output=" ".join((printed.out + printed.err).split())
    )


def test_sizes_and_reads_are_printed(run):
    result = run(*PAIR, "--mesh", "model=4", "--batch", "2")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "What the compiler made, no measurement" in said and "It fits" in said
    assert "2 all-reduce (64 bytes)" in said and "124 bytes" in said
    # a pass of the target and three of the drafter
    assert re.search(r"round │ +8\.0 MB │ +0\.003", said)


def test_what_would_fit_is_said_of_what_does_not(run, monkeypatch):
    monkeypatch.setattr(absent.Programs, "fits", False)
    result = run("--target", "llama-3.2-1b", "--prompt", "32768")
    assert result.exit_code == 0, result.output
    said = (
        r"Of 380\.0 GB weights take \S+ GB, and caches and rows \S+ kB for each token of 1 prompts, "
        r"so that prompts of "
    )
    assert re.search(
        said + r"up to [\d,]{7,} tokens fit, less what passes make\.",
        " ".join(result.stdout.split()),
    )


def test_a_whisper_is_compiled_for_windows_of_sound(run, monkeypatch):
    prompts, compile_for = [], absent.compile_for
    monkeypatch.setattr(
        absent,
        "compile_for",
        lambda it, *more, **named: prompts.append(it.prompt) or compile_for(it, *more, **named),
    )
    result = run(
        "--target", "whisper-tiny", "--draft", "whisper-tiny", "--batch", "2", "--prompt", "4"
    )
    assert result.exit_code == 0, result.output
    assert prompts[0].tokens.shape == (2, 4) and prompts[0].encoder.shape == (2, 80, 3000)


def test_json_has_programs_and_reads(run):
    report = json.loads(run(*PAIR, "--json").stdout)
    assert report["fits"] and report["programs"]["speculative"]["arguments"] == 100
    assert report["reads"] == {
        "step of plain decoding": 5e6,
        "pass of the drafter": 1e6,
        "round": 8e6,
    }


def test_plain_decoding_alone_can_be_compiled(run):
    result = run("--target", "debian-t5-base")
    assert result.exit_code == 0 and "drafter" not in result.stdout, result.output


def test_heads_that_are_padded_otherwise_are_one_vocabulary(run):
    """Gemma 3 27B has 262,208 rows and 1B 262,144; models of other vocabularies are refused."""
    result = run("--target", "gemma-3-27b", "--draft", "gemma-3-1b")
    assert result.exit_code == 0, result.output
    result = run("--target", "gemma-3-27b", "--draft", "llama-3.2-1b")
    assert (
        result.exit_code == 2
        and "262208 token ids and the drafter (llama-3.2-1b) 128256" in result.output
    )


@pytest.mark.parametrize(
    "draft",
    [
        "trim_vocabulary('{}', size=4000)",
        "tree(trim_vocabulary('{}', size=3000), (2, 1))",
        "cascade('{}', '{}')",
        "quantised(bits=4)",
        "early_exit(2, head=trim_vocabulary(target, size=4000))",
        "greedy('{}')",
    ],
)
def test_drafters_are_made_of_shapes(run, draft):
    result = run(*PAIR[:2], "--draft", draft.replace("{}", PAIR[3]))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("draft", ["share_vocabulary('{}')", "without_backoff('{}')"])
def test_drafters_that_need_more_than_shapes_say_so(run, draft):
    result = run(*PAIR[:2], "--draft", draft.replace("{}", PAIR[3]))
    assert result.exit_code == 2 and (
        "no tokenizer" in result.output or "no n-gram tables" in result.output
    )


def test_a_shape_that_is_unknown_is_refused(run):
    result = run("--target", "llama-9b")
    assert result.exit_code == 2 and "no shape, folder or config.json 'llama-9b'" in result.output


@pytest.mark.parametrize(
    ("topology", "package"),
    [
        ("v5p", "pip install --no-deps 'libtpu=="),
        ("h100", "pip install --no-deps --target ~/cuda jax-cuda13-pjrt=="),
    ],
)
def test_without_the_compiler_one_line_names_the_package(topology, package, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    result = result_of(capsys, [*PAIR, "--topology", topology])
    assert result.exit_code == 2 and package in result.output


def test_numbers_out_of_range_are_rejected(run):
    for option, expected in ("--gamma", "1"), ("--batch", "1"), ("--max-new-tokens", "2"):
        result = run(*PAIR, option, "0")
        name = option.removeprefix("--").replace("-", "_")
        assert result.exit_code == 2 and f"{name} is 0: expected" in result.output, expected
