"""`jaxspec measure` on table models: its tables, that it resumes."""

import json
import math

import pytest
from typer.testing import CliRunner

from jaxspec.analysis import bench, cost, timed_loops
from jaxspec.analysis.result import from_json
from jaxspec.cli.main import app

FEW = ["--count", "2", "--rows", "1", "--max-new-tokens", "12", "--repeats", "1", "--gamma", "2"]


@pytest.fixture
def run(loading, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "MOST", 2)
    monkeypatch.setattr(bench, "PLANNING", 1)
    file = tmp_path / "prompts.txt"
    file.write_text("der Hund\ndie Katze sah\n", encoding="utf-8")

    def run(*arguments, few=FEW):
        return CliRunner().invoke(
            app, ["measure", "--prompts", str(file), *few, *arguments], env={"COLUMNS": "100"}
        )

    return run


def rows_of(result):
    assert result.exit_code == 0, result.output
    return [from_json(row) for row in json.loads(result.stdout)["rows"]]


@pytest.mark.slow
def test_rules_are_measured_and_resumed(run, tmp_path, monkeypatch):
    options = [
        "--rule",
        "rejection,lenient=0.3",
        "-t",
        "0",
        "--resume",
        str(tmp_path / "rows.jsonl"),
    ]
    _, strict, lenient = rows_of(run(*options, "--json"))
    assert (
        strict.alpha.low <= strict.alpha.value <= strict.alpha.high
        and strict.alpha.value <= lenient.alpha.value
    )
    assert strict.same_text == strict.texts == 1 and lenient.same_text is None
    assert strict.predicted.rounds > 0 and lenient.predicted.theorem > 0
    assert strict.predicted.theorem > 0 and strict.setting.task == "prompts"
    assert math.isnan(strict.drafts.conditional.low)  # of a single text
    monkeypatch.setattr(bench, "_measure", lambda *_: pytest.fail("measured again"))
    again = run(*options)
    assert (
        "prompts, T = 0, debian-t5-draft" in again.stdout
        and "lenient(0.3), inexact" in again.stdout
    )


@pytest.mark.slow
def test_one_prompt_has_no_interval(run, tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("der Hund\n", encoding="utf-8")
    shown = run("--prompts", str(file), "-t", "0", "--no-speed")
    assert shown.exit_code == 0 and "±" not in shown.stdout and "nan" not in shown.stdout


@pytest.mark.slow
def test_without_speed_nothing_is_timed(run, monkeypatch):
    for module in (cost, timed_loops):
        monkeypatch.setattr(module, "interleave", lambda *_: pytest.fail("timed"))
    result = run(
        "--no-speed", "--draft", "bigram,prompt_lookup", "--markdown", few=[*FEW[:-1], "plan"]
    )
    assert result.exit_code == 0, result.output
    assert "| bigram " in result.stdout


def test_an_untimed_measurement_has_no_plan(run, monkeypatch):
    runs = []
    monkeypatch.setattr(
        bench, "run_groups", lambda target, settings, *_, **__: runs.append(settings) or iter([])
    )
    for gammas in ("plan", "plan, 2"):
        assert run("--no-speed", "--gamma", gammas, few=FEW[:-2]).exit_code == 0
    assert [{setting.gamma for setting in settings} for settings in runs] == [{3}, {2}]
    assert "--policy adaptive goes by costs" in run("--no-speed", "--policy", "adaptive").stderr
