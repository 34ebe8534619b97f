"""`jaxspec bench` on table models: what it prints, its JSON."""

import json

import jax
import pytest
from typer.testing import CliRunner

from jaxspec.analysis import bench
from jaxspec.analysis.result import from_json
from jaxspec.cli.main import app
from jaxspec.weights.hf_families import t5
from tests.small import tiny_t5

SMALL = (
    "--rows",
    "2",
    "--count",
    "2",
    "--max-new-tokens",
    "8",
    "--repeats",
    "1",
    "--task",
    "translation",
)


@pytest.fixture
def run(loading):
    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80"})
        assert result.exit_code == code, result.output
        return result.stdout

    return run


@pytest.mark.slow
def test_drafters_and_policies_have_a_row_for_each_combination(run, tmp_path):
    axes = (
        "--draft",
        "debian-t5-draft, fallback(prompt_lookup, 'debian-t5-draft')",
        "--gamma",
        "2",
        "--policy",
        "adaptive",
    )
    options = (*SMALL, *axes, "--resume", str(tmp_path / "rows.jsonl"))
    report = json.loads(run(*options, "--json"))
    rows = [from_json(row) for row in report["rows"]]
    names = [(row.setting.drafter, row.setting.policy, row.setting.gamma) for row in rows]
    both = ("debian-t5-draft", "fallback(prompt_lookup, 'debian-t5-draft')")
    without_policy = [(name, "", 2) for name in both]
    assert names == [("", "", 0), *without_policy, *((name, "adaptive", 2) for name in both)]
    assert report["environment"]["jax"] == jax.__version__ and all(
        row.same_text == 2 for row in rows
    )
    # a model is after the look-up
    assert all(row.costs.search == 0 for row in rows if row.setting.drafter)
    shown = run(*options, "--csv", str(tmp_path / "rows.csv"))  # of the same rows
    assert (
        "translation, T = 0" in shown
        and "…" not in shown
        and max(map(len, shown.splitlines())) <= 80
    )
    assert "adaptive has " in shown and "own" in shown
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(rows)


@pytest.mark.slow
def test_random_shapes_alone(loading, monkeypatch, tmp_path):
    tiny = tiny_t5(64)
    monkeypatch.setitem(t5.SIZES, "tiny-t5", tiny)
    command = [
        "bench",
        "--target",
        "random:tiny-t5",
        "--draft",
        "none",
        *SMALL[:-2],
        "--also",
        "memory",
    ]
    command += ["--resume", str(tmp_path / "rows.jsonl")]
    (row,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)["rows"]
    # of another process, perhaps
    assert "Peak memory" not in CliRunner().invoke(app, command).stdout
    assert "Peak memory, MB: process" in CliRunner().invoke(app, command[:-2]).stdout
    assert (
        row["tokens"] == 16
        and row["memory"]["weights"] > 0
        and row["setting"]["target"] == "random tiny-t5"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--also", "latency,"], "--also is 'latency,': expected values separated by commas"),
    ],
)
def test_bad_options_are_refused(loading, arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_spaces_in_lists_do_not_count(loading, monkeypatch):
    calls = []
    monkeypatch.setattr(
        bench, "run_groups", lambda *arguments, **_: calls.append(arguments) or iter([])
    )
    command = ["bench", *SMALL, "--also", "latency, memory", "--policy", "heuristic, adaptive"]
    assert CliRunner().invoke(app, command).exit_code == 0
    ((_, settings, _, config),) = calls
    assert config.quantities[-2:] == ("latency", "memory")
    assert {setting.policy_label for setting in settings} == {"", "heuristic", "adaptive"}
