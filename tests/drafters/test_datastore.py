"""Datastores: the order of suffixes, and that what was written is read or refused."""

import numpy as np
import pytest

from jaxspec.drafters.lookups import datastore
from jaxspec.drafters.lookups.datastore import DatastoreError
from jaxspec.testing import word_tokenizer

ROWS = [[5, 1, 300, 1], [1, 300], [2], [1, 300, 1, 300, 1]]


@pytest.mark.parametrize(
    ("vocab", "kind"), [(301, np.uint16), (2**16 - 1, np.uint16), (2**16, np.uint32)]
)
def test_suffixes_are_in_the_order_of_what_stands_there(vocab, kind):
    store = datastore.build(ROWS, vocab_size=vocab, begin=[0])
    text = [t + 1 for row in ROWS for t in (0, *row, -1)]
    assert store.tokens.tolist() == text and store.tokens.dtype == kind
    assert store.suffixes.tolist() == sorted(
        (i for i, t in enumerate(text) if t), key=lambda i: text[i:]
    )
    assert store.suffixes.dtype == np.int32


def test_an_empty_document_is_an_end():
    assert datastore.build([[], [1], []], vocab_size=2).tokens.tolist() == [0, 2, 0, 0]


def test_what_is_saved_is_loaded_as_memory_maps(tmp_path):
    built = datastore.build(ROWS, vocab_size=301, vocabulary="ab")
    datastore.save(tmp_path / "store", built, {"texts": ["a.txt"]})
    loaded = datastore.load(tmp_path / "store")
    assert isinstance(loaded.tokens, np.memmap) and isinstance(loaded.suffixes, np.memmap)
    np.testing.assert_array_equal(loaded.tokens, built.tokens)
    np.testing.assert_array_equal(loaded.suffixes, built.suffixes)
    assert (loaded.vocab_size, loaded.vocabulary) == (301, "ab")
    manifest = datastore.read_manifest(tmp_path / "store")
    assert (manifest.documents, manifest.tokens, manifest.about) == (4, 12, {"texts": ["a.txt"]})


def test_building_tells_its_two_steps():
    steps = []
    datastore.build(ROWS, vocab_size=301, advance=lambda: steps.append(1))
    assert steps == [1, 1]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "got 0 documents and no tokens"),
        ([[], []], "got 2 documents and no tokens: expected at least one token"),
        ([[1, 7]], "ids range from 1 to 7: expected 0 to 4"),
        ([[1], [-1, 2]], "ids range from -1 to 2"),
    ],
)
def test_documents_that_cannot_be_stored_are_refused(rows, said):
    with pytest.raises(DatastoreError, match=said):
        datastore.build(rows, vocab_size=5)


def test_too_many_tokens_are_refused(monkeypatch):
    monkeypatch.setattr(datastore, "LARGEST", 31)
    with pytest.raises(
        DatastoreError, match="got 12 tokens in 4 documents: a datastore holds at most 15 of both"
    ):
        datastore.build(ROWS, vocab_size=301)


@pytest.fixture
def folder(tmp_path):
    datastore.save(tmp_path / "store", datastore.build(ROWS, vocab_size=301), {})
    return tmp_path / "store"


def test_overwriting_needs_permission_and_a_crash_leaves_the_old_one(folder, monkeypatch):
    other = datastore.build([[1]], vocab_size=2)
    with pytest.raises(DatastoreError, match="exists: give overwrite"):
        datastore.save(folder, other, {})
    with pytest.raises(ValueError, match="a manifest holds strings"):
        datastore.save(folder, other, {"bad": None}, overwrite=True)
    assert len(datastore.load(folder).suffixes) == 12
    datastore.save(folder, other, {}, overwrite=True)
    assert len(datastore.load(folder).suffixes) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("tokens.npy", b"NUMPY", b"PYTHO", "is damaged: tokens.npy is altered"),
        ("suffixes.npy", None, None, "is damaged: suffixes.npy is missing"),
        (
            "manifest.toml",
            None,
            None,
            "no datastore at .*store: expected a folder that `jaxspec datastore` wrote",
        ),
        (
            "manifest.toml",
            b"format = 1",
            b"format = 2",
            "format is 2, this version of jaxspec reads format 1",
        ),
        (
            "manifest.toml",
            b"format = 1",
            b"family = 1",
            "it is a checkpoint's, and not a datastore's",
        ),
        ("manifest.toml", b"documents = 4\n", b"", "it lacks the key 'documents'"),
        ("manifest.toml", b"format = 1", b"format = = 1", "cannot be used"),
        (
            "manifest.toml",
            b"documents = 4",
            b'documents = "4"',
            "documents must be of type int, got '4'",
        ),
        ("manifest.toml", b"tokens.npy", b"token.npy", r"\[files\] lists"),
        (
            "manifest.toml",
            b"documents = 4",
            b"documents = 5",
            "its manifest.toml says 12 tokens in 5 documents",
        ),
    ],
)
def test_what_is_damaged_is_refused(folder, file, old, new, said):
    path = folder / file
    if old is None:
        path.unlink()
    else:
        assert old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(DatastoreError, match=said):
        datastore.load(folder)


def test_a_vocabulary_is_all_of_its_ids():
    """Also of those above the number of tokens, where ids between them have none."""
    first, other = (word_tokenizer({"<unk>": 0, "</s>": 1, word: 9}) for word in ("dog", "cat"))
    assert datastore.vocabulary_of(first) != datastore.vocabulary_of(other)
