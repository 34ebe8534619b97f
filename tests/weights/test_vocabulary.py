"""The vocabulary of a model without its weights, from either kind of folder."""

import json

import jax
import pytest

from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.weights import hf_families, orbax, vocabulary
from jaxspec.weights.orbax import CheckpointError
from tests.small import tiny_gpt, tiny_llama

WORDS = ["<pad>", "</s>", "<unk>", "the", "old", "dog"]
LLAMA = tiny_llama(8, max_positions=32)


@pytest.fixture
def theirs(tmp_path):
    """A Hugging Face folder without weights."""
    folder = tmp_path / "llama"
    word_tokenizer(WORDS, pad_token="<pad>").save_pretrained(folder)
    _, table = hf_families.describe(LLAMA)
    (folder / "config.json").write_text(json.dumps(table))
    return folder


@pytest.fixture
def ours(theirs, tmp_path):
    """A checkpoint with the same tokenizer."""
    config = tiny_gpt(7)
    params = decoder.init(config, jax.random.key(0))
    orbax.save(
        tmp_path / "gpt",
        params,
        config,
        theirs,
        name="gpt",
        dtype="float32",
        description={},
    )
    return tmp_path / "gpt"


@pytest.mark.slow
def test_a_folder_of_either_kind(ours, theirs):
    for folder, size in ((ours, 7), (theirs, 8)):
        loaded = vocabulary.load(folder)
        assert loaded.tokenizer("the old dog")["input_ids"] == [3, 4, 5]
        assert (loaded.folder, loaded.size, loaded.begin) == (folder, size, ())


@pytest.mark.slow
def test_a_checkpoint_is_given_the_tokenizer_of_either(ours, theirs):
    with vocabulary.tokenizer_folder(vocabulary.load(ours)) as words:
        assert words == ours
    with vocabulary.tokenizer_folder(vocabulary.load(theirs)) as words:
        assert words != theirs
        assert sorted(path.name for path in words.iterdir()) == sorted(orbax.TOKENIZER)
    assert not words.exists()


def test_a_folder_without_a_tokenizer_or_with_too_large_a_one(theirs):
    table = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(table | {"vocab_size": 5}))
    with pytest.raises(
        CheckpointError, match="the tokenizer has ids up to 5, but the model only up to 4"
    ):
        vocabulary.load(theirs)
    for file in orbax.TOKENIZER:
        (theirs / file).unlink()
    with pytest.raises(
        CheckpointError, match=r"llama has no tokenizer: expected one of tokenizer\.json, "
    ):
        vocabulary.load(theirs)


def test_a_folder_of_neither_kind(theirs):
    (theirs / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.toml"):
        vocabulary.load(theirs)
