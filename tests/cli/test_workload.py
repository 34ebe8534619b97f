"""The options of `bench` as settings; on table models, nothing is decoded."""

import pytest
from typer.testing import CliRunner

from jaxspec import rules
from jaxspec.analysis import random_model
from jaxspec.analysis.result import BenchResult, SettingSummary, Task, product
from jaxspec.analysis.table import Column
from jaxspec.cli import bench, prompts
from jaxspec.cli.bench import Workload, settings_of
from jaxspec.cli.main import app
from jaxspec.drafters.lookups import datastore
from jaxspec.rules import catalogue

pytestmark = pytest.mark.usefixtures("loading")


def test_every_combination_is_a_setting(zoo):
    work = Workload(
        draft="debian-t5-draft,prompt_lookup", gamma="1,plan", temperature="0,1", task="translation"
    )
    target, settings = settings_of(
        work._replace(policy="adaptive,confidence=0.5", batch="1,4", count=3, rows=2)
    )
    assert target is zoo["debian-t5-large"] and len(settings) == 2 * 2 * ((2 + 2) + (1 + 2))
    assert {setting.drafter_name for setting in settings} == {"debian-t5-draft", "prompt_lookup"}
    assert {(setting.policy_label, setting.gamma) for setting in settings} == {
        *(("", 1), ("", "plan"), ("adaptive", 1), ("confidence=0.5", 1))
    }
    assert {setting.batch for setting in settings} == {1, 4}
    assert all(len(setting.task.prompts) == 3 for setting in settings)
    assert {setting.sampling["temperature"] for setting in settings} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("options", "count", "rows"),
    [
        ({"count": 2}, 2, 2),
        ({"rows": 20}, 20, 20),
        ({"count": 30}, 30, 8),
        ({"count": 5, "rows": 3}, 5, 3),
    ],
)
def test_a_task_has_the_prompts_that_were_asked_for(options, count, rows):
    work = bench.checked(Workload(**options), set(options))
    assert (work.count, work.rows) == (count, rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 2, "rows": 3}, "got --rows 3 and --count 2: expected no more rows"),
        ({"measure": "alpha", "rows": 8}, "--measure alpha, .* does not read --rows: leave it out"),
        ({"measure": "alpha", "repeats": 5}, "does not read --repeats"),
        ({"draft": "none", "gamma": "1,4,7"}, "--draft none. does not read --gamma"),
        ({"draft": "none", "measure": "alpha"}, "has no α: expected speed in --measure"),
    ],
)
def test_an_option_that_was_typed_is_read_or_refused(options, message):
    """Also where it has its default."""
    with pytest.raises(ValueError, match=message):
        bench.checked(Workload(**options), set(options))


def test_a_target_without_a_sibling_has_a_look_up(capsys):
    _, settings = settings_of(
        Workload(target="stranger", gamma="3", task="translation", count=2, rows=1)
    )
    assert [setting.drafter_name for setting in settings] == ["prompt_lookup"]
    assert "No model is known that drafts for stranger" in capsys.readouterr().err


def test_a_rule_that_needs_sampling_is_left_out_at_temperature_0(capsys):
    work = Workload(
        draft="debian-t5-draft", rule="rejection, trusting", gamma="2", temperature="0,1"
    )
    _, settings = settings_of(work._replace(task="translation", count=2, rows=1))
    assert {(setting.rule.name, setting.temperature) for setting in settings} == {
        *(("rejection", 0.0), ("rejection", 1.0), ("trusting(0.5)", 1.0))
    }
    assert (
        "the rule trusting(0.5) reads probabilities of draft tokens: left out at temp"
        in capsys.readouterr().err
    )


def test_a_tree_whose_size_is_its_own_is_measured_once():
    names = "debian-t5-draft,tree('debian-t5-draft', (2, 1))"
    _, settings = settings_of(
        Workload(draft=names, gamma="plan,2,4", task="translation", count=2, rows=1)
    )
    assert [(setting.drafter_name, setting.gamma) for setting in settings] == [
        *(("debian-t5-draft", gamma) for gamma in ("plan", 2, 4)),
        ("tree('debian-t5-draft', (2, 1))", 2),
    ]


