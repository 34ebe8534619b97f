"""Folders that tests of more than one file load."""

import shutil
from pathlib import Path

import pytest

from jaxspec.weights import huggingface
from tests.weights.folders import LLAMA, model_of, tokenizer
from tests.weights.t5x_files import V11, arrays_of, write_legacy


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a Llama and its tokenizer."""
    return huggingface.save(
        model_of(LLAMA, words=tokenizer()), tmp_path_factory.mktemp("saved") / "llama"
    )


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "llama"))


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run with a legacy checkpoint."""
    return write_legacy(tmp_path_factory.mktemp("saved") / "t5", 1000, arrays_of(V11)).parent


@pytest.fixture
def run(saved_run, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved_run, tmp_path / "t5"))


@pytest.fixture
def checkpoint(run) -> Path:
    return run / "checkpoint_1000"
