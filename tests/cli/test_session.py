"""Decoding at once and round by round: whole rounds, the same samples, and texts that end at a stop string."""

import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, model
from jaxspec.analysis import cost
from jaxspec.cli import prices


@pytest.mark.parametrize("mode", [(), ("--batch",)])
def test_rounds_are_reported_whole(mode, report):
    found = report("--trace", "-t", "1", *mode)
    for rounds, tokens, count in zip(found["rounds"], found["tokens"], found["stats"]["rounds"], strict=True):
        assert [t for step in rounds for t in step["tokens"]] == tokens
        assert len(rounds) == count + 1
        for step in rounds[1:]:
            kept = min(step["accepted"], len(step["tokens"]))
            assert step["tokens"][:kept] == step["draft"][:kept]


def test_a_samples_text_depends_on_the_seed_alone(report):
    one, batch, other = report("-t", "1"), report("-t", "1", "--batch"), report("-t", "1", "--seed", "1")
    assert one["tokens"] == batch["tokens"]
    assert one["tokens"] != other["tokens"]


def test_text_ends_before_a_stop_string(report, run):
    wholes = report()["texts"]
    row, whole = next((i, text) for i, text in enumerate(wholes) if " " in text)
    stop = whole.split(" ")[1]
    cut = whole[: whole.index(stop)]
    assert report("--stop", stop)["texts"][row] == cut
    assert whole not in run("--stop", stop)


def test_estimated_goes_by_what_passes_cost_here(report, monkeypatch):
    found = {}
    for price in (1.0, 50.0):
        priced = [cost.Cost(n, 1, np.ones(1), np.full(1, price), np.full(1, 0.01)) for n in (1, 3)]
        monkeypatch.setattr(cost, "measure_all", lambda *given, priced=priced, **options: priced)
        found[price] = report("--policy", "estimated")
    assert found[1.0]["texts"] == found[50.0]["texts"]
    assert sum(found[1.0]["stats"]["drafted"]) > 4 * sum(found[50.0]["stats"]["drafted"])


@pytest.mark.slow
def test_costs_are_measured_for_estimated(report, monkeypatch):
    asked = []
    measure_all = cost.measure_all
    monkeypatch.setattr(
        cost, "measure_all", lambda *given, **options: asked.append(options) or measure_all(*given, **options)
    )
    assert report("--policy", "estimated", "-t", "1")["texts"]
    assert [(tuple(one["gammas"]), one["sampled"]) for one in asked] == [((1, 3), True)]


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ((), "float32", "float32"),
        (("--dtype", "int8"), "int8", "int8"),
        (("--dtype", "int8", "--draft-dtype", "bfloat16"), "int8", "bfloat16"),
        (("--draft-dtype", "int8"), "float32", "int8"),
    ],
)
def test_the_drafter_is_of_the_targets_dtype_or_of_its_own(options, target, draft, run, zoo, monkeypatch):
    asked = []
    monkeypatch.setattr(model, "load", lambda name, dtype, mesh: asked.append((name, dtype)) or zoo[name])
    monkeypatch.setattr(prices, "of_policy", lambda _, *who, **given: asked.append(who[:2]) or {"v": np.ones(4)})
    shown = run("--policy", "estimated", *options)
    assert asked == [("debian-t5-base", target), ("debian-t5-small", draft), ("debian-t5-small", draft)]
    assert (f"in {draft} ·" in shown) == (draft != target)


def test_what_a_search_costs_is_told_from_one_guess_on(zoo, monkeypatch):
    """A pass over any draft costs 1.5, a pass of what guesses, or searches, 0.25."""
    one, prompt = np.ones(1), jaxspec.Prompt(np.array([[5, 6]]), np.array([2]))
    asked = []

    def measured(target, drafter, prompts, *, gammas, sampled, **options):
        asked.append(sampled)
        return [cost.Cost(n, 1, one, 1.5 * one, 0.25 * one) for n in gammas]

    monkeypatch.setattr(cost, "measure_all", measured)
    target, small = zoo["debian-t5-base"], zoo["debian-t5-small"]
    for drafter, name, c, v in [
        (drafters.lookup(), "lookup", 0.0, [1.0, 1.75, 1.75, 1.75]),
        (small, "debian-t5-small", 0.25, [1.0, 1.5, 1.5, 1.5]),
    ]:
        found = prices.of_policy(drafter, name, "float32", target, prompt, gamma=3, sampled=True)
        assert found["c"] == c and found["v"].tolist() == v
    assert asked == [True, False, True]  # a search draws nothing
    both = drafters.first_of(drafters.lookup(), small)
    assert prices.of_search(both, target, prompt, gamma=3, sampled=True) == 0
