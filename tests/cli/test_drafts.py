"""`jaxspec drafts` on table models."""

import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec import datastore, drafters
from jaxspec.analysis.bench import variants
from jaxspec.analysis.measure import acceptance
from jaxspec.cli import drafts, options
from jaxspec.cli.main import app
from jaxspec.cli.prompts import heldout
from jaxspec.decode.request import prepare

SMALL = ("--rows", "2", "--new-tokens", "8", "--repeats", "2", "--gammas", "1,2", "--tasks", "translation")


def test_drafters_and_policies(loading):
    arguments = (
        "--drafters",
        "debian-t5-small,prompt_lookup+debian-t5-small",
        "--policies",
        "adaptive",
        "--temperatures",
        "0,1",
    )
    result = CliRunner().invoke(app, ["drafts", *SMALL, *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [task["task"] for task in found["tasks"]] == ["translation, T = 0", "translation, T = 1", "all together"]
    for task in found["tasks"]:
        plain, *rest = task["results"]
        assert plain["ratio"]["median"] == 1 and plain["tokens_per_round"] == pytest.approx(1) and not plain["fixed"]
        names = [(r["drafter"], r["variant"]) for r in rest]
        each = ("γ = 1", "γ = 2", "adaptive")
        assert names == [(d, w) for d in ("debian-t5-small", "prompt_lookup+debian-t5-small") for w in each]
        for drafter in ("debian-t5-small", "prompt_lookup+debian-t5-small"):
            fixed = [r["of_best_fixed"] for r in rest if r["drafter"] == drafter and r["fixed"]]
            assert len(fixed) == 2 and max(fixed) == 1
    assert [costs["sampled"] for costs in found["costs"]] == [False, True]
    assert all(set(costs["c"]) == {"debian-t5-small", "prompt_lookup+debian-t5-small"} for costs in found["costs"])
    assert all(set(costs["search"].values()) == {0.0} for costs in found["costs"])  # a model is after the look-up
    greedy = found["tasks"][0]["results"]
    assert all(r["same_text"] == 2 and not r["sampled"] for r in greedy)
    assert found["tasks"][1]["results"][0]["sampled"]
    table = drafts.table_of(found["tasks"][0])
    assert table.row_count == 2 + 6


def test_theory_counts_what_passes_cost():
    """Two rounds of 1 and 2 draft tokens with v = 1, 1.5, 2 and c = 0.25: 5 tokens for 1.75 + 2.5 passes."""
    accepted = np.array([[1, 2]])
    trace = dict(draft_length=np.array([[1, 2]]), num_accepted=accepted, num_tested=accepted)
    text = dict(length=np.array([6]), tokens=np.arange(6)[None])
    outcome = _Thing(**text, trace=_Thing(**trace), stats=_Thing(rounds=np.array([2])))
    plain = _Thing(**text, trace=None, stats=_Thing(rounds=np.array([5])))
    one = variants.Variant(("a", "b"), _drafter(False), 2, policy=object(), c=0.25, v=np.array([1.0, 1.5, 2.0]))
    found = variants._result(one, [outcome], [plain], np.ones(3), 2 * np.ones(3))
    assert found["predicted"] == pytest.approx(5 / (1.75 + 2.5)) and found["ratio"]["median"] == 2
    assert found["alpha"] == 1 and found["draft_tokens_per_round"] == 1.5
    fixed = variants._result(one._replace(policy=None), [outcome], [plain], np.ones(3), 2 * np.ones(3))
    assert fixed["predicted"] == pytest.approx(5 / (2.5 + 2.5))  # a draft that is cut was drawn whole
    outcome.trace.draft_length = np.array([[0, 2]])
    for may_be_empty, passes in ((False, 2.5 + 2.5), (True, 1.0 + 2.5)):
        changed = one._replace(policy=None, drafter=_drafter(may_be_empty))
        found = variants._result(changed, [outcome], [plain], np.ones(3), np.ones(3))
        assert found["predicted"] == pytest.approx(5 / passes)


def test_in_a_batch_a_round_is_as_long_as_its_longest_draft():
    """Rows of two rounds and of one: 2 draft tokens beside 1, then 1 draft token, with v = 1, 1.5, 2 and c = 0.25."""
    accepted, drafted = np.array([[1, 0], [2, 0]]), np.array([[1, 1], [2, 0]])
    trace = _Thing(draft_length=drafted, num_accepted=accepted, num_tested=np.array([[1, 1], [2, 0]]))
    text = dict(length=np.array([4, 4]), tokens=np.arange(8).reshape(2, 4))
    outcome = _Thing(**text, trace=trace, stats=_Thing(rounds=np.array([2, 1])))
    plain = _Thing(**text, trace=None, stats=_Thing(rounds=np.array([3, 3])))
    one = variants.Variant(("a", "b"), _drafter(False), 2, policy=object(), c=0.25, v=np.array([1.0, 1.5, 2.0]))
    found = variants._result(one, [outcome], [plain], np.ones(3), np.ones(3))
    assert found["longest_per_round"] == 1.5 and found["draft_tokens_per_round"] == pytest.approx(4 / 3)
    assert found["predicted"] == pytest.approx(3 / (2.5 + 1.75)) and found["tokens_per_round"] == 2
    assert found["alpha"] == 0.75


def _drafter(may_be_empty):
    made = drafters.prompt_lookup()
    return made._replace(functions=made.functions._replace(may_be_empty=may_be_empty))


class _Thing:
    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--policies", "best"), "--policy is 'best': expected one of constant, heuristic"),
        (("--temperatures", "warm"), "--temperatures is 'warm'"),
        (("--drafters", "nobody"), "no checkpoint at nobody"),
        (("--drafters", "prompt_lookup=0"), "expected prompt_lookup=NUMBER"),
        (("--drafters", "prompt_lookup=two"), "expected prompt_lookup=NUMBER"),
    ],
)
def test_errors(loading, option, message):
    result = CliRunner().invoke(app, ["drafts", *SMALL, *option])
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize("option", [(), ("--no-speed",)])
def test_a_datastore_must_be_of_the_targets_vocabulary(loading, zoo, option, tmp_path):
    store = datastore.build([[5, 6, 1]], vocab_size=18, vocabulary=datastore.vocabulary_of(zoo["stranger"].tokenizer))
    datastore.save(tmp_path / "store", store, {})
    result = CliRunner().invoke(app, ["drafts", *SMALL, *option, "--drafters", f"retrieval:{tmp_path / 'store'}"])
    assert result.exit_code == 2 and "built with another vocabulary than that of debian-t5-base" in result.stderr


