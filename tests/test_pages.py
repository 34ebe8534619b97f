"""The Python of the pages runs, and prints what they show. README's is in `core`."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli.main import app
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.weights.loading import shipped
from tests.marks import marked
from tests.small import random_params, tiny_llama
from tests.test_docs import PAGES, PYTHON, README, commands, name_of

HUB_ID = re.compile(r"[A-Z][\w.-]*/[\w.-]+")  # an organisation's: "Qwen/Qwen3-8B"
# commands that measure what a page's Python made: run after it
FOLLOWS = {"docs/distil.md": "jaxspec bench "}
WITH_PYTHON = [page for page in PAGES if PYTHON.search(page.read_text("utf-8"))]


@pytest.fixture
def same_cache():
    """A page sets where jax keeps its programs; other tests, and the processes that they start,
    keep theirs.
    """
    folder = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


@pytest.fixture
def models_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    """Gives a tiny model with random weights for a hub id, since tests have no network; other names
    are loaded.
    """
    load = jaxspec.load
    tokenizer = word_tokenizer(["<unk>", "</s>", "the", "cat", "dog"])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = tiny_llama(len(tokenizer), max_positions=512)
    network = decoder.language_model(config)

    def load_page(name: str, **options: Any) -> jaxspec.Model:
        if not HUB_ID.fullmatch(name) or Path(name).exists():
            return load(name, **options)
        return jaxspec.Model(network, random_params(decoder.init, config), tokenizer, config, name)

    monkeypatch.setattr(jaxspec, "load", load_page)


@pytest.mark.usefixtures("same_cache", "models_of_the_hub")
@pytest.mark.usefixtures("standard_dtype_promotion")  # as users have it: training needs it
@pytest.mark.parametrize("page", marked(WITH_PYTHON, slow={*WITH_PYTHON} - {README}), ids=name_of)
def test_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From top to bottom, as one reads it; lines `# > ...` are what is printed. The README's blocks
    stand alone.
    """
    text, namespace = page.read_text("utf-8"), {}
    if 'load("debian' in text and "debian-t5-base" not in shipped():
        pytest.skip("the checkpoints are not here")
    monkeypatch.chdir(tmp_path)
    for block in PYTHON.finditer(text):
        # so that tracebacks show lines of the page
        before = "\n" * text.count("\n", 0, block.start(1))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(before + block[1], page, "exec"), {} if page == README else namespace)
        if page != README:
            shown = re.findall(r"^ *# > (.*)$", block[1], re.MULTILINE)
            assert [line.rstrip() for line in printed.getvalue().splitlines()] == shown
    for command, _ in commands(page):
        if command.startswith(FOLLOWS.get(name_of(page), "no command")):
            result = CliRunner().invoke(
                app, [*shlex.split(command)[1:], "--repeats", "1", "--rows", "2"]
            )
            assert result.exit_code == 0 and "× plain" in result.output, result.output
