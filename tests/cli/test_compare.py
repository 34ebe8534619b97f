"""`jaxspec generate --compare`: both ways of decoding, what theory predicts, and where texts differ."""

import numpy as np
import pytest

from jaxspec.analysis.measure import acceptance, cost, environment, timing
from jaxspec.cli import compare
from jaxspec.cli.compare import Comparison


@pytest.fixture
def costs(monkeypatch):
    """Comparisons that take little: two runs of each side, and given alpha, c and v."""

    def alpha(job):
        names = job.target.name, job.drafter.models[0].name, len(job.prompt.length)
        assert names == ("debian-t5-base", "debian-t5-small", 2)
        return acceptance.Acceptance(np.array([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 5]), np.array([5, 5]))

    def passes(job):
        rows.append(len(job.prompt.length))
        return cost.Cost(3, 1, target=np.array([10.0]), verify=np.array([20.0]), draft=np.array([5.0]))

    rows: list[int] = []
    monkeypatch.setattr(acceptance, "measure", alpha)
    monkeypatch.setattr(cost, "measure", passes)
    monkeypatch.setattr(compare, "REPEATS", 2)
    return rows


def test_a_comparison(costs, report):
    found = report("--compare")["compare"]
    assert found["identical"] is True
    assert 0 < found["ratio"]["min"] <= found["ratio"]["median"] <= found["ratio"]["max"]
    assert (found["alpha"], found["c"], found["v"]) == (0.8, 0.5, 2.0)
    assert found["predicted"] == pytest.approx((1 - 0.8**4) / 0.2 / (3 * 0.5 + 2))
    assert costs == [1]


def test_a_comparison_really_measures(report):
    found = report("--compare", "-t", "0.7")["compare"]
    assert 0 < found["alpha"] <= 1
    assert min(found["c"], found["v"], found["predicted"], found["ratio"]["min"]) > 0


def test_a_ratio_is_of_speeds_repeat_by_repeat(costs, monkeypatch, report):
    """Of a machine that is twice as slow in the second repeat, for both sides: medians alone would not tell."""
    monkeypatch.setattr(timing, "interleave", lambda calls, repeats: np.array([[1.0, 2.0], [3.0, 4.0]]))
    monkeypatch.setattr(compare, "run", lambda jobs: [[3, 4]] * len(jobs))
    found = report("--compare")["compare"]
    assert found["ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert (found["speculative"], found["plain"]) == pytest.approx(((4 + 2) / 2, (4 / 3 + 1) / 2))


def test_a_comparison_is_printed(costs, run):
    shown = run("--compare")
    machine = environment.line(environment.current())
    for part in ("plain", "speculative, γ = 3", "min..max", "Theorem 3.8", "α = 0.800", "identical", machine):
        assert part in shown


def test_batches_are_compared_as_batches(costs, monkeypatch, report):
    monkeypatch.setattr(compare, "run", lambda jobs: [[3]] * sum(len(job.prompt.length) for job in jobs))
    assert report("--compare", "--batch")["compare"]["identical"] is True
    assert costs == [2]


def test_samples_are_not_compared_for_identity(costs, monkeypatch, report):
    monkeypatch.setattr(compare, "run", lambda jobs: [[3]] * len(jobs))
    assert report("--compare", "-t", "1")["compare"]["identical"] is None


def test_texts_that_differ_are_shown_where(costs, monkeypatch, report):
    said = iter([[[4, 3, 5], [7, 8]], [[4, 3, 5], [7, 9]]] * 3)
    monkeypatch.setattr(compare, "run", lambda jobs: next(said))
    found = report("--compare")["compare"]
    assert found["identical"] is False
    assert (
        "1 of 2 prompts; first in prompt 2, token 2: ' Hund' where plain decoding has ' Katze'" in found["difference"]
    )


def test_a_text_that_stops_early_differs_there(zoo):
    words = zoo["debian-t5-base"].tokenizer
    assert "token 3: 'nothing'" in compare.first_difference(words, [[4, 3]], [[4, 3, 5]])
    assert compare.first_difference(words, [[4, 3]], [[4, 3]]) is None


def compared(**changed):
    found = Comparison(
        gamma=5,
        speculative=80.0,
        plain=100.0,
        ratio={"median": 0.8, "min": 0.7, "max": 0.9},
        identical=True,
        difference=None,
        alpha=0.7,
        c=0.2,
        v=2.1,
        expected=2.94,
        predicted=0.95,
        cached=True,
    )
    return found._replace(**changed)


def test_a_comparison_shows_both_speeds_their_ratio_and_the_prediction(shown):
    text = shown(compare.table(compared()))
    for part in ("100.0", "80.0", "0.80×", "0.70..0.90", "0.95×", "γ = 5"):
        assert part in text
    assert "γc + v = 3.10" in compare.sentences(compared())[0].plain


def test_a_slow_down_is_owned_up_to_with_its_cost():
    said = compare.sentences(compared())[-1].plain
    assert "slower" in said
    assert "2.10 to check 6 tokens (v)" in said
    assert "1.00 to draft 5 (γc)" in said
    assert "CPU's cache" in said


@pytest.mark.parametrize("changed", [dict(cached=False), dict(v=1.1, c=0.5)])
def test_the_cache_is_blamed_only_where_it_is_to_blame(changed):
    assert "cache" not in compare.sentences(compared(**changed))[-1].plain


def test_a_slow_down_against_the_prediction_is_not_explained_by_it():
    said = compare.sentences(compared(predicted=1.2))[-1].plain
    assert "slower" in said
    assert "should" in said


def test_a_speed_up_is_stated():
    ratio = {"median": 1.8, "min": 1.7, "max": 1.9}
    assert "1.80 times as fast" in compare.sentences(compared(speculative=180.0, ratio=ratio))[-1].plain


@pytest.mark.parametrize(
    ("identical", "said"), [(True, "identical"), (False, "different. at token 3"), (None, "samples")]
)
def test_whether_the_texts_agree_is_said(identical, said):
    lines = compare.sentences(compared(identical=identical, difference="at token 3"))
    assert said in lines[1].plain