def test_a_lookup_by_its_shortest_match():
    assert options.drafter("prompt_lookup=2", "float32") == drafters.prompt_lookup(3, 2)
    assert options.drafter("prompt_lookup=5", "float32") == drafters.prompt_lookup(5, 5)


def test_a_plus_in_a_path_that_exists_is_the_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = datastore.build([[1, 2]], vocab_size=3)
    for folder in ("store", "store+v2", "a+b+c"):
        datastore.save(folder, store, {})
    for name, expected in [
        ("retrieval:store+v2", ["retrieval:store+v2"]),
        (
            "prompt_lookup+retrieval:store+v2+debian-t5-small",
            ["prompt_lookup", "retrieval:store+v2", "debian-t5-small"],
        ),
        ("prompt_lookup+retrieval:store+prompt_lookup", ["prompt_lookup", "retrieval:store", "prompt_lookup"]),
        (f"greedy:{tmp_path}/a+b+c+a", [f"greedy:{tmp_path}/a+b+c", "a"]),
        ("store+v3", ["store", "v3"]),
    ]:
        assert options.drafter_names(name) == expected
    both = drafters.fallback(drafters.prompt_lookup(), drafters.retrieval(store))
    assert options.drafter("prompt_lookup+retrieval:store+v2", "float32").functions is both.functions


@pytest.mark.slow
def test_without_speed_it_is_table_3(loading, zoo):
    """A model's alpha is over all positions; a look-up has accepted over tested, and the share of rounds with one."""
    arguments = ("--no-speed", "--tasks", "translation", "--temperatures", "0,1", "--gammas", "3", "--rows", "3")
    names = ("--drafters", "debian-t5-small,prompt_lookup", "--new-tokens", "12", "--policies", "none")
    result = CliRunner().invoke(app, ["drafts", *arguments, *names, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["rows"] == 3 and found["environment"]["jax"] and not {"costs", "tasks"} & set(found)
    small, copied, drawn, _ = found["results"]
    assert [(r["drafter"], r["temperature"]) for r in found["results"]] == [
        (name, heat) for heat in (0, 1) for name in ("debian-t5-small", "prompt_lookup")
    ]
    prompts = heldout("translation", 3)
    pair = zoo["debian-t5-base"], zoo["debian-t5-small"]
    for row, heat in ((small, 0.0), (drawn, 1.0)):
        sampled = dict(temperature=heat, max_new_tokens=12, key=jax.random.key(0))
        measured = acceptance.measure(prepare(pair[0], prompts, drafter=pair[1], **sampled))
        assert row["alpha"]["value"] == pytest.approx(measured.alpha)
        assert row["alpha"]["low"] == pytest.approx(measured.interval[0])
        (run,) = row["by_gamma"]
        out = jaxspec.generate(pair[0], prompts, drafter=pair[1], gamma=3, **sampled)
        rounds = out.stats.rounds.sum()
        assert run["gamma"] == len(run["conditional_by_draft_token"]) == 3
        assert run["tokens_per_round"]["value"] == pytest.approx((out.stats.emitted - 1).sum() / rounds)
        assert run["conditional"]["value"] == pytest.approx(acceptance.conditional(out.trace).overall.value)
        assert run["drafted"]["value"] == pytest.approx((out.trace.draft_length > 0).sum() / rounds)
    assert copied["alpha"] is None and 0 <= copied["by_gamma"][0]["drafted"]["value"] < 1
    table = drafts.untimed_table(found["results"], 0)
    assert table.title.startswith("γ = 3") and table.row_count == 2
    assert [column.header for column in table.columns] == ["drafter", "translation, T = 0", "translation, T = 1"]
    assert next(table.columns[2].cells) == drafts.cell(drawn["alpha"], drawn["by_gamma"][0])
