"""`jaxspec verify`: what is right passes, what is wrong is found, and the exit code tells."""

import json

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxspec import rules
from jaxspec.analysis import numerics
from jaxspec.cli.main import app
from jaxspec.rules import catalogue
from jaxspec.rules.catalogue import RuleEntry
from jaxspec.testing import exactness
from jaxspec.weights import loading

SMALL = ("verify", "-g", "1", "--steps", "2")
PAIR = ("--target", "debian-t5-large", "--draft", "debian-t5-draft")
FEW = ("--count", "3", "--max-new-tokens", "8")


def verify(*options):
    return CliRunner().invoke(app, [*SMALL, *options], env={"COLUMNS": "200"})


@pytest.fixture
def pair(zoo, monkeypatch):
    """Table models instead of checkpoints, in any precision."""
    monkeypatch.setattr(loading, "load", lambda name, **options: zoo[name])


@pytest.fixture
def only(monkeypatch):
    """A catalogue of these rules."""

    def only(**entries):
        monkeypatch.setattr(catalogue, "RULES", entries)

    return only


@pytest.mark.slow
def test_rules_are_what_they_promise(pair, only):
    """An exact rule and an inexact one, of trees too: by enumeration, and on a pair. `tests/rules`
    has the others.
    """
    only(**{name: catalogue.RULES[name] for name in ("rejection", "lenient")})
    result = verify(*PAIR, *FEW, "--seed", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    names = [entry.rule.name for entry in catalogue.RULES.values()]
    assert [row["rule"] for row in report["rules"]] == names
    assert all(row["as_stated"] for row in report["rules"])
    judged = {row["rule"] for row in report["rules"] if "tree" in row["total_variation"]}
    assert judged == {entry.rule.name for entry in catalogue.RULES.values() if entry.rule.trees}
    for row in report["rules"]:
        worst = max(row["total_variation"].values())
        assert (worst < 1e-5) == row["exact"] and (row["above_bound"] is None) == row["exact"]
        assert row["exact"] or max(row["above_bound"].values()) < 1e-5

    assert report["pair"]["numerics"].keys() == {"float32", "bfloat16"}
    assert report["pair"]["numerics"]["float32"] == {
        "prompts": 3, "same": 3, "first": None, "largest_top_two_margin": None, "mismatches": [],
    }  # fmt: skip


@pytest.mark.slow
def test_a_rule_is_what_it_promises(only):
    only(block=catalogue.RULES["block"])
    result = verify()
    assert result.exit_code == 0, result.output
    assert "as stated" in next(line for line in result.stdout.splitlines() if "block" in line)


def test_rules_may_be_named(monkeypatch):
    tried = []

    def certificate(entry, **_):
        tried.append(entry.rule.name)
        return exactness.Certificate(entry.rule.name, True, {"model": 0.0}, None, True)

    monkeypatch.setattr(exactness, "certificate", certificate)
    for names, expected in (("block", ["block"]), ("traversal, block", ["traversal", "block"])):
        tried.clear()
        assert verify("--rule", names, "--json").exit_code == 0 and tried == expected
    tried.clear()
    assert verify("--json").exit_code == 0 and len(tried) == len(catalogue.RULES)


def test_rules_that_are_not_there_are_named():
    for names, wrong in (("blok", "blok"), ("block,lenient=0.3", "lenient=0.3")):
        result = verify("--rule", names)
        assert (
            result.exit_code == 2
            and f"--rule has {wrong!r}: expected all, or some of rejection" in result.stderr
        )


@pytest.mark.slow
def test_a_wrong_rule_is_found(only, wrong_rule):
    """An honest rule beside it is not accused."""
    only(rejection=catalogue.RULES["rejection"], liar=RuleEntry(wrong_rule._replace(name="liar")))
    result = verify("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [row["as_stated"] for row in report["rules"]] == [True, False]
    shown = verify().stdout.splitlines()
    assert sum("liar" in line and "WRONG" in line for line in shown) == 1
    assert all("as stated" in line for line in shown if "│ rejection" in line)


@pytest.mark.slow
def test_an_inexact_rule_that_breaks_its_bound_is_found(only):
    def hardly_above_p(log_p):
        return jnp.minimum(1.01 * jnp.exp(log_p), 1.0)

    only(lenient=catalogue.RULES["lenient"], broken=RuleEntry(rules.lenient(0.1), hardly_above_p))
    result = verify("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert [row["as_stated"] for row in report["rules"]] == [True, False]
    assert max(report["rules"][1]["above_bound"].values()) > 1e-2


def test_an_inexact_rule_must_state_a_bound(only):
    only(lenient=RuleEntry(rules.lenient(0.5)))
    result = verify()
    assert result.exit_code == 2 and "lenient(0.5) is inexact and states no bound" in result.stderr


@pytest.mark.slow
def test_a_rule_that_is_wrong_about_trees_is_found(only):
    """It judges chains rightly, and of siblings accepts the first."""

    def verify(keys, position, draft, target):
        verdict = rules.rejection().verify(keys, position, draft, target)
        if draft.parent is None:
            return verdict
        first = jnp.ones_like(verdict.num_accepted)
        return verdict._replace(num_accepted=first, path=jnp.zeros_like(verdict.path))

    only(wrong=RuleEntry(rules.rejection()._replace(verify=verify)))
    result = CliRunner().invoke(app, [*SMALL, "--json"])
    assert result.exit_code == 1
    (row,) = json.loads(result.stdout)["rules"]
    assert max(row["total_variation"][kind] for kind in ("model", "fixed")) < 1e-5
    assert row["total_variation"]["tree"] > 1e-2


@pytest.mark.slow
def test_other_greedy_texts_are_an_error_in_float32_only(pair, only, monkeypatch):
    """A text that differs is an error in float32, and only shown in bfloat16."""
    only()
    mismatches = [
        numerics.Mismatch(2, 3, 1, 2, 0.5, 0.25),
        numerics.Mismatch(0, 6, 1, 2, 0.75, 0.75),
    ]
    answers = iter([[], mismatches, mismatches, []])
    monkeypatch.setattr(numerics, "mismatches", lambda prepared: next(answers))
    result = verify(*PAIR, *FEW)
    assert result.exit_code == 0, result.output
    rows = {
        line.split()[1]: [x.strip() for x in line.split("│")[2:-1]]
        for line in result.stdout.splitlines()
        if "float" in line
    }
    assert rows["float32"] == ["3 of 3", "none", "–", "–"]
    assert rows["bfloat16"] == ["1 of 3", "2, 3", "0.25", "0.75"]
    assert "top-two" in result.stdout
    assert verify(*PAIR, *FEW).exit_code == 1


def test_a_round_too_long_to_enumerate_is_refused():
    result = CliRunner().invoke(app, ["verify", "--gamma", "6"])
    assert result.exit_code == 2 and "--gamma is 6: expected at most 5" in result.stderr


@pytest.mark.parametrize(
    ("half", "said"),
    [
        ("--target", "--target a needs a --draft"),
        ("--draft", "a pair has two models: give --target"),
    ],
)
def test_half_a_pair_is_refused(half, said):
    result = CliRunner().invoke(app, ["verify", half, "a"])
    assert result.exit_code == 2 and said in result.stderr


def test_a_pair_that_is_none_is_told_before_anything_is_enumerated(pair, monkeypatch):
    monkeypatch.setattr(
        exactness, "certificate", lambda *_, **__: pytest.fail("a rule was enumerated")
    )
    result = verify("--target", "debian-t5-large", "--draft", "prompt_lookup")
    assert (
        result.exit_code == 2 and "--draft is 'prompt_lookup': expected a model" in result.stderr
    ), result.output
