"""Text files as people's editors save them: byte order marks, other encodings, lines that are no
JSON.
"""

import codecs
import errno
import gzip
import os
import stat

import pytest

from jaxspec import files
from jaxspec.files import folders
from jaxspec.training import recipes
from jaxspec.training.recipes import RecipeError, Train

NESTED = "[" * 100_000


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_byte_order_mark_is_no_text(tmp_path, mark):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(mark + '{"text": "ä\u2028"}\r\n \n{"text": "b"}'.encode())
    assert list(files.read_jsonl(file, "text")) == [{"text": "ä\u2028"}, {"text": "b"}]
    assert [where.rpartition(": ")[2] for where, _ in files.read_lines(file)] == [
        "line 1",
        "line 3",
    ]
    assert files.read_text(file).startswith("{")


def test_a_compressed_file_is_read_as_the_file_is(tmp_path):
    """Prompts, texts to score and held-out lines alike; one that is cut off is named."""
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress('{"text": "ä"}\n\n{"text": "b"}\n'.encode()))
    assert list(files.read_jsonl(file, "text")) == [{"text": "ä"}, {"text": "b"}]
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz is cut off or damaged"):
        list(files.read_lines(file))


@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-16", "but UTF-16: save it"), ("latin-1", r"\('utf-8' codec")]
)
def test_another_encoding_is_named(tmp_path, encoding, said):
    file = tmp_path / "text"
    file.write_bytes("fünf".encode(encoding))
    for read in (
        files.read_text,
        lambda path: list(files.read_lines(path)),
        lambda path: list(files.read_jsonl(path)),
    ):
        with pytest.raises(
            ValueError, match=rf"text is not UTF-8 text {said}.*: save it as UTF-8|{said} as UTF-8"
        ):
            read(file)


@pytest.mark.parametrize("line", ['{"text"', "3", NESTED, '{"text": 1}', '{"a": "b"}'])
def test_a_line_that_is_no_such_object_is_named(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n\n' + line)
    with pytest.raises(ValueError, match=r'rows\.jsonl: line 3 .*: expected \{"text": "\.\.\."\}$'):
        list(files.read_jsonl(file, "text"))


def test_what_cannot_be_written_is_told_beforehand(tmp_path):
    files.check_writable(tmp_path / "new" / "rows.csv")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/rows\.csv") as error:
        files.check_writable(tmp_path / "file" / "rows.csv")
    assert error.value.errno == errno.ENOTDIR


def test_a_recipe_is_read_as_its_editor_saved_it(tmp_path):
    file = tmp_path / "recipe.toml"
    file.write_bytes(codecs.BOM_UTF8 + b'family = "none"')
    with pytest.raises(RecipeError, match="family is 'none'"):
        recipes.load(file)
    file.write_text(f"family = {NESTED}")
    with pytest.raises(RecipeError, match="is not valid TOML"):
        recipes.load(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        recipes.load(file)


def test_a_recipes_seed_is_one_that_keys_tell_apart():
    for seed in (-1, 2**32, 2**64):
        with pytest.raises(
            ValueError, match=rf"seed is {seed}: expected a number from 0 to below 4294967296"
        ):
            Train(1, 1, 1e-3, seed=seed)


def test_what_is_written_is_on_the_disk_when_it_has_its_name(tmp_path, monkeypatch):
    """A file, or all of a folder, before it is renamed, and then the names: else a loss of power
    may leave it empty.
    """
    seen = []

    def fsync(descriptor):
        state = os.fstat(descriptor)
        seen.append((None if stat.S_ISDIR(state.st_mode) else state.st_size, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    target = tmp_path / "rows"
    files.write_text(target, ["text"])
    assert seen == [(4, False), (None, True)]
    seen.clear()
    target = tmp_path / "folder"
    with folders.whole(target) as beside:
        (beside / "parts").mkdir()
        (beside / "parts" / "one").write_text("one")
    assert sorted(seen, key=str) == [(3, False), (None, False), (None, False), (None, True)]
    assert seen[-1] == (None, True)


def test_the_first_of_several_writers_stays(tmp_path):
    for text in ("first", "second"):
        files.write_text(tmp_path / "once", [text], overwrite=False)
    assert files.read_text(tmp_path / "once") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["once"]


def test_half_a_character_is_written_as_json_has_it(tmp_path):
    rows = [{"id": "\ud800", "text": "\U0001f600 \\ud800"}]
    files.write_jsonl(tmp_path / "rows", rows)
    assert list(files.read_jsonl(tmp_path / "rows")) == rows
