"""`jaxspec verify`: what is right passes, what lies is found, and the exit code says so."""

import json

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxspec import accept, model
from jaxspec.accept import Rule, catalogue
from jaxspec.accept.catalogue import Entry
from jaxspec.analysis import numerics
from jaxspec.cli import evidence
from jaxspec.cli.main import app

SMALL = ("verify", "-g", "1", "--steps", "2")
PAIR = ("--target", "debian-t5-base", "--draft", "debian-t5-small")
FEW = ("--count", "3", "--new-tokens", "8", "--sampled", "2", "--draws", "256")
ITERATED = ["iterated, 2 samples", "iterated, 3 samples", "iterated, 2 drafters", "iterated, top 2"]


def verify(*options):
    return CliRunner().invoke(app, [*SMALL, *options], env={"COLUMNS": "200"})


@pytest.fixture
def pair(zoo, monkeypatch):
    """Table models instead of checkpoints, in any precision."""
    monkeypatch.setattr(model, "load", lambda name, dtype: zoo[name])


@pytest.fixture
def only(monkeypatch):
    """A catalogue of these rules, and of no steps."""

    def only(**entries):
        monkeypatch.setattr(catalogue, "CHAINS", entries)
        monkeypatch.setattr(catalogue, "STEPS", {})

    return only


@pytest.mark.slow
def test_every_rule_of_the_catalogue_is_what_it_says(pair):
    """The command on the whole catalogue: by enumeration, and on a pair."""
    result = verify(*PAIR, *FEW, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    names = [entry.rule.name for entry in catalogue.CHAINS.values()]
    assert [row["rule"] for row in found["rules"]] == [*names, *ITERATED]
    assert all(row["as_stated"] for row in found["rules"])
    for row in found["rules"]:
        worst = max(row["total_variation"].values())
        assert (worst < 1e-5) == row["exact"] and (row["above_bound"] is None) == row["exact"]
        assert row["exact"] or max(row["above_bound"].values()) < 1e-5

    samples = found["pair"]["samples"]
    tests = samples["tests"]
    ways = ["plain decoding", *names, "iterated, 2 samples"]
    asked = [(t["prompt"], t["temperature"], t["rule"]) for t in tests]
    assert asked == [(prompt, t, way) for prompt in (0, 1) for t in (0.7, 1.0) for way in ways]
    assert all(t["as_stated"] and t["pvalue"] <= t["corrected"] <= 1 and t["draws"] == 256 for t in tests)
    assert all(t["test"] == ("chi-square" if t["exact"] else "bound") for t in tests)
    assert (samples["prompts"], samples["draws"], samples["confidence"]) == (2, 256, 0.95)
    assert {t["acceptance_rate"] > 0 for t in tests if t["rule"] != "plain decoding"} == {True}
    for token in (token for t in tests if t["exact"] for token in t["frequent"]):
        assert token["low"] < token["target"] < token["high"]  # of so many, one in twenty runs has one that does not
    assert found["pair"]["as_stated"]
    assert found["pair"]["numerics"].keys() == {"float32", "bfloat16"}
    assert found["pair"]["numerics"]["float32"] == {
        "prompts": 3, "same": 3, "first": None, "largest_top_two_margin": None, "parted": [],
    }  # fmt: skip


def test_a_rule_and_a_step_are_what_they_say(only):
    only(block=catalogue.CHAINS["block"])
    result = verify()
    assert result.exit_code == 0, result.output
    assert "as stated" in next(line for line in result.stdout.splitlines() if "block" in line)


def test_a_liar_is_found(pair, only, wrong_rule):
    """By enumeration, and by samples; an honest rule beside it is not accused."""
    only(rejection=catalogue.CHAINS["rejection"], liar=Entry(Rule(wrong_rule, "liar", exact=True)))
    result = verify(*PAIR, *FEW, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [row["as_stated"] for row in found["rules"]] == [True, False]
    wrong = {t["rule"] for t in found["pair"]["samples"]["tests"] if not t["as_stated"]}
    assert wrong == {"liar"} and not found["pair"]["as_stated"]
    shown = verify(*PAIR, *FEW).stdout.splitlines()
    assert sum("liar" in line and "WRONG" in line for line in shown) == 3  # one by enumeration, two temperatures
    assert all("as stated" in line for line in shown if "│ rejection" in line)


def test_an_inexact_rule_that_breaks_its_bound_is_found(pair, only):
    def hardly_above_p(log_p):
        return jnp.minimum(1.01 * jnp.exp(log_p), 1.0)

    only(lenient=catalogue.CHAINS["lenient"], broken=Entry(accept.lenient(0.1), hardly_above_p))
    result = verify(*PAIR, *FEW, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [row["as_stated"] for row in found["rules"]] == [True, False]
    assert max(found["rules"][1]["above_bound"].values()) > 1e-2
    assert {t["rule"] for t in found["pair"]["samples"]["tests"] if not t["as_stated"]} == {"lenient(0.1)"}


def test_an_inexact_rule_must_state_a_bound(only):
    only(lenient=Entry(accept.lenient(0.5)))
    result = verify()
    assert result.exit_code == 2 and "lenient(0.5) is inexact and states no bound" in result.stderr


def test_a_step_that_lies_is_found(only, monkeypatch):
    def first(keys, position, proposals, target):
        return accept.Choice(0 * proposals.length, proposals.tokens[:, 0])

    only()
    monkeypatch.setattr(catalogue, "STEPS", {"first": first})
    result = verify("--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["rules"]
    assert [row["rule"].partition(",")[0] for row in rows] == ["first"] * 4
    assert not any(row["as_stated"] for row in rows)


def test_the_numerics_table(pair, only, monkeypatch):
    """Where texts part is news in float32, and only shown in bfloat16."""
    only()
    parted = [numerics.Divergence(2, 3, 1, 2, 0.5, 0.25), numerics.Divergence(0, 6, 1, 2, 0.75, 0.75)]
    answers = iter([[], parted, parted, []])
    monkeypatch.setattr(numerics, "divergences", lambda *_, **__: next(answers))
    result = verify(*PAIR, *FEW)
    assert result.exit_code == 0, result.output
    rows = {
        line.split()[1]: [x.strip() for x in line.split("│")[2:-1]]
        for line in result.stdout.splitlines()
        if "float" in line
    }
    assert rows["float32"] == ["3 of 3", "none", "–", "–", "–"]
    assert rows["bfloat16"] == ["1 of 3", "2", "3", "0.25", "0.75"]
    assert "top-two margin" in result.stdout
    assert verify(*PAIR, *FEW).exit_code == 1


def test_the_shortest_prompts_are_taken(zoo):
    prompts = evidence.prompts_of(zoo["debian-t5-base"], 6)
    some = evidence.shortest(prompts, 2)
    assert sorted(prompts.length.tolist())[:2] == some.length.tolist()
    assert some.tokens.shape[1] <= prompts.tokens.shape[1]


@pytest.mark.parametrize("half", [["--target", "a"], ["--draft", "a"]])
def test_half_a_pair_is_refused(half):
    result = CliRunner().invoke(app, ["verify", *half])
    assert result.exit_code == 2 and "a pair has two models" in result.stderr
