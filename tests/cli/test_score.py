"""`jaxspec score` on table models."""

import gzip
import json
import math

import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli.main import app
from jaxspec.weights import loading as model_loading

LINES = [
    {"id": "a", "prompt": "der Hund", "completion": " sah die Katze"},
    {"text": "das alte Hund und die neue Katze"},
]


@pytest.fixture
def scored(loading):
    """Runs the command on the zoo's decoder."""

    def run(*arguments):
        return CliRunner().invoke(
            app, ["score", "--target", "debian-gpt-base", *map(str, arguments)]
        )

    return run


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_each_line_has_its_score_and_totals_are_printed(scored, source, tmp_path, zoo):
    output = tmp_path / "scores.jsonl"
    result = scored("--input", source, "--output", output, "--tokens", "--json")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    texts = [("der Hund", " sah die Katze"), LINES[1]["text"]]
    expected = jaxspec.score(zoo["debian-gpt-base"], texts)
    assert [row.get("id") for row in rows] == ["a", None]
    for row, score in zip(rows, expected, strict=True):
        assert row["tokens"] == score.tokens and math.isclose(
            row["log_prob"], score.log_prob, rel_tol=1e-6
        )
        assert math.isclose(sum(row["log_probs"]), row["log_prob"], rel_tol=1e-6)
    totals = json.loads(result.stdout)
    assert math.isclose(totals["log_prob"], sum(score.log_prob for score in expected), rel_tol=1e-6)
    assert totals["tokens"] == sum(len(score.tokens) for score in expected) and totals["texts"] == 2
    assert math.isclose(totals["perplexity"], math.exp(-totals["log_prob"] / totals["tokens"]))
    assert math.isclose(
        totals["bits_per_byte"],
        -totals["log_prob"] / math.log(2) / sum(x.num_bytes for x in expected),
    )
    again = scored("--input", source, "--output", output)
    assert again.exit_code == 2 and "--overwrite" in again.output


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    source, tmp_path, monkeypatch
):
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for output, complaint in (
        (tmp_path, "expected a file, and this is a folder"),
        (source / "scores", "Not a directory"),
    ):
        arguments = ["score", "--input", str(source), "--output", str(output), "--overwrite"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and complaint in " ".join(result.stderr.split())


def test_lines_of_text_are_printed(scored, tmp_path):
    path = tmp_path / "texts.txt.gz"
    path.write_bytes(gzip.compress(b"der Hund sah\n\ndie Katze\n"))
    result = scored("--input", path)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["num_tokens"] for row in rows] == [2, 1] and "tokens" not in rows[0]
    assert "2 texts, 3 tokens: log probability" in result.stderr


def test_a_compressed_file_that_is_cut_off_is_refused(scored, tmp_path):
    path = tmp_path / "texts.txt.GZ"
    path.write_bytes(gzip.compress(b"der Hund sah\n")[:20])
    result = scored("--input", path)
    assert result.exit_code == 2 and "texts.txt.GZ is cut off or damaged" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 1 is [1]: expected an object"),
        ('{"prompt": "der"}', 'line 1 has prompt: expected {"text": "..."}'),
        ('{"text": "der", "max_tokens": 3}', "line 1 has 'max_tokens', which is not read"),
        ("", "holds no text"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named_before_anything_is_loaded(
    line, message, scored, tmp_path
):
    path = tmp_path / "texts.jsonl"
    path.write_text(line + "\n")
    result = scored("--input", path)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


def test_a_line_that_cannot_be_scored_costs_no_other_its_score(scored, tmp_path):
    """The exit code is 3, as that of `batch`; each broken line has its error where its score would
    stand.
    """
    broken = {
        2: ('{"text": "der"', "line 2 is not JSON"),
        3: ('{"prompt": 5, "completion": "der"}', "line 3: text 2 has the prompt 5"),
        5: ('{"id": "x", "text": ""}', "line 5: text 4 has no token"),
        6: ('{"id": "y", "prompt": "der"}', "line 6 has id, prompt: expected"),
        7: ('{"text": "\\ud83d"}', "half of a surrogate pair"),
    }
    good = {1: LINES[0], 4: LINES[1], 8: LINES[1]}
    path, output = tmp_path / "texts.jsonl", tmp_path / "scores.jsonl"
    lines = {number: json.dumps(line) for number, line in good.items()} | {
        n: line for n, (line, _) in broken.items()
    }
    path.write_text("".join(lines[number] + "\n" for number in sorted(lines)))
    result = scored("--input", path, "--output", output)
    assert result.exit_code == 3
    said = " ".join(result.output.split())
    assert (
        "3 texts" in said
        and "5 of 8 lines failed; the first:" in said
        and "line 2 is not JSON" in said
    )
    rows = dict(enumerate(map(json.loads, output.read_text().splitlines()), 1))
    assert len(rows) == 8 and rows[1]["id"] == "a" and rows[5]["id"] == "x" and rows[6]["id"] == "y"
    for number, row in rows.items():
        assert ("error" in row) == (number in broken) and ("log_prob" in row) == (number in good)
        assert number in good or broken[number][1] in row["error"], row
    assert rows[4]["log_prob"] == rows[8]["log_prob"]


def test_what_holds_for_all_lines_ends_the_command(scored, source):
    result = scored("--input", source, "--start", "no-such-token")
    assert result.exit_code == 2
