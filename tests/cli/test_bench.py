"""`jaxspec bench` on table models: what it prints, its JSON."""

import json
import math

import jax
import pytest
from typer.testing import CliRunner

from jaxspec.analysis import bench, cost
from jaxspec.cli.main import app, command
from jaxspec.weights.hf_families import t5
from tests.small import tiny_t5

EFFORT = ("--count", "2", "--max-new-tokens", "8", "--rows", "2", "--repeats", "1")
SMALL = (*EFFORT, "--task", "translation")


@pytest.fixture
def run(loading, monkeypatch):
    monkeypatch.setattr(bench, "MOST", 2)
    monkeypatch.setattr(bench, "PLANNING", 1)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80"})
        assert result.exit_code == code, result.output
        return result.stdout

    return run


@pytest.fixture
def of_file(run, tmp_path):
    """Runs bench on the prompts of a file, once with JSON and once with tables."""

    def of_file(*arguments, prompts="der Hund\ndie Katze sah\n"):
        file = tmp_path / "prompts.txt"
        file.write_text(prompts, encoding="utf-8")
        effort = EFFORT[:-4] if "alpha" in arguments else EFFORT  # nothing is timed
        command = (*effort, "--prompts", str(file), *arguments)
        return json.loads(run(*command, "--json"))["rows"], run(*command)

    return of_file


@pytest.mark.slow
def test_drafters_and_policies_have_a_row_for_each_combination(run):
    both = ("debian-t5-draft", "fallback(prompt_lookup, 'debian-t5-draft')")
    axes = ("--draft", ", ".join(both), "--gamma", "2", "--policy", "adaptive")
    report = json.loads(run(*SMALL, *axes, "--json"))
    settings = [row["setting"] for row in report["rows"]]
    names = [(setting["drafter"], setting["policy"], setting["gamma"]) for setting in settings]
    without_policy = [(name, "", 2) for name in both]
    assert names == [("", "", 0), *without_policy, *((name, "adaptive", 2) for name in both)]
    assert report["environment"]["jax"] == jax.__version__
    assert all(row["same_text"] == 2 for row in report["rows"])
    # a model is after the look-up
    assert all(row["costs"]["search"] == 0 for row in report["rows"][1:])
    shown = run(*SMALL, *axes)
    assert "translation, T = 0" in shown and "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "adaptive has " in shown and "own" in shown


@pytest.mark.slow
def test_random_shapes_alone(run, monkeypatch):
    monkeypatch.setitem(t5.SIZES, "tiny-t5", tiny_t5(64))
    command = ("--target", "random:tiny-t5", "--draft", "none", *EFFORT, "--measure", "all")
    (row,) = json.loads(run(*command, "--json"))["rows"]
    assert "Peak memory, MB: process" in run(*command)
    assert row["tokens"] == 16 and row["setting"]["target"] == "random tiny-t5"
    assert row["memory"]["weights"] > 0 and row["first_call"] > 0 and row["latency"]["first"]


@pytest.mark.slow
def test_rules_have_rates_costs_and_predictions(of_file):
    (_, strict, lenient), shown = of_file("--rule", "rejection,lenient=0.3", "--gamma", "2")
    assert strict["alpha"]["low"] <= strict["alpha"]["value"] <= strict["alpha"]["high"]
    assert strict["alpha"]["value"] <= lenient["alpha"]["value"]
    assert strict["same_text"] == strict["texts"] == 2 and lenient["same_text"] is None
    assert strict["predicted"]["rounds"] > 0 and lenient["predicted"]["theorem"] > 0
    assert strict["predicted"]["theorem"] > 0 and strict["setting"]["task"] == "prompts"
    assert "prompts, T = 0" in shown and "inexact" in shown and "Measured over Theorem" in shown


@pytest.mark.slow
def test_one_prompt_has_no_interval(of_file):
    options = ("--measure", "alpha", "--gamma", "2")
    (_, row), shown = of_file(*options, prompts="der Hund\n")
    assert row["drafts"]["conditional"]["low"] is None
    assert "±" not in shown and "nan" not in shown


@pytest.mark.slow
def test_alpha_alone_times_nothing(of_file, monkeypatch):
    monkeypatch.setattr(cost, "interleave", lambda *_: pytest.fail("timed"))
    (plain, *_), shown = of_file("--measure", "alpha", "--draft", "bigram,prompt_lookup", "-g", "2")
    assert plain["seconds"] == [] and "bigram" in shown and "tokens/s" not in shown
    assert not any(line.startswith("│ plain") for line in shown.splitlines())


@pytest.mark.slow
def test_gamma_is_planned(of_file):
    (_, row), shown = of_file("--gamma", "plan")
    assert row["setting"]["planned"] and not math.isnan(row["alpha"]["value"])
    assert "* the plan's γ" in shown


def test_help_lists_every_quantity():
    (measure,) = [param for param in command("bench").params if param.name == "measure"]
    listed, _, _ = measure.help.partition(";")
    assert listed.split(", ") == sorted(bench.QUANTITIES, key=listed.index)
    assert set(measure.default.split(",")) < set(bench.QUANTITIES)


def test_measure_is_a_part_of_bench():
    result = CliRunner().invoke(app, ["measure", "--no-speed"])
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2
    assert "bench --gamma plan --temperature 0,1" in said and "--measure alpha" in said


def test_spaces_in_lists_do_not_count(loading, monkeypatch):
    calls = []
    monkeypatch.setattr(
        bench, "run_groups", lambda *arguments, **_: calls.append(arguments) or iter([])
    )
    command = ["bench", *SMALL, "--measure", "speed, memory", "--policy", "heuristic, adaptive"]
    assert CliRunner().invoke(app, command).exit_code == 0
    ((_, settings, config),) = calls
    assert config.quantities == ("speed", "memory")
    assert {setting.policy_label for setting in settings} == {"", "heuristic", "adaptive"}
