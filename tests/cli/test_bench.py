"""`jaxspec bench` on table models: what it prints, its JSON, and how pages are filled."""

import json

import jax
import pytest
from typer.testing import CliRunner

from jaxspec.analysis import bench
from jaxspec.analysis.bench import paper, transformers
from jaxspec.analysis.bench.row import Row, Spread
from jaxspec.analysis.measure import environment
from jaxspec.cli import results
from jaxspec.cli.main import app
from jaxspec.families import t5
from jaxspec.nets.t5 import T5Config

SMALL = ("--rows", "2", "--count", "2", "--max-new-tokens", "8", "--repeats", "1", "--task", "translation")
ONE = Spread(1.0, 1.0, 1.0)


@pytest.fixture
def run(loading):
    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "80"})
        assert result.exit_code == code, result.output
        return result.stdout

    return run


def test_drafters_and_policies_have_a_row_for_each_combination(run, tmp_path):
    axes = ("--draft", "debian-t5-draft,prompt_lookup+debian-t5-draft", "--gamma", "2", "--policy", "adaptive")
    asked = (*SMALL, *axes, "--resume", str(tmp_path / "rows.jsonl"))
    found = json.loads(run(*asked, "--json"))
    rows = [bench.row.from_json(row) for row in found["rows"]]
    names = [(row.drafter, row.policy, row.gamma) for row in rows]
    both = ("debian-t5-draft", "prompt_lookup+debian-t5-draft")
    each = [(name, "", 2) for name in both]
    assert names == [("", "", 0), *each, *((name, "adaptive", 2) for name in both)]
    assert found["environment"]["jax"] == jax.__version__ and all(row.same_text == 2 for row in rows)
    assert all(row.costs.search == 0 for row in rows if row.drafter)  # a model is after the look-up
    shown = run(*asked, "--csv", str(tmp_path / "rows.csv"))  # of the same rows
    assert "translation, T = 0" in shown and "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert "adaptive has " in shown and "own" in shown
    assert (tmp_path / "rows.csv").read_text().count("\n") == 1 + len(rows)


