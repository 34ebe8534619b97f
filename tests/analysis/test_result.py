"""A run that was cut anywhere goes on with what was finished."""

import json

import pytest

from jaxspec.analysis.result import ResultStore

ONE, TWO = {"gamma": 1}, {"gamma": 2}


def test_results_outlive_the_run(tmp_path):
    file = tmp_path / "new" / "cells.jsonl"
    ResultStore(file).put(ONE, {"speed": 1.5}, {"jax": "x"})
    again = ResultStore(file)
    assert again.get(ONE) == {"speed": 1.5} and again.get(TWO) is None
    again.put(TWO, {"speed": 2.0}, {"jax": "x"})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["settings"] for row in rows] == [ONE, TWO] and rows[0]["environment"] == {
        "jax": "x"
    }


def test_a_line_that_was_cut_is_measured_again(tmp_path):
    file = tmp_path / "cells.jsonl"
    store = ResultStore(file)
    store.put(ONE, {"speed": 1.5}, {})
    store.put(TWO, {"speed": 2.0}, {})
    complete = file.read_bytes()
    for cut in (1, 30, len(complete) // 2 - 1, len(complete) // 2 - 5):
        file.write_bytes(complete[:-cut])
        store = ResultStore(file)
        assert store.get(ONE) == {"speed": 1.5}
        if cut == 1:  # only the line's end is missing
            assert store.get(TWO) == {"speed": 2.0}
        store.put(TWO, {"speed": 3.0}, {})
        assert ResultStore(file).get(ONE) == {"speed": 1.5} and ResultStore(file).get(TWO) == {
            "speed": 3.0
        }


def test_a_store_without_a_file_remembers_and_writes_nothing():
    store = ResultStore(None)
    store.put(ONE, {"speed": 1.5}, {})
    assert store.get(ONE) == {"speed": 1.5}


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"speed": 1}'])
def test_a_file_of_something_else_is_refused(tmp_path, line):
    file = tmp_path / "notes.txt"
    file.write_text(line + "\nmore\n")
    with pytest.raises(ValueError, match="line 1 is not a measurement"):
        ResultStore(file)


@pytest.mark.parametrize("text", ["nonsense", '{"speed": 1}', '{"fingerprint"; 1}'])
def test_a_file_of_something_else_whose_only_line_does_not_end_is_kept(tmp_path, text):
    """The last line is replaced if it was cut, so it has to be one of ours."""
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match="line 1 is not a measurement"):
        ResultStore(file)
    assert file.read_text() == text
