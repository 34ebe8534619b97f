"""Texts from files, and what is refused."""

import gzip
import json

import pytest
from transformers import NllbTokenizer

from jaxspec.files.corpus import read_texts, token_rows

LINES = [
    {"task": "a", "input": "x", "output": "one"},
    {"task": "b", "input": "y", "output": "two\n\nparagraphs"},
]


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in LINES))
    return path


def test_a_field_of_some_tasks(lines):
    assert read_texts(lines, "output") == ["one", "two\n\nparagraphs"]
    assert read_texts(lines, "input", ["b"]) == ["y"]


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("none.txt", None, {}, "no text at .*none.txt: expected a .jsonl file or a text file"),
        ("empty.txt", b"\n\n \n", {}, "empty.txt has no text$"),
        ("bytes.txt", b"\xff\xfe", {}, "bytes.txt is not UTF-8 text but UTF-16: save it as UTF-8"),
        ("rows.jsonl", b'{"a": "x"}\n{"a"', {"field": "a"}, "rows.jsonl: line 2 is not JSON"),
        (
            "rows.jsonl",
            b'{"a": 1}\n',
            {"field": "a"},
            r"""line 1 has 'a': 1: expected {"a": "..."}""",
        ),
        ("rows.jsonl", b"[1]\n", {}, r"""line 1 is \[1\]: expected {"text": "..."}"""),
        ("rows.JSONL", b"[1]\n", {}, r"""line 1 is \[1\]: expected {"text": "..."}"""),
        (
            "rows.csv",
            b"a,b\n",
            {},
            "rows.csv is not a file of lines by its name: expected text or .jsonl",
        ),
        (
            "texts.txt.gz",
            b"no gzip",
            {},
            "texts.txt.gz is cut off or damaged, or is not compressed by gzip",
        ),
        ("rows.jsonl", b'{"text": "x"}\n', {"tasks": ["z"]}, r"has no text of the tasks \['z'\]"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, options, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        read_texts(tmp_path / name, **options)


@pytest.mark.parametrize("name", ["texts.ndjson", "texts.JSONL", "texts.jsonl.gz"])
def test_json_lines_are_known_by_all_their_names(name, lines, tmp_path):
    content = lines.read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_texts(tmp_path / name, "output") == read_texts(lines, "output")


def test_texts_may_be_compressed(tmp_path):
    (tmp_path / "texts.txt.gz").write_bytes(gzip.compress(b"one\r\ntwo\r\n\r\nthree\r\n"))
    assert read_texts(tmp_path / "texts.txt.gz") == ["one\ntwo", "three"]


def test_rows_are_what_a_model_writes_and_not_what_it_reads():
    """Marian's tokenizers write other pieces than they read; no language stands in a text."""

    class TwoSides:
        eos_token_id = 0

        def __call__(self, text=None, text_target=None, *, add_special_tokens, **options):
            assert not add_special_tokens
            return {
                "input_ids": [[1] * len(x) for x in text]
                if text
                else [[2] * len(x) for x in text_target]
            }

    texts, told = ["ab", "c"], []
    read, written = (
        token_rows(texts, TwoSides(), told.append, encoder=encoder) for encoder in (False, True)
    )
    assert [row.tolist() for row in read] == [[1, 1, 0], [1, 0]]
    assert [row.tolist() for row in written] == [[2, 2, 0], [2, 0]] and told == [2, 2]
    words = {
        word: index
        for index, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a", "ab"])
    }
    nllb = NllbTokenizer(vocab=words, merges=[("▁", "a"), ("a", "b")], src_lang="eng_Latn")
    assert [row.tolist() for row in token_rows(["a"], nllb, encoder=True)] == [[7, 2]]
