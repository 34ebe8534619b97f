"""`jaxspec figures` on table models: which files it writes, and what it says where matplotlib is absent."""

import json
import sys

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from jaxspec.cli import figures
from jaxspec.cli.main import app

THEORY = ["figure-2", "figure-3", "figure-4", "law-distance"]
MEASURED = ["landscape", "decomposition", "figure-5"]


@pytest.fixture
def run(loading, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROUNDS", 200)
    few = ["--count", "2", "--new-tokens", "12", "--gamma", "2", "--repeats", "1"]
    return lambda *arguments: CliRunner().invoke(app, ["figures", "--out", str(tmp_path / "out"), *few, *arguments])


@pytest.mark.slow
def test_a_pair(run, tmp_path):
    result = run("--json", "--format", "svg")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["files"] == [str(tmp_path / "out" / f"{name}.svg") for name in THEORY + MEASURED]
    drawn = (tmp_path / "out" / "landscape.svg").read_text(encoding="utf-8")
    assert "debian-t5-base with debian-t5-small" in drawn and "measured: " in drawn


def test_theory_needs_no_models(run, tmp_path):
    result = run("--theory-only", "--target", "nothing")
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == sorted(f"{name}.{form}" for name in THEORY for form in ("png", "svg"))
    assert result.stdout.replace("\n", "").count("figure-2.png") == 1


def test_a_bad_format(run):
    result = run("--theory-only", "--format", "pdf")
    assert result.exit_code == 2 and "expected some of png, svg" in result.stderr


def test_without_matplotlib(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--theory-only")
    assert result.exit_code == 2 and "jaxspec-decoding[figures]" in result.stderr
