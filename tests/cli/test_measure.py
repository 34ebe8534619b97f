"""`jaxspec measure` on table models: its tables, its presets, that it resumes."""

import json

import jax
import pytest
from typer.testing import CliRunner

from jaxspec.analysis import bench
from jaxspec.analysis.bench import expected, model_card, paper, runner
from jaxspec.analysis.bench.row import Rate, Row
from jaxspec.analysis.measure import environment, rules, synthetic, timing
from jaxspec.cli.main import app
from jaxspec.rules import catalogue
from jaxspec.testing import table_model

FEW = ["--count", "2", "--rows", "1", "--max-new-tokens", "12", "--repeats", "1", "--gamma", "2"]


@pytest.fixture
def run(loading, monkeypatch, tmp_path):
    monkeypatch.setattr(expected, "MOST", 2)
    monkeypatch.setattr(runner, "PLANNING", 1)
    file = tmp_path / "prompts.txt"
    file.write_text("der Hund\ndie Katze sah\n", encoding="utf-8")

    def run(*arguments, few=FEW):
        return CliRunner().invoke(app, ["measure", "--prompts", str(file), *few, *arguments], env={"COLUMNS": "100"})

    return run


def rows_of(result):
    assert result.exit_code == 0, result.output
    return [bench.row.from_json(row) for row in json.loads(result.stdout)["rows"]]


@pytest.mark.slow
def test_rules_are_measured_and_resumed(run, tmp_path, monkeypatch):
    asked = ["--rule", "rejection,lenient=0.3", "-t", "0", "--resume", str(tmp_path / "rows.jsonl")]
    _, strict, lenient = rows_of(run(*asked, "--json"))
    assert strict.alpha.low <= strict.alpha.value <= strict.alpha.high and strict.alpha.value <= lenient.alpha.value
    assert strict.same_text == strict.texts == 1 and lenient.same_text is None
    assert strict.predicted.replayed > 0 and lenient.predicted.replayed is None  # lenient text is another
    assert strict.predicted.theorem >= strict.predicted.independent > 0 and strict.task == "prompts"
    assert strict.conditional.low is None  # of a single text
    monkeypatch.setattr(runner, "_measure", lambda *_: pytest.fail("measured again"))
    again = run(*asked)
    assert "prompts, T = 0, debian-t5-draft" in again.stdout and "lenient(0.3), inexact" in again.stdout