def test_what_cannot_be_is_left_out_in_words(capsys):
    tree = "tree('debian-t5-draft', (2, 1))"
    work = Workload(
        draft=f"debian-t5-draft,{tree}", rule="rejection, block", policy="heuristic, confidence=0.5"
    )
    _, settings = settings_of(work._replace(gamma="2", task="translation", count=2, rows=1))
    assert {
        (setting.policy_label, setting.rule.name)
        for setting in settings
        if setting.drafter_name == tree
    } == {*(("", "rejection"), ("heuristic", "rejection"))}
    assert sum(setting.drafter_name == "debian-t5-draft" for setting in settings) == 6
    said = capsys.readouterr().err
    assert (
        f"{tree} drafts trees, and the rule block takes chains of draft tokens only: left out"
        in said
    )
    assert (
        "the policy confidence=0.5 stops a draft token by token" in said and said.count("\n") == 2
    )
    with pytest.raises(
        ValueError,
        match=r"nothing is left to measure: tree\('debian-t5-draft', \(2, 1\)\) drafts trees, and the",
    ):
        settings_of(work._replace(draft=tree, rule="block", policy="", count=2, rows=1))


def test_no_gamma_is_planned_for_drafters_that_are_no_models(capsys):
    work = Workload(draft="debian-t5-draft,prompt_lookup", task="translation", count=2, rows=1)
    for gammas, wanted, instead in (
        ("plan", ["plan", 3], "γ = 3 in its place"),
        ("plan,2", ["plan", 2, 2], "left out"),
    ):
        _, settings = settings_of(work._replace(gamma=gammas))
        assert [setting.gamma for setting in settings] == wanted
        assert (
            f"no γ can be planned for prompt_lookup, for it is not a model: {instead}"
            in capsys.readouterr().err
        )


def test_plain_decoding_and_tasks_in_their_order():
    _, settings = settings_of(Workload(draft="none", count=2, max_new_tokens=5, full_length=True))
    assert [(setting.task.name, setting.is_plain, setting.task.ends) for setting in settings] == [
        ("translation", True, False),
        ("synopsis", True, False),
    ]


def test_rules_by_their_names_and_numbers():
    _, settings = settings_of(
        Workload(rule="lenient=1,lenient=0.3,block,typical", gamma="3", task="translation")
    )
    assert [setting.rule for setting in settings] == [
        rules.rejection(),
        rules.lenient(0.3),
        rules.block(),
        rules.typical(0.09, 0.3),
    ]
    every = settings_of(Workload(rule="all", task="translation", gamma="2", temperature="1"))[1]
    assert [setting.rule for setting in every] == [entry.rule for entry in catalogue.RULES.values()]


def test_random_models(zoo, monkeypatch):
    shapes = []
    monkeypatch.setattr(
        random_model,
        "random_model",
        lambda *arguments: shapes.append(arguments) or zoo["debian-gpt-base"],
    )
    _, settings = settings_of(
        Workload("random:t5-v1_1-base", "random:t5-v1_1-small", rows=2, count=3)
    )
    assert shapes == [("t5-v1_1-base", "float32", 0, None), ("t5-v1_1-small", "float32", 1, None)]
    assert settings[0].task.prompts.tokens.shape[0] == 3 and not settings[0].task.ends


def test_no_gamma_is_planned_for_a_rule_without_a_rate(capsys):
    _, settings = settings_of(
        Workload(gamma="plan", rule="lenient=0.3,typical", task="translation", count=2, rows=1)
    )
    assert [setting.gamma for setting in settings] == ["plan", 3]
    assert "for the rule typical" in capsys.readouterr().err


def test_counted_drafters_are_not_counted_on_what_is_measured(zoo):
    target = zoo["debian-t5-large"]
    everything, rest = prompts.references(target, 0), prompts.references(target, 200)
    assert len(everything) == 600 and rest == everything[200:300] + everything[500:]
    _, (setting,) = settings_of(Workload(draft="bigram", gamma="3", task="translation", count=298))
    assert (
        setting.drafter_name == "bigram" and setting.drafter.lm.vocab_size == target.lm.vocab_size
    )


