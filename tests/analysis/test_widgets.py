"""The widgets of the notebooks, without a browser: sliders are set, buttons are pressed."""

import sys

import numpy as np
import pytest

from jaxspec import rules
from jaxspec.analysis import divergence, formulas, widgets

P = np.array([0.4, 0.3, 0.2, 0.1])
Q = np.array([0.1, 0.2, 0.3, 0.4])
RESIDUAL = np.array([0.3, 0.1, 0.0, 0.0])  # p - min(p, q)


def test_readouts_are_the_paper_s_formulas():
    readouts = widgets.Readouts.of(alpha=0.7, gamma=5, c=0.2)
    assert np.isclose(readouts.tokens, 2.94117)
    assert (readouts.cost, readouts.best_gamma) == (2.0, formulas.optimal_gamma(0.7, 0.2))
    assert str(readouts) == "2.94 tokens a round, cost 2.00, speed-up 1.47×, best γ 3"
    slow = widgets.Readouts.of(alpha=0.1, gamma=2, c=0.2, check=0.5)
    assert np.isclose(slow.speed_up, formulas.improvement(0.1, 2, 0.2, v=2.0))
    assert str(slow).endswith("best: plain decoding")


def test_rounds_are_unbiased_and_a_wrong_rule_s_are_not():
    """`lenient(0.5)` accepts x with min(1, 2 p / q): its first tokens have another distribution."""
    for rule in (rules.rejection(), rules.lenient(0.5)):
        rounds = widgets.CountedRounds(P, Q, gamma=2, rule=rule)
        assert np.isnan(rounds.l1) and np.isclose(rounds.alpha, 0.6)
        rounds.run(2500)
        accepted_first = Q * np.minimum(1, P / Q / (rule.lenience or 1.0))
        share = accepted_first + (1 - accepted_first.sum()) * RESIDUAL / RESIDUAL.sum()
        assert rounds.rounds == 2500 and [count for count, _ in rounds.path] == [1000, 2000, 2500]
        assert np.abs(rounds.shares - share).sum() < 3 * rounds.chance(2500)
        bias = np.abs(share - P).sum()
        assert (rounds.l1 > 3 * rounds.chance(2500)) == (bias > 0.2) == (not rule.exact)
        if rule.exact:
            assert np.isclose(rounds.expected_accepted, 0.6 + 0.36)
            assert abs(rounds.mean_accepted - rounds.expected_accepted) < 0.08
    first = widgets.CountedRounds(P, Q, gamma=2)
    first.run(1)
    first.reset()
    assert first.rounds == first.accepted == 0 and first.path == []
    assert np.isclose(divergence.d_lk(P, Q), RESIDUAL.sum())


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list:
    """Everything that is displayed: controls, then one picture for each change."""
    pytest.importorskip("ipywidgets", reason='pip install -e ".[notebooks]" brings it')
    display = pytest.importorskip("IPython.display")
    shown: list = []
    monkeypatch.setattr(display, "display", lambda *objects: shown.extend(objects))
    return shown


def test_sliders_and_buttons_draw_again(displayed: list):
    pressed: list[str] = []
    sliders = {"alpha": (0.5, 0.0, 1.0, 0.1), "draft_tokens": widgets.Slider(3, 1, 8, 1)}
    widgets.explore(
        lambda **values: dict(values), {"reset": lambda: pressed.append("reset")}, **sliders
    )
    controls, _, first = displayed
    *columns, button = controls.children
    alpha, tokens = [column.children[0] for column in columns]
    assert first == {"alpha": 0.5, "draft_tokens": 3}
    assert (tokens.description, type(tokens).__name__) == ("draft tokens", "IntSlider")
    alpha.value, tokens.value = 0.9, 8
    assert displayed[-2:] == [{"alpha": 0.9, "draft_tokens": 3}, {"alpha": 0.9, "draft_tokens": 8}]
    button.click()
    assert (
        pressed == ["reset"]
        and displayed[-1] == {"alpha": 0.9, "draft_tokens": 8}
        and len(displayed) == 6
    )


def test_each_widget_is_a_picture(displayed: list, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib", reason='pip install -e ".[figures]" brings it')
    widgets.explore_residual(P, Q, words=["a", "b", "c", "d"])
    widgets.explore_unbiasedness(P, Q, gamma=1, count=1000)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "ipywidgets", None)  # as for a user who has not installed it
        widgets.explore_landscape(alpha=0.7, gamma=5, c=0.2, marks=[("a pair", 0.6, 3)])
    residual, _, before, unbiasedness, _, count, map_alone = displayed
    assert [button.description for button in residual.children] == ["step", "run 1,000", "reset"]
    assert [button.description for button in unbiasedness.children] == ["run 1,000", "reset"]
    residual.children[1].click()
    pictures = [image.data for image in (before, count, map_alone, displayed[-1])]
    assert all(data.startswith(b"\x89PNG") for data in pictures) and len(set(pictures)) == 4
