"""How the package reads: local names that hold something, docstrings that begin with a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxspec

PACKAGE = Path(jaxspec.__file__).parent
VAGUE = {"found", "made", "own", "one", "some", "each", "given", "taken", "about", "known"}
VAGUE |= {"here", "there", "asked", "whole"}
NO_SENTENCE = re.compile(r"(Of|That|As|Those|All|What|Which|How|Whether|Where|When|Raises:?)\b")


def local_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the names that a file binds, with their lines: assignments, loop variables, arguments.

    Fields of classes are left out, since those of files (`about` of a manifest) have to stay as they are.
    """
    fields = {
        id(statement.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the docstrings of a file, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text, node.body[0].lineno


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("found = 1", ["found"]),
        ("for one in rows: pass", ["one"]),
        ("def f(given): pass", ["given"]),
        ("plan = [some for some in rows]", ["plan", "some"]),
        ("x.found = 1", []),
        ("class Manifest:\n    about: dict", []),
    ],
)
def test_bindings_are_seen(source: str, names: list[str]):
    assert [name for name, _ in local_names(ast.parse(source))] == names


def test_local_names_say_what_they_hold():
    vague = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name, line in local_names(ast.parse(file.read_text(encoding="utf-8")))
        if name in VAGUE
    ]
    assert vague == [], "use the noun of the thing: plan, draft, rows, options, cost"


def test_docstrings_begin_with_a_sentence():
    inverted = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {text.splitlines()[0]}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for text, line in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if NO_SENTENCE.match(text)
    ]
    assert inverted == [], "begin with a verb and an object; a type or a property may be a noun phrase"
