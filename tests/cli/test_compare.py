"""`jaxspec compare` on table models."""

import json

import pytest
from typer.testing import CliRunner

from jaxspec.analysis import numerics
from jaxspec.cli.main import app

PAIR = ("debian-t5-large", "debian-t5-draft")


@pytest.fixture
def compare(loading):
    """Runs the command on the zoo's models."""
    return lambda *arguments: CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_the_report_is_that_of_the_function(compare, zoo, tmp_path):
    prompts = ["die alte Katze", "der Hund"]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join([*prompts, "das Alte"]) + "\n")
    options = ("--prompts", file, "--count", 2, "-n", 6)
    result = compare(*PAIR, *options, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    a, b = (zoo[name] for name in PAIR)
    expected = numerics.compare(a, b, prompts, max_new_tokens=6)
    assert report["names"] == [f"{name}, float32" for name in PAIR]
    assert [row["texts"] for row in report["prompts"]] == [
        list(prompt.texts) for prompt in expected.prompts
    ]
    assert [row["logits_error"] for row in report["prompts"]] == [
        pytest.approx(prompt.logits_error) for prompt in expected.prompts
    ]
    printed = compare(*PAIR, *options).stdout
    assert f"{expected.num_same} of 2 texts are the same" in printed


def test_a_model_beside_itself_is_refused(compare):
    result = compare("debian-t5-base", "--dtype-b", "float32")
    assert result.exit_code == 2
    assert "A and B are both debian-t5-base in float32: give another model as B" in result.stderr
