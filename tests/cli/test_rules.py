"""`jaxspec rules` on table models."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxspec import accept
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
    assert names == [(rule, t) for t in (0.0, 0.7, 1.0) for rule in ("block", "typical(0.09, 0.3)")]
    (table,) = rules.pair_tables(found)
    assert table.row_count == 2 and len(table.columns) == 7
    assert list(table.columns[0].cells) == ["block", "typical(0.09, 0.3), inexact"]


def test_costs(two_rules, monkeypatch):
    monkeypatch.setattr(rules, "random_model", lambda *_, **options: table_model(jax.random.key(0), 9))
    small = ("--vocab", "9,12", "--batch", "1,2", "--gamma", "2", "--repeats", "2")
    result = CliRunner().invoke(app, ["rules", "--cost", *small, "--markdown"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.stdout.count("| block ") == 4 and "batch 2, V = 12" in result.stdout
    assert result.stdout.count("%") == 2 * 3 * 2  # shares of passes only where the vocabulary is the model's


def test_half_a_pair_is_refused():
    result = CliRunner().invoke(app, ["rules", "--target", "debian-t5-base"])
    assert result.exit_code == 2 and "two models" in result.stderr


def test_cells():
    assert rules.cell(None) == "–"
    assert np.isclose(float(rules.cell({"value": 1.0, "low": 0.5, "high": 1.5}).split()[0]), 1.0)
