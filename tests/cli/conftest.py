"""`jaxspec generate` on table models, and what is printed as text, for the tests of several files."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxspec.cli.main import app

SMALL = ("-n", "12", "-g", "3", "--count", "2")  # few shapes: every test shares the same few programs


@pytest.fixture
def invoke(loading):
    """Runs `jaxspec generate` on the zoo, on small shapes."""

    def invoke(*arguments, **options):
        return CliRunner().invoke(app, ["generate", *SMALL, *arguments], **{"env": {"COLUMNS": "160"}, **options})

    return invoke


@pytest.fixture
def run(invoke):
    """Returns what a command that succeeds prints."""

    def run(*arguments, **options):
        result = invoke(*arguments, **options)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def report(run):
    """Reads what a command that succeeds reports as JSON."""
    return lambda *arguments, **options: json.loads(run(*arguments, "--json", **options))


@pytest.fixture
def shown():
    """Renders as text."""

    def shown(renderable, width=100):
        console = Console(file=io.StringIO(), width=width, highlight=False)
        console.print(renderable)
        return console.file.getvalue()

    return shown
