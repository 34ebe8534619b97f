"""A comparison in true sentences: what is faster, why not, and whether the texts agree."""

import pytest

from jaxspec.cli import verdict
from jaxspec.cli.compare import Comparison


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
    text = shown(verdict.table(compared()))
    for part in ("100.0", "80.0", "0.80×", "0.70..0.90", "0.95×", "γ = 5"):
        assert part in text
    assert "γc + v = 3.10" in verdict.sentences(compared())[0].plain


def test_a_slow_down_is_owned_up_to_with_its_cost():
    said = verdict.sentences(compared())[-1].plain
    assert "slower" in said
    assert "2.10 to check 6 tokens (v)" in said
    assert "1.00 to draft 5 (γc)" in said
    assert "CPU's cache" in said


@pytest.mark.parametrize("changed", [dict(cached=False), dict(v=1.1, c=0.5)])
def test_the_cache_is_blamed_only_where_it_is_to_blame(changed):
    assert "cache" not in verdict.sentences(compared(**changed))[-1].plain


def test_a_slow_down_against_the_prediction_is_not_explained_by_it():
    said = verdict.sentences(compared(predicted=1.2))[-1].plain
    assert "slower" in said
    assert "should" in said


def test_a_speed_up_is_stated():
    ratio = {"median": 1.8, "min": 1.7, "max": 1.9}
    assert "1.80 times as fast" in verdict.sentences(compared(speculative=180.0, ratio=ratio))[-1].plain


@pytest.mark.parametrize(
    ("identical", "said"), [(True, "identical"), (False, "different. at token 3"), (None, "samples")]
)
def test_whether_the_texts_agree_is_said(identical, said):
    lines = verdict.sentences(compared(identical=identical, difference="at token 3"))
    assert said in lines[1].plain
