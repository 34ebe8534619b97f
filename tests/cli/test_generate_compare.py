"""`jaxspec generate --compare`: two results of the runner, and what they mean in words."""

import pytest

from jaxspec.analysis import environment
from jaxspec.analysis.result import (
    BenchResult,
    Costs,
    Difference,
    Predicted,
    Rate,
    SettingSummary,
    Spread,
)
from jaxspec.cli import generate, show

ONE = Spread(1.0, 1.0, 1.0)
PLAIN = BenchResult(
    SettingSummary("big", "prompts"), tokens_per_second=Spread(100.0, 99.0, 101.0), texts=2
)


def spread(value):
    return Spread(value, value - 0.1, value + 0.1)


def ours(**changed):
    setting = PLAIN.setting._replace(drafter="small", gamma=5)
    row = PLAIN._replace(
        setting=setting._replace(
            **{name: changed.pop(name) for name in ("policy", "exact") if name in changed}
        ),
        tokens_per_second=Spread(80.0, 79.0, 81.0),
        speed=spread(0.8),
        same_text=2,
        alpha=Rate(0.7, *3 * [float("nan")], 9),
        tokens_per_round=Rate(2.94, *3 * [float("nan")], 9),
        costs=Costs(spread(0.2), spread(2.1), 0.0, ONE, ONE, ONE),
        predicted=Predicted(theorem=0.95, rounds=0.94),
    )
    return row._replace(**changed)


@pytest.mark.slow
def test_a_comparison_really_measures(report, monkeypatch):
    monkeypatch.setattr(show, "REPEATS", 2)
    results = report("--compare", "--policy", "heuristic", "--batch", "2")["compare"]
    plain, speculative = results["plain"], results["speculative"]
    assert speculative["same_text"] == speculative["texts"] == plain["texts"] == 2
    assert (
        speculative["setting"]["batch"] == 2
        and speculative["setting"]["policy"] == "heuristic"
        and len(plain["seconds"]) == 2
    )
    assert (
        speculative["setting"]["drafter"] == "debian-t5-draft"
        and 0 < speculative["alpha"]["value"] <= 1
    )
    assert speculative["speed"]["min"] > 0 and speculative["predicted"]["rounds"] > 0


def test_a_comparison_is_printed(run, monkeypatch):
    machine = environment.current()
    monkeypatch.setattr(
        show, "compare", lambda *_: (PLAIN, ours(speed=spread(1.8), environment=machine))
    )
    # the texts come from the program that is timed: no others are compiled
    monkeypatch.delattr(generate, "pieces")
    shown = run("--compare")
    for part in (
        "100.0",
        "80.0",
        "1.80",
        "1.70..1.90",
        "0.95",
        "0.70",
        "identical",
        environment.line(machine),
    ):
        assert part in shown


def test_a_speed_up_is_stated():
    assert "1.80 times as fast" in show.conclusion(ours(speed=spread(1.8)), cached=True)
    said = show.conclusion(ours(speed=spread(1.1)._replace(min=0.7, max=1.4)), cached=True)
    assert "0.70 to 1.40" in said and "no difference" in said


def test_a_slow_down_is_owned_up_to_with_its_cost():
    said = show.conclusion(ours(), cached=True)
    for part in (
        "slower",
        "time of 3.10 one",
        "2.10 to check 6 tokens (v)",
        "1.00 to draft 5 (γc)",
        "CPU's cache",
    ):
        assert part in said
    against = show.conclusion(ours(predicted=Predicted(rounds=1.2)), cached=True)
    assert "slower" in against and "though a round yields" in against
    assert show.conclusion(ours(costs=None), cached=True) == "Speculative decoding is slower here."
    assert (
        show.conclusion(ours(policy="adaptive"), cached=True)
        == "Speculative decoding is slower here."
    )


@pytest.mark.parametrize(("cached", "v"), [(False, 2.1), (True, 1.1)])
def test_the_cache_is_blamed_only_where_it_is_to_blame(cached, v):
    costs = Costs(spread(0.5), spread(v), 0.0, ONE, ONE, ONE)
    assert "cache" not in show.conclusion(ours(costs=costs), cached)


def test_whether_the_texts_agree_is_stated(zoo):
    tokenizer = zoo["debian-t5-large"].tokenizer

    def text(**changed):
        return show.agreement(ours(**changed), tokenizer).plain

    assert "identical" in text()
    assert "samples" in text(same_text=None) and "inexact" in text(same_text=None, exact=False)
    assert (
        "1 of 2 prompts; first in prompt 2, token 2: ' Hund' where plain decoding has ' Katze'"
        in text(same_text=1, difference=Difference(1, 1, (7, 8), (7, 9)))
    )
    assert "token 3: 'nothing'" in text(same_text=1, difference=Difference(0, 2, (4, 3), (4, 3, 5)))
