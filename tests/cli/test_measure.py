"""`jaxspec measure` on table models: its cells, that it resumes, its table and its CSV."""

import csv
import io
import json

import pytest
from typer.testing import CliRunner

from jaxspec.analysis.bench import grid, throughput
from jaxspec.cli import prompts
from jaxspec.cli.main import app

FEW = ["--count", "2", "--rows", "1", "--new-tokens", "12", "--repeats", "1", "--gamma", "2"]


@pytest.fixture
def run(loading, monkeypatch, tmp_path):
    monkeypatch.setattr(grid, "MOST", 2)
    file = tmp_path / "prompts.txt"
    file.write_text("der Hund\ndie Katze sah\n", encoding="utf-8")

    def run(*arguments, few=FEW):
        return CliRunner().invoke(app, ["measure", "--prompts", str(file), *few, *arguments], env={"COLUMNS": "100"})

    return run


def report(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["cells"]


@pytest.mark.slow
def test_cells_resume_and_csv(run, tmp_path, monkeypatch):
    resume, table = tmp_path / "cells.jsonl", tmp_path / "cells.csv"
    asked = ["--draft", "debian-t5-small", "--lenience", "1,0.3", "--resume", str(resume)]
    first = report(run(*asked, "--temperature", "0", "--json"))
    assert [(cell["temperature"], cell["lenience"]) for cell in first] == [(0, 1), (0, 0.3)]
    strict, lenient = first
    assert strict["alpha_low"] <= strict["alpha"] <= strict["alpha_high"]
    assert lenient["alpha"] >= strict["alpha"]
    assert strict["same_text"] == strict["texts"] == 1 and lenient["same_text"] is None
    assert strict["replayed"] > 0 and lenient["replayed"] is None  # lenient text cannot be told from greedy text
    assert strict["theorem"] >= strict["predicted"] > 0 and strict["task"] == "prompts"
    assert strict["speed"]["median"] > 0
    for cell in (strict, lenient):
        assert len(cell["conditional_by_draft_token"]) == 2
        tested = [rate["tested"] for rate in cell["conditional_by_draft_token"]]
        accepted = sum(rate["value"] * rate["tested"] for rate in cell["conditional_by_draft_token"] if rate["tested"])
        assert cell["conditional"]["tested"] == sum(tested) and tested[1] <= tested[0]
        assert cell["conditional"]["value"] == pytest.approx(accepted / sum(tested))
        assert cell["conditional"]["low"] is None  # of a single text

    monkeypatch.setattr(grid, "Cells", lambda *arguments: None)  # nothing is measured again
    again = run(*asked, "--temperature", "0", "--csv", str(table))
    assert again.exit_code == 0, again.output
    assert "prompts, debian-t5-small, T = 0" in again.stdout
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [float(row["alpha"]) for row in rows] == [strict["alpha"], lenient["alpha"]]
    assert float(rows[0]["speed_median"]) == strict["speed"]["median"]
    assert float(rows[1]["conditional_by_draft_token_1_value"]) == lenient["conditional_by_draft_token"][0]["value"]


@pytest.mark.slow
def test_one_prompt_has_no_interval(run, tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("der Hund\n", encoding="utf-8")
    asked = ["measure", "--prompts", str(one), *FEW, "--draft", "debian-t5-small", "--temperature", "0"]
    (cell,) = report(CliRunner().invoke(app, [*asked, "--json"]))
    assert 0 <= cell["alpha"] <= 1 and cell["alpha_low"] is cell["alpha_high"] is None
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0 and "±" not in shown.stdout and "nan" not in shown.stdout


@pytest.mark.slow
def test_counted_drafters_and_planned_gammas(run):
    (cell,) = report(run("--draft", "bigram", "--temperature", "1", "--json", few=[*FEW[:-1], "plan"]))
    assert cell["draft_name"] == "bigram" and 0 <= cell["alpha"] <= 1
    assert cell["chosen_gamma"] in (0, 1, 2)
    assert (cell["predicted"] is None) == (cell["chosen_gamma"] == 0)
    assert (cell["conditional"] is None) == (cell["chosen_gamma"] == 0)


@pytest.mark.slow
def test_all_gammas_of_a_setting_are_interleaved_and_one_can_be_added(run, tmp_path, monkeypatch):
    together, really = [], grid.speeds

    def count(job, gammas, settings):
        together.append(list(gammas))
        return really(job, gammas, settings)

    monkeypatch.setattr(grid, "speeds", count)
    asked = ["--draft", "debian-t5-small", "--temperature", "0", "--json", "--resume", str(tmp_path / "cells.jsonl")]
    planned, one = report(run(*asked, few=[*FEW[:-1], "plan,1"]))
    assert [planned["gamma"], one["gamma"]] == ["plan", 1] and planned["chosen_gamma"] in (0, 1, 2)
    assert together == [sorted({1, planned["chosen_gamma"]} - {0})]
    *known, two = report(run(*asked, few=[*FEW[:-1], "plan,1,2"]))
    assert known == [planned, one] and together[1:] == [[2]]
    assert two["chosen_gamma"] == 2 and two["predicted"] > 0


@pytest.mark.slow
def test_a_sampled_speed_on_average(run, monkeypatch):
    monkeypatch.setattr(throughput, "ratio", lambda *times: {"median": 2.0, "min": 1.0, "max": 3.0})
    asked = ["--draft", "debian-t5-small", "--temperature", "0,1", "--lenience", "1,0.5"]
    greedy, _, sampled, lenient = report(run(*asked, "--json"))
    assert greedy["speed_on_average"] is lenient["speed_on_average"] is None
    replayed = sampled["replayed"] * (2 * sampled["c"] + sampled["v"])  # tokens a round
    more = replayed / sampled["tokens_per_round"]
    assert more != 1 and sampled["speed_on_average"] == pytest.approx(
        {"median": 2 * more, "min": more, "max": 3 * more}
    )
    table = run(*asked)
    assert table.exit_code == 0 and "average" in table.stdout and "…" not in table.stdout
    (batched,) = report(
        run("--draft", "debian-t5-small", "-t", "1", "--json", "--batch", "2", few=[*FEW[:3], "2", *FEW[4:]])
    )
    assert batched["speed_on_average"] is None


def test_references_are_not_those_measured_on(zoo):
    target = zoo["debian-t5-base"]
    everything, rest = prompts.references(target, 0), prompts.references(target, 200)
    assert len(everything) == 600 and rest == everything[200:300] + everything[500:]
    assert len(prompts.references(zoo["debian-gpt-base"], 200)) == 100


def test_two_models_of_one_name_are_not_the_same(zoo):
    base = zoo["debian-t5-base"]
    assert grid.identity(base) == grid.identity(base._replace(tokenizer=None))
    assert grid.identity(base) != grid.identity(base._replace(params=base.params * 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "text"], "got a --task and --prompts"),
        (["--gamma", "2,x"], "--gamma has 'x'"),
        (["--gamma", "0"], "--gamma has '0'"),
        (["--temperature", "-1"], "--temperature is '-1': expected numbers 0 or more"),
        (["--temperature", "nan"], "--temperature is 'nan'"),
        (["--lenience", "0"], "--lenience is '0': expected numbers above 0"),
        (["--lenience", "1,,2"], "--lenience is '1,,2'"),
        (["--draft", "a,"], "--draft is 'a,'"),
        (["--draft", "bigram", "--count", "300"], "leaves no held-out texts"),
    ],
)
def test_bad_arguments(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")


def test_an_unknown_task(loading):
    result = CliRunner().invoke(app, ["measure", "--task", "poems"])
    assert result.exit_code == 2 and "expected one of translation, synopsis, edit, text" in result.stderr