def test_random_shapes_alone(loading, monkeypatch, tmp_path):
    tiny = T5Config(64, dim=16, ff_dim=16, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
    monkeypatch.setitem(t5.SIZES, "tiny-t5", tiny)
    asked = ["bench", "--target", "random:tiny-t5", "--draft", "none", *SMALL[:-2], "--also", "memory"]
    asked += ["--resume", str(tmp_path / "rows.jsonl")]
    (row,) = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["rows"]
    assert "Peak memory" not in CliRunner().invoke(app, asked).stdout  # of another process, perhaps
    assert "Peak memory, MB: process" in CliRunner().invoke(app, asked[:-2]).stdout
    assert row["tokens"] == 16 and row["memory"]["weights"] > 0 and row["target"] == "random tiny-t5"


def test_a_peer_that_disagrees_is_an_error(run, monkeypatch):
    """The other library is not run here: `tests/analysis/bench/test_transformers.py` does so."""

    def decode(setting, parts, folder):
        asked.append((setting.is_plain, setting.batch))
        return [lambda: None for _ in parts], [[4]] * sum(len(p.prompt.length) for p in parts), 9

    asked = []
    monkeypatch.setattr(transformers, "decode", decode)
    monkeypatch.setattr(transformers.trim, "draft_tokens", lambda model: [1])
    text = run(*SMALL, "--peer", "transformers", "--gamma", "2", "--batch", "1,2", code=1)
    assert "debian-t5-draft: transformers drafts with the whole head, jaxspec with the trimmed" in " ".join(
        text.split()
    )
    assert asked == [(True, 1), (False, 1), (True, 2)]  # it refuses to draft for batches
    assert "0 of 2 greedy texts" in text and "times the speed of transformers" in " ".join(text.split())


def test_the_papers_rows_are_beside_ours_and_loading_is_called(loading, monkeypatch, zoo):
    row = Row("big", "random", "small", gamma=7, temperature=0.0, speed=ONE)
    asked = []
    monkeypatch.setattr(
        "jaxspec.analysis.measure.synthetic.random_model", lambda *given: asked.append(given) or zoo["debian-gpt-base"]
    )
    monkeypatch.setattr(paper, "table_2", lambda *models, **options: asked.append(options) or [])
    monkeypatch.setattr(paper, "floor", lambda *_: paper.Floor(1e9, 1e6, ONE))
    monkeypatch.setattr(bench, "run_groups", lambda *_, **__: iter([[row._replace(environment=environment.current())]]))
    shown = CliRunner().invoke(app, ["bench", "--paper", "--rows", "8", "-n", "128", "--dtype", "bfloat16"])
    assert shown.exit_code == 0, shown.output
    assert asked == [("t5-v1_1-xxl", "bfloat16", 0), ("t5-v1_1-small", "bfloat16", 1), dict(texts=8, new_tokens=128)]
    assert "translation" in shown.output and "3.4" in shown.output
    monkeypatch.setattr("jaxspec.analysis.measure.loading.in_fresh_processes", lambda *given: str(given))
    shown = CliRunner().invoke(app, ["bench", "--target", "random:tiny", "--loading", "folder"])
    assert "('tiny', 'float32'" in shown.output.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paper", "--target", "debian-t5-base"], "--target is 'debian-t5-base': expected random:SHAPE with --paper"),
        (["--paper", "--target", "debian-t5-large"], "--target is 'debian-t5-large': expected random:SHAPE"),
        (["--paper", "--draft", "prompt_lookup"], "--draft is 'prompt_lookup': expected random:SHAPE with --paper"),
        (["--paper", "--gamma", "3", "--also", "memory"], "--paper does not read --gamma, --also: leave them out"),
        (["--loading", "folder", "--rows", "3"], "--loading does not read --rows: leave it out"),
        (["--results", "page.md", "--gamma", "3"], "--results does not read --gamma"),
        (["--also", "latency,"], "--also is 'latency,': expected values separated by commas"),
    ],
)
def test_options_that_a_mode_would_ignore_are_refused(loading, arguments, message):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_spaces_in_lists_do_not_count(loading, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "run_groups", lambda *given, **_: asked.append(given) or iter([]))
    given = ["bench", *SMALL, "--also", "latency, memory", "--policy", "heuristic, adaptive"]
    assert CliRunner().invoke(app, given).exit_code == 0
    ((_, settings, _, config),) = asked
    assert config.quantities[-2:] == ("latency", "memory")
    assert {one.policy_label for one in settings} == {"", "heuristic", "adaptive"}


PAGE = """How this page is made:

```console
$ jaxspec bench --results page.md --resume rows.jsonl
```

Before.

```console
$ jaxspec bench --gamma 3
$ jaxspec measure --table 5
```

<!-- measured -->
old
<!-- /measured -->

After.
"""


def test_a_page_is_filled_by_its_own_commands(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(results, "printed", lambda command, store: asked.append(command) or f"table of {command}\n")
    (tmp_path / "page.md").write_text(PAGE)
    results.fill(tmp_path / "page.md", tmp_path / "rows.jsonl")
    assert asked == ["jaxspec bench --gamma 3", "jaxspec measure --table 5"]
    tables = "\n".join(f"table of {command}\n" for command in asked)
    assert (tmp_path / "page.md").read_text() == PAGE.replace("old\n", f"\n{tables}\n")
    with pytest.raises(ValueError, match="needs --resume"):
        results.fill(tmp_path / "page.md", None)
    (tmp_path / "other.md").write_text("nothing")
    with pytest.raises(ValueError, match="no console block"):
        results.fill(tmp_path / "other.md", tmp_path / "rows.jsonl")


def test_a_command_that_fails_ends_the_filling(tmp_path, monkeypatch):
    monkeypatch.setattr(results.sys, "executable", "false")
    with pytest.raises(OSError, match="jaxspec bench --gamma x: ended with 1"):
        results.printed("jaxspec bench --gamma x", tmp_path / "rows.jsonl")
