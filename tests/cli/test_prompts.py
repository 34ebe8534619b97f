"""The sources of prompts: files, standard input in all its states, and the held-out ones."""

import codecs
import io
import json
import sys

import pytest

from jaxspec.cli import prompts


def test_prompts_come_a_line_each_from_a_file_or_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"das alte\r\n\n  \ndie neue")
    expected = ["das alte", "die neue"]
    assert prompts.from_arguments(None, str(file)) == expected
    assert prompts.from_arguments(None, str(file), 1) == expected[:1]
    for prompt, source in (("-", None), (None, "-")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(file.read_text()))
        assert prompts.from_arguments(prompt, source) == expected


def test_standard_input_is_read_when_asked_for_only(monkeypatch):
    """A build system's pipe may stay open for ever."""
    monkeypatch.setattr(sys, "stdin", None)
    assert prompts.from_arguments(None, None) == []
    with pytest.raises(ValueError, match="--count is 3, and the PROMPT is one"):
        prompts.from_arguments("a", None, 3)


def test_a_no_break_space_is_a_prompt(tmp_path):
    (tmp_path / "prompts.txt").write_text(" \u00a0\n\nthe old\r\n", encoding="utf-8", newline="")
    assert prompts.from_arguments(None, str(tmp_path / "prompts.txt")) == [" \u00a0", "the old"]
    (tmp_path / "prompts.jsonl").write_text(' \n{"input": "x"}\n', encoding="utf-8")
    assert prompts.from_arguments(None, str(tmp_path / "prompts.jsonl")) == ["x"]


def test_an_empty_argument_is_refused():
    with pytest.raises(ValueError, match="the PROMPT is empty"):
        prompts.from_arguments("", None)
    assert prompts.from_arguments(" ", None) == [" "]


def test_held_out_prompts_are_counted():
    assert len(prompts.heldout("synopsis", 3)) == 3
    with pytest.raises(ValueError, match="count is 0"):
        prompts.heldout("text", 0)


def test_json_lines_may_hold_any_line_separator(tmp_path):
    inputs = ["one\u2028two", "three", "four"]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "".join(json.dumps({"input": text}, ensure_ascii=False) + "\n" for text in inputs), "utf-8"
    )
    assert prompts.from_file(file, 2) == inputs[:2]


def test_json_lines_are_those_of_jobs_too(tmp_path):
    (tmp_path / "prompts.ndjson").write_text(
        '{"prompt": "a file"}\n{"input": "b", "prompt": "c"}\n'
    )
    assert prompts.from_file(tmp_path / "prompts.ndjson") == ["a file", "b"]


def test_json_lines_may_say_of_which_task_they_are(tmp_path):
    file, tasks = tmp_path / "mixed.jsonl", ["prose", None, "code", "prose", "prose"]
    lines = [
        {"input": str(i)} | ({} if task is None else {"task": task}) for i, task in enumerate(tasks)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert prompts.by_task(file, 2) == {"prose": ["0", "3"], "mixed": ["1"], "code": ["2"]}


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path, monkeypatch):
    """From a pipe neither, in whatever encoding the terminal is."""
    content = codecs.BOM_UTF8 + "dä\r\ndie".encode()
    (tmp_path / "prompts.txt").write_bytes(content)
    assert prompts.from_file(tmp_path / "prompts.txt") == ["dä", "die"]
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "ascii", "surrogateescape")
    )
    assert prompts.from_file("-") == ["dä", "die"]


def test_a_file_of_something_else_than_lines_is_refused_by_its_name(tmp_path):
    (tmp_path / "prompts.csv").write_text("prompt,id\na,1\n")
    with pytest.raises(
        ValueError,
        match=r"prompts\.csv is not a file of lines by its name: expected text or \.jsonl",
    ):
        prompts.from_file(tmp_path / "prompts.csv")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"', "is not JSON"),
        ('{"input": "a", "b": ' + "[" * 100_000, "is not JSON"),
        ('{"text": "a"}', "has no 'input'"),
        ('{"input": 3}', "has 'input': 3"),
        ('{"input": "a", "task": ["b"]}', """has 'task': ["b"]"""),
        ('["input"]', 'is ["input"]'),
    ],
)
def test_a_line_without_an_input_is_named(tmp_path, line, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"input": "good"}}\n\n{line}\n')
    for read in (lambda: prompts.from_file(file), lambda: prompts.by_task(file, 2)):
        with pytest.raises(
            ValueError, match=r'prompts\.jsonl: line 3 .*: expected \{"input": "\.\.\."\}'
        ) as error:
            read()
        assert f"line 3 {message}" in str(error.value)


def test_a_file_that_is_not_text_is_named(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"prompts\.txt is not UTF-8 text"):
        prompts.from_file(file, 2)


def test_the_first_screen_has_three_short_sentences(zoo):
    texts = prompts.examples_for(zoo["debian-t5-large"])
    assert len(texts) == 3
    for text in texts:
        source = text.removeprefix("translate English to German: ")
        assert source.startswith("This package") and source.endswith(".") and len(source) <= 100
    other = zoo["debian-gpt-base"]
    assert prompts.examples_for(other) == prompts.heldout_for(other, 3)
