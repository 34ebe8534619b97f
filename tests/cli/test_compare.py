"""`jaxspec generate --compare`: both ways of decoding, what theory says, and where texts part."""

import numpy as np
import pytest

from jaxspec.analysis import acceptance, cost, environment
from jaxspec.cli import compare
from jaxspec.cli.session import Session


@pytest.fixture
def costs(monkeypatch):
    """Comparisons that take little: two runs of each side, and given alpha, c and v."""

    def alpha(target, drafter, prompts, *, max_new_tokens, key, **warping):
        assert (target.name, drafter.name, len(prompts.length)) == ("debian-t5-base", "debian-t5-small", 2)
        return acceptance.Acceptance(np.array([[1.0, 1.0, 1.0, 0.0, 0.0], [1.0] * 5]), np.array([5, 5]))

    def passes(target, drafter, prompts, *, gamma, max_new_tokens, sampled):
        rows.append(len(prompts.length))
        return cost.Cost(gamma, 1, target=np.array([10.0]), verify=np.array([20.0]), draft=np.array([5.0]))

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
    monkeypatch.setattr(cost, "take_turns", lambda calls, repeats: np.array([[1.0, 2.0], [3.0, 4.0]]))
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
    session = Session(None, zoo["debian-t5-base"], None, [], None, None)
    assert "token 3: 'nothing'" in compare.first_difference(session, [[4, 3]], [[4, 3, 5]])
    assert compare.first_difference(session, [[4, 3]], [[4, 3]]) is None
