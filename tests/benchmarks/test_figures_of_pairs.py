"""`python -m benchmarks.figures` on table models: which files it writes, and its error without
matplotlib.
"""

import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from benchmarks.figures import __main__ as paper
from jaxspec.analysis import acceptance, cost
from jaxspec.decode.request import prepare

THEORY = ["figure-2", "figure-3", "figure-4", "distribution-distance"]
MEASURED = ["landscape", "decomposition", "figure-5"]


@pytest.fixture
def run(loading, tmp_path, monkeypatch):
    monkeypatch.setattr(paper, "ROUNDS", 200)
    few = ["--count", "2", "--max-new-tokens", "12", "--gamma", "2", "--repeats", "1"]
    return lambda *arguments: paper.main(["--out", str(tmp_path / "out"), *few, *arguments])


@pytest.mark.slow
def test_figures_of_a_pair_are_drawn_in_a_format(run, tmp_path, capsys):
    run("--format", "svg")
    assert capsys.readouterr().out.split() == [
        str(tmp_path / "out" / f"{name}.svg") for name in THEORY + MEASURED
    ]
    drawn = (tmp_path / "out" / "landscape.svg").read_text(encoding="utf-8")
    assert "debian-t5-large with debian-t5-draft" in drawn and "measured: " in drawn


@pytest.mark.parametrize(("after", "label"), [(1.5, "measured: 1.50×"), (None, "measured: –")])
def test_the_mark_is_of_the_time_after_prefill(zoo, monkeypatch, after, label):
    """The landscape, too, is after prefill: Theorem 3.8 draws it."""
    monkeypatch.setattr(acceptance, "measure", lambda prepared: SimpleNamespace(alpha=0.7))
    monkeypatch.setattr(cost, "measure", lambda prepared, repeats: SimpleNamespace(c=0.1, v=1.4))
    monkeypatch.setattr(paper, "speedup_after_prefill", lambda prepared, repeats: after)
    prepared = prepare(
        zoo["debian-t5-large"],
        "der alte Hund",
        drafter=zoo["debian-t5-draft"],
        gamma=2,
        max_new_tokens=4,
    )
    name, figure = next(paper.of_pair(prepared, repeats=1))
    assert name == "landscape" and label in [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.slow
def test_theory_needs_no_models(run, tmp_path):
    run("--theory-only", "--target", "nothing")
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == sorted(f"{name}.{form}" for name in THEORY for form in ("png", "svg"))


def test_the_tree_of_a_plan_is_drawn(run, tmp_path):
    acceptance = {"top": [[0.5, 0.0], [0.5, 0.2]]}
    plan = {
        "tree": {"shape": [[0], [1], [0, 0]], "draw": "top"},
        "measured": {"acceptance": acceptance},
    }
    (tmp_path / "plan.json").write_text(json.dumps({"plans": [plan]}))
    run("--tree", str(tmp_path / "plan.json"), "--format", "svg")
    assert "<svg" in (tmp_path / "out" / "tree.svg").read_text(encoding="utf-8")


def test_an_unknown_format_is_refused(run):
    with pytest.raises(ValueError, match="expected some of png, svg"):
        run("--theory-only", "--format", "pdf")


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"figures"):
        run("--theory-only")
