"""`jaxspec verify`: what is right passes, what lies is found, and the exit code says so."""

import json

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxspec import accept, model
from jaxspec.accept import Rule
from jaxspec.analysis import chisquare, numerics
from jaxspec.base import Prompt
from jaxspec.cli import verify
from jaxspec.cli.main import app
from jaxspec.testing import table_model

runner = CliRunner()


def test_rules_are_as_they_say_and_a_liar_is_found(monkeypatch, wrong_rule):
    honest = [accept.rejection(), accept.lenient(0.5)]
    monkeypatch.setattr(verify, "rules", lambda: honest)
    result = runner.invoke(app, ["verify", "-g", "1", "--steps", "2", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rules"]
    assert [(row["rule"], row["exact"], row["as_stated"]) for row in rows] == [
        ("rejection", True, True),
        ("lenient(0.5)", False, True),
    ]
    monkeypatch.setattr(verify, "rules", lambda: [*honest, Rule(wrong_rule, "liar", exact=True)])
    result = runner.invoke(app, ["verify", "-g", "1", "--steps", "2"])
    assert result.exit_code == 1
    assert "WRONG" in next(line for line in result.stdout.splitlines() if "liar" in line)


def test_every_exported_rule_is_listed():
    names = {rule.name.partition("(")[0] for rule in verify.rules()}
    assert names == set(accept.__all__) - {"Rule", "Choice", "Proposals", "iterated"}


def test_a_pair(monkeypatch):
    target, draft = (table_model(jax.random.key(seed), vocab=5) for seed in (1, 2))
    monkeypatch.setattr(model, "load", lambda name, dtype: {"big": target, "small": draft}[name])
    monkeypatch.setattr(verify, "rules", lambda: [accept.rejection()])
    prompts = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
    monkeypatch.setattr(verify, "prompts_of", lambda target, count: prompts)
    options = ["verify", "-g", "1", "--steps", "2", "--target", "big", "--draft", "small", "--new-tokens", "8"]
    result = runner.invoke(app, [*options, "--json"])
    assert result.exit_code == 0, result.output
    pair = json.loads(result.stdout)["pair"]
    assert pair["exact"] and pair["greedy"]["float32"] == {"prompts": 2, "parted": []}
    assert pair["sampled"]["pvalue"] > 1e-3
    parting = numerics.Divergence(0, 3, 1, 2, 0.5)
    monkeypatch.setattr(numerics, "divergences", lambda *_, **__: [parting])
    shown = runner.invoke(app, options)
    assert shown.exit_code == 1
    assert "1 of 2 texts" in shown.stdout and "0.5" in shown.stdout
    monkeypatch.setattr(numerics, "divergences", lambda *_, **__: [])
    off = chisquare.ChiSquare(99.0, 3, 1000, 1e-9, 0.5)
    monkeypatch.setattr(chisquare, "second_token", lambda *_, **__: off)
    assert runner.invoke(app, options).exit_code == 1


@pytest.mark.parametrize("half", [["--target", "a"], ["--draft", "a"]])
def test_half_a_pair_is_refused(half):
    result = runner.invoke(app, ["verify", *half])
    assert result.exit_code == 2 and "a pair has two models" in result.stderr
