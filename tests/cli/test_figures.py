"""`jaxspec figures` on table models: which files it writes, and its error where matplotlib is absent."""

import json
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

pytest.importorskip("matplotlib")

from jaxspec.analysis.figures import paper
from jaxspec.analysis.measure import acceptance, cost
from jaxspec.cli.main import app
from jaxspec.decode.request import prepare

THEORY = ["figure-2", "figure-3", "figure-4", "distribution-distance"]
MEASURED = ["landscape", "decomposition", "figure-5"]


@pytest.fixture
def run(loading, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "ROUNDS", 200)
    few = ["--count", "2", "--max-new-tokens", "12", "--gamma", "2", "--repeats", "1"]
    return lambda *arguments: CliRunner().invoke(app, ["figures", "--out", str(tmp_path / "out"), *few, *arguments])


@pytest.mark.slow
def test_figures_of_a_pair_are_drawn_in_both_formats(run, tmp_path):
    result = run("--json", "--format", "svg")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["files"] == [str(tmp_path / "out" / f"{name}.svg") for name in THEORY + MEASURED]
    drawn = (tmp_path / "out" / "landscape.svg").read_text(encoding="utf-8")
    assert "debian-t5-large with debian-t5-draft" in drawn and "measured: " in drawn


@pytest.mark.parametrize(("after", "label"), [(1.5, "measured: 1.50×"), (None, "measured: –")])
def test_the_mark_is_of_the_time_after_prefill(zoo, monkeypatch, after, label):
    """As the landscape is, which Theorem 3.8 draws."""
    monkeypatch.setattr(acceptance, "measure", lambda prepared: SimpleNamespace(alpha=0.7))
    monkeypatch.setattr(cost, "measure", lambda prepared, repeats: SimpleNamespace(c=0.1, v=1.4))
    monkeypatch.setattr(paper, "speedup_after_prefill", lambda prepared, repeats: after)
    prepared = prepare(
        zoo["debian-t5-large"], "der alte Hund", drafter=zoo["debian-t5-draft"], gamma=2, max_new_tokens=4
    )
    name, figure = next(paper.of_pair(prepared, repeats=1))
    assert name == "landscape" and label in [text.get_text() for text in figure.axes[0].texts]


def test_theory_needs_no_models(run, tmp_path):
    result = run("--theory-only", "--target", "nothing")
    assert result.exit_code == 0, result.output
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == sorted(f"{name}.{form}" for name in THEORY for form in ("png", "svg"))
    assert result.stdout.replace("\n", "").count("figure-2.png") == 1


def test_an_unknown_format_is_refused(run):
    result = run("--theory-only", "--format", "pdf")
    assert result.exit_code == 2 and "expected some of png, svg" in result.stderr


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--theory-only")
    assert result.exit_code == 2 and 'pip install ".[figures]"' in result.stderr