@pytest.mark.slow
def test_one_prompt_has_no_interval(run, tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("der Hund\n", encoding="utf-8")
    shown = run("--prompts", str(one), "-t", "0", "--no-speed")
    assert shown.exit_code == 0 and "±" not in shown.stdout and "nan" not in shown.stdout


@pytest.mark.slow
def test_without_speed_nothing_is_timed(run, monkeypatch):
    monkeypatch.setattr(timing, "interleave", lambda *_: pytest.fail("timed"))
    result = run("--no-speed", "--draft", "bigram,prompt_lookup", "--markdown", few=[*FEW[:-1], "plan"])
    assert result.exit_code == 0, result.output
    assert "| bigram " in result.stdout and "one of" in result.stdout


def test_presets_are_the_papers_tables(run, monkeypatch):
    asked = []

    def measured(target, settings, store, config, **_):
        asked.append((settings, config))
        return iter([[Row("big", "text", "small", gamma=2, alpha=Rate(0.5, None, None, None, 9), environment=ABOUT)]])

    monkeypatch.setattr(bench, "run_groups", measured)
    for table in ("2", "3", "5"):
        assert run("--table", table, few=FEW[:-2]).exit_code == 0
    (two, timed), (three, untimed), (five, _) = asked
    assert {one.sampling["temperature"] for one in two} == {0, 1} and {one.gamma for one in two} == {"plan"}
    assert {one.drafter_name for one in three} == {"debian-t5-draft", "bigram", "unigram"}
    assert "speed" in timed.quantities and "speed" not in untimed.quantities
    assert [one.rule.name for one in five[:4]] == ["rejection", "lenient(0.5)", "lenient(0.3)", "lenient(0.1)"]
    assert set(paper.OPTIONS) == {2, 3, 5} and "--table is 4" in run("--table", "4").stderr


def test_presets_take_the_place_of_defaults_only(run, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_groups", lambda target, settings, *_, **__: asked.append(settings) or iter([]))
    for table in ("2", "3"):
        assert run("--table", table, "--draft", "debian-t5-draft,prompt_lookup", "-t", "1").exit_code == 0
    two, three = asked
    assert {(one.drafter_name, one.gamma, one.temperature) for one in two} == {
        *(("debian-t5-draft", 2, 1.0), ("prompt_lookup", 2, 1.0))
    }
    assert {one.gamma for one in three} == {2}
    assert [one.drafter_name for one in three] == ["debian-t5-draft", "prompt_lookup", "bigram", "unigram"]
    assert run("--table", "5", "--rule", "rejection", "--gamma", "plan").exit_code == 0  # defaults, and typed
    assert {(one.rule.name, one.gamma) for one in asked[-1]} == {("rejection", "plan")}


def test_an_untimed_measurement_has_no_plan(run, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_groups", lambda target, settings, *_, **__: asked.append(settings) or iter([]))
    for gammas in ("plan", "plan, 2"):
        assert run("--no-speed", "--gamma", gammas, few=FEW[:-2]).exit_code == 0
    assert [{one.gamma for one in settings} for settings in asked] == [{3}, {2}]
    assert "--policy adaptive goes by costs" in run("--no-speed", "--policy", "adaptive").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule-costs", "--target", "debian-t5-base"], "expected random:SHAPE with --rule-costs"),
        (["--rule-costs", "--draft", "bigram", "--no-speed"], "--rule-costs does not read --draft, --no-speed: leave"),
        (["--card", "folder", "--gamma", "3"], "--card does not read --gamma: leave it out"),
    ],
)
def test_options_that_a_mode_would_ignore_are_refused(loading, arguments, message):
    result = CliRunner().invoke(app, ["measure", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


ABOUT = environment.current()


def test_verdicts_of_every_rule_are_timed_beside_passes(loading, monkeypatch):
    some = {name: catalogue.RULES[name] for name in ("block", "typical")}
    monkeypatch.setattr(rules, "LARGE", 12)
    monkeypatch.setattr(synthetic, "random_model", lambda *_, **options: table_model(jax.random.key(0), 9))
    monkeypatch.setattr(rules.catalogue, "RULES", some)
    small = ("--batch", "2", "--gamma", "2", "--repeats", "2")
    result = CliRunner().invoke(app, ["measure", "--rule-costs", *small, "--markdown"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("| block ") == 2 and "batch 2, V = 12" in result.stdout
    assert result.stdout.count("%") == 3  # shares of passes only where the vocabulary is the model's


@pytest.mark.slow
def test_a_model_card_has_loss_quality_and_acceptance(run, monkeypatch, tmp_path, zoo):
    monkeypatch.setattr(model_card, "heldout_loss", lambda model, folder, task: 2.5)
    monkeypatch.setattr(model_card, "SCORES", {"translation": ("words", lambda ours, theirs: float(len(ours)))})
    monkeypatch.setattr(model_card.quality, "check", lambda: None)
    monkeypatch.setattr(model_card, "GAMMAS", (2,))
    asked = ["measure", "--card", str(tmp_path), "--count", "2", "--max-new-tokens", "12"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["tasks"]
    assert [(one["task"], one["quality"]) for one in found] == [("translation", [2.0, 2.0]), ("synopsis", None)]
    assert [row["temperature"] for row in found[0]["rows"] if row["drafter"]] == [0.0, 1.0]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "120"}).stdout
    for part in ("translation, 2 prompts", "2.500", "words", "α, temperature 1", "γ = 2", "2 of 2"):
        assert part in shown
