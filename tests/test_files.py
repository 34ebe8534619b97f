"""Text files as people's editors save them: byte order marks, other encodings, lines that are no JSON."""

import codecs
import errno

import pytest

from jaxspec import files
from jaxspec.training import recipes
from jaxspec.training.recipes import RecipeError, Train

NESTED = "[" * 100_000


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_byte_order_mark_is_no_text(tmp_path, mark):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(mark + '{"text": "ä\u2028"}\r\n \n{"text": "b"}'.encode())
    assert list(files.read_jsonl(file, "text")) == [{"text": "ä\u2028"}, {"text": "b"}]
    assert [where.rpartition(": ")[2] for where, _ in files.read_lines(file)] == ["line 1", "line 3"]
    assert files.read_text(file).startswith("{")


@pytest.mark.parametrize(("encoding", "said"), [("utf-16", "but UTF-16: save it"), ("latin-1", r"\('utf-8' codec")])
def test_another_encoding_is_named(tmp_path, encoding, said):
    file = tmp_path / "text"
    file.write_bytes("fünf".encode(encoding))
    for read in (files.read_text, lambda path: list(files.read_lines(path)), lambda path: list(files.read_jsonl(path))):
        with pytest.raises(ValueError, match=rf"text is not UTF-8 text {said}.*: save it as UTF-8|{said} as UTF-8"):
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
        with pytest.raises(RecipeError, match=rf"train.seed is {seed}: expected 0 to 4294967295"):
            Train(1, 1, 1e-3, seed=seed)