def test_prompts_from_files(tmp_path):
    (tmp_path / "a.txt").write_text("der Hund\n\ndie Katze\nsah\n", encoding="utf-8")
    _, (setting,) = settings_of(Workload(prompts=tmp_path / "a.txt", gamma="3", count=2, rows=1))
    assert setting.task.name == "a" and setting.task.prompts == ["der Hund", "die Katze"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "text", "--prompts", "a.txt"], "got --task and --prompts"),
        (["--task", "poems"], "expected one of translation, synopsis, edit, text"),
        (
            ["--gamma", "2,x"],
            "--gamma is '2,x': expected positive integers, or plan, separated by commas",
        ),
        (["--gamma", "0"], "--gamma is '0'"),
        (["--temperature", "-1"], "--temperature is '-1': expected numbers 0 or more"),
        (["--temperature", "nan"], "--temperature is 'nan'"),
        (["--batch", "0"], "--batch is '0'"),
        (["--rule", "lenient=0"], "lenience is 0"),
        (["--rule", "kind"], "--rule is 'kind': expected one of rejection"),
        (["--rule", "lenient=low"], "--rule is 'lenient=low'"),
        (["--draft", "a,"], "--draft is 'a,'"),
        (["--measure", "alpha,"], "--measure is 'alpha,': expected values separated by commas"),
        (["--measure", "sped"], "--measure is 'sped': expected one of speed, latency"),
        (["--measure", "costs"], "costs is measured in timed runs: add speed to costs"),
        (
            ["--measure", "alpha", "--batch", "4", "--repeats", "2"],
            "which times nothing, does not read --batch, --repeats: leave them out",
        ),
        (["--measure", "alpha", "--gamma", "plan"], "--gamma plan goes by costs"),
        (["--measure", "alpha", "--policy", "adaptive"], "--policy adaptive goes by costs"),
        (["--draft", "nobody"], "no checkpoint at nobody"),
        (["--draft", "prompt_lookup(3, 0)"], "shortest is 0: expected at least 1"),
        (["--draft", "bigram", "--count", "300"], "no held-out texts are left to make a bigram of"),
        (["--policy", "best"], "--policy is 'best': expected one of constant, heuristic"),
        (["--policy", "adaptive", "--gamma", "plan"], "--policy needs the most draft tokens"),
        (["--target", "random:t5-v1_1-bas"], "did you mean 't5-v1_1-base'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    options = arguments if "--gamma" in arguments else [*arguments, "--gamma", "2"]
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_a_datastore_must_be_of_the_targets_vocabulary(zoo, tmp_path):
    store = datastore.build(
        [[5, 6, 1]], vocab_size=18, vocabulary=datastore.vocabulary_of(zoo["stranger"].tokenizer)
    )
    datastore.save(tmp_path / "store", store, {})
    with pytest.raises(
        ValueError, match="built with another vocabulary than that of debian-t5-large"
    ):
        settings_of(Workload(draft=f"retrieval('{tmp_path / 'store'}')"))


def test_groups_are_printed_as_they_end(monkeypatch, zoo, capsys):
    results, measured = (
        [BenchResult(SettingSummary("big", f"text {i}"), tokens=i) for i in range(3)],
        [],
    )
    settings = product(task=[Task(f"text {i}", "a") for i in range(3)], drafter=[None], gamma=0)

    def run_groups(*_, **__):
        for row in results:
            # the one before is shown
            assert capsys.readouterr().out.count(", T = 0") == min(1, len(measured))
            measured.append(row)
            yield [row]

    monkeypatch.setattr("jaxspec.analysis.bench.run_groups", run_groups)
    columns = [[Column("tokens", "tokens")]]
    rows = bench.run(zoo["debian-t5-large"], settings, Workload(), columns)
    assert rows == results == measured
    assert capsys.readouterr().out.count(", T = 0") == 1


def test_tables_of_held_out_references_and_a_datastore_of_them(zoo):
    _, settings = settings_of(
        Workload(draft="ngram(order=4),retrieval", task="translation", gamma="2")
    )
    assert [setting.drafter_name for setting in settings] == ["ngram(order=4)", "retrieval"]
