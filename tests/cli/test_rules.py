"""`jaxspec rules` on table models."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxspec import accept
from jaxspec.accept import catalogue
from jaxspec.analysis.measure import environment, synthetic
from jaxspec.cli import rules
from jaxspec.cli.main import app
from jaxspec.testing import table_model

PAIR = ("--target", "debian-t5-base", "--draft", "debian-t5-small")


@pytest.fixture
def two_rules(loading, monkeypatch):
    monkeypatch.setattr(rules, "every_rule", lambda: [accept.block(), accept.typical()])


def test_a_pair(two_rules):
    small = ("--count", "3", "--new-tokens", "5", "--gamma", "2")
    result = CliRunner().invoke(app, ["rules", *PAIR, *small, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (pair,) = found["pairs"]
    names = [(row["rule"], row["temperature"]) for row in pair["rules"]]
    several = ["rejection, 1 candidate", "rejection, 2 candidates", "rejection, 4 candidates"]
    assert names == [(rule, t) for t in (0.0, 0.7, 1.0) for rule in ("block", "typical(0.09, 0.3)", *several)]
    alphas = [row["alpha"]["value"] for row in pair["rules"] if row["temperature"] == 1 and row["rule"] in several]
    assert 0 < alphas[0] < alphas[1] < alphas[2] < 1
    (table,) = rules.pair_tables(found)
    assert table.row_count == 5 and len(table.columns) == 7
    assert list(table.columns[0].cells) == ["block", "typical(0.09, 0.3), inexact", *several]
    assert list(table.columns[2].cells)[2:] == ["–"] * 3  # tokens per round: these judge one position


def test_costs(two_rules, monkeypatch):
    monkeypatch.setattr(synthetic, "random_model", lambda *_, **options: table_model(jax.random.key(0), 9))
    monkeypatch.setattr(rules, "CANDIDATES", (4,))
    small = ("--vocab", "9,12", "--batch", "1,2", "--gamma", "2", "--repeats", "2")
    result = CliRunner().invoke(app, ["rules", "--cost", *small, "--markdown"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{environment.line(environment.current())}\n\n**batch 1")
    assert result.stdout.count("| block ") == 4 and "batch 2, V = 12" in result.stdout
    assert result.stdout.count("| rejection, 4 candidates ") == 4
    assert result.stdout.count("%") == 2 * 4 * 2  # shares of passes only where the vocabulary is the model's


def test_rules_are_those_of_the_registry():
    assert [rule.name for rule in rules.every_rule()] == [entry.rule.name for entry in catalogue.RULES.values()]


def test_half_a_pair_is_refused():
    result = CliRunner().invoke(app, ["rules", "--target", "debian-t5-base"])
    assert result.exit_code == 2 and "two models" in result.stderr


def test_cells():
    assert rules.cell(None) == "–"
    assert rules.cell({"value": 0.9, "low": 0.7, "high": 1.0}) == "0.900 ± 0.200"
    assert np.isclose(float(rules.cell({"value": 1.0, "low": 0.5, "high": 1.5}).split()[0]), 1.0)
