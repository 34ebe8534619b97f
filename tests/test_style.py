"""How the code reads: local names that hold something, docstrings that begin with a sentence, names
that exist.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jaxspec
from benchmarks.code_census import VAGUE, Density, densities, density

PACKAGE = Path(jaxspec.__file__).parent
ALLOWED = {
    "analysis/bench.py": {"part"},
    "analysis/cost.py": {"kind", "most"},
    "analysis/formulas.py": {"most"},
    "analysis/plan.py": {"most"},
    "analysis/result.py": {"other"},
    "draft_heads/block.py": {"at"},
    "draft_heads/block_files.py": {"kind"},
    "draft_heads/dflash2.py": {"at"},
    "draft_heads/formats.py": {"kind"},
    "draft_heads/kangaroo.py": {"at"},
    "draft_heads/medusa.py": {"at"},
    "draft_heads/training.py": {"at"},
    "files/folders.py": {"kind"},
    "files/strict_tables.py": {"kind"},
    "jobs/fields.py": {"most"},
    "nets/on_cpu.py": {"most"},
    "policies/entropy.py": {"most"},
    "structured/byte_dfa.py": {"most"},
    "structured/schemas.py": {"most"},
    "testing/model_check.py": {"rest"},
    "training/head_loss.py": {"part"},
    "weights/parameters.py": {"most"},
    "weights/tokenizers.py": {"kind"},
}  # outside nets, arguments of public functions; of testing/model_check, a property
NO_SENTENCE = re.compile(
    r"(?:(?:Of|That|As|Those|All|What|Which|How|Whether|Where|When)\b|Raises:)"
)


def local_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the names that a file binds, with their lines: assignments, loop variables, arguments.

    Fields of classes are left out, since those of files (`about` of a manifest) have to stay as
    they are.
    """
    fields = {
        id(statement.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Store)
            and id(node) not in fields
        ):
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


def refused(file: Path) -> set[str]:
    """The local names that a file of the package must not have."""
    path = file.relative_to(PACKAGE)
    return VAGUE - ALLOWED.get(path.as_posix(), set())


def test_local_names_say_what_they_hold():
    vague = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for name, line in local_names(ast.parse(file.read_text(encoding="utf-8")))
        if name in refused(file)
    ]
    assert vague == [], "use the noun of the thing: plan, draft, rows, options, cost"


def test_docstrings_begin_with_a_sentence():
    inverted = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {text.splitlines()[0]}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for text, line in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if NO_SENTENCE.match(text)
    ]
    assert inverted == [], (
        "begin with a verb and an object; a type or a property may be a noun phrase"
    )


NO_NOUN = re.compile(r"([\w*][\w*, ]*): (of|that|those|what|whose|which|as|see)\b")


def entries(text: str) -> Iterator[str]:
    """Yields the first lines of the entries of a docstring's Args and Attributes."""
    section = re.compile(r"^ *(?:Args|Attributes):\n((?:(?: {4}.*)\n?)+)", re.MULTILINE)
    for block in section.findall(text):
        yield from (line.strip() for line in block.splitlines() if re.match(r" {4}\S", line))


def test_entries_of_docstrings_are_seen():
    text = (
        "Adds.\n\nArgs:\n    x, y: of a row\n        or two.\n    z: the other.\n\nReturns:\n    "
        "of both: none.\n"
    )
    assert list(entries(text)) == ["x, y: of a row", "z: the other."]
    assert [bool(NO_NOUN.match(entry)) for entry in entries(text)] == [True, False]


def test_entries_of_docstrings_are_noun_phrases():
    inverted = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {entry}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for text, line in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        for entry in entries(text)
        if NO_NOUN.match(entry)
    ]
    assert inverted == [], "begin with a noun: `limit: the limit of rounds`"


def undocumented(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yields entries of functions' Args that are not parameters: function, entry, line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not ast.get_docstring(node):
            continue
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters += [x for x in (arguments.vararg, arguments.kwarg) if x is not None]
        section = re.search(r"Args:\n((?: {4}.*\n?|\n)*)", ast.get_docstring(node) or "")
        for line in section[1].splitlines() if section else ():
            entry = re.match(r" {4}([\w*][\w*, ]*):", line)
            for name in entry[1].split(",") if entry else ():
                if name.strip().lstrip("*") not in {x.arg for x in parameters}:
                    yield node.name, name.strip(), node.lineno


def test_entries_that_are_not_parameters_are_seen():
    source = 'def f(x, **more):\n    """Adds.\n\n    Args:\n        x, at: a row.\n        **more: options.\n    """\n'
    assert [entry for _, entry, _ in undocumented(ast.parse(source))] == ["at"]


def test_documented_arguments_exist():
    renamed = [
        f"{file.relative_to(PACKAGE.parent)}:{line}: {function} has no argument {entry}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for function, entry, line in undocumented(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert renamed == []


def test_comments_on_fields_are_noun_phrases():
    """`length: Int[Array, "B"]  # tokens of each row`, not `# of each row`."""
    inverted = re.compile(r"\s+\w+: [^#]*# (of|that|those|as) ")
    lines = [
        f"{file.relative_to(PACKAGE.parent)}:{number}: {line.strip()}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if inverted.match(line)
    ]
    assert lines == [], "begin with a noun: `# tokens of each row`"


def types(file: Path) -> Iterator[str]:
    """Yields the public types that a file defines: classes, and aliases such as `Rows =
    Float[Array, "B T V"]`.

    Those of `cli` are options of commands, and are read as `options.Prompts`.
    """
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if (
                name[0].isupper()
                and not name.isupper()
                and file.relative_to(PACKAGE).parts[0] != "cli"
            ):
                yield name


def test_a_type_s_name_means_one_type():
    """A name that two modules define would have to be read with its module; private ones may
    repeat.
    """
    homes = dict[str, list[str]]()
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in types(file):
            homes.setdefault(name, []).append(str(file.relative_to(PACKAGE)))
    # of `nets.quantised` (any mapping) and of `weights.quantised_files` (a file's)
    del homes["Quantised"]
    assert {name: files for name, files in homes.items() if files[1:]} == {}, (
        "rename the one that fewer people see"
    )


DENSE = ("core", "decode", "drafters", "draft_heads", "nets", "rules", "weights")
COMMENTS = 3  # whole-line comments per 100 lines of code in each of these: they say why, not what


def code_and_comments(source: str) -> tuple[int, int]:
    """Counts lines of code and whole-line comments; docstrings, blank lines and `# --- titles` are
    neither.
    """
    text = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = [
        x.strip()
        for number, x in enumerate(source.splitlines(), 1)
        if number not in text and x.strip()
    ]
    comments = [line for line in lines if line.startswith("#")]
    return len(lines) - len(comments), sum(not line.startswith("# ---") for line in comments)


def test_comments_are_told_from_code_and_docstrings():
    source = (
        '"""Adds.\n\n# no comment\n"""\n\n# --- a title\n\n# why\ndef f(x):\n    return x  # '
        "beside\n"
    )
    assert code_and_comments(source) == (2, 1)


@pytest.mark.parametrize("package", DENSE)
def test_dense_code_says_why(package: str):
    counts = [
        code_and_comments(file.read_text(encoding="utf-8"))
        for file in (PACKAGE / package).rglob("*.py")
    ]
    code, comments = map(sum, zip(*counts, strict=True))
    assert 100 * comments >= COMMENTS * code, (
        f"{comments} comments in {code} lines: add shapes, invariants, reasons"
    )


# How densely the package may be written. Whoever writes it plainer lowers these numbers; nobody
# raises them.
MOST_TOKENS_A_LINE = 9.5
MOST_PER_THOUSAND = {"conditionals": 1.6, "tuple_assignments": 0.2, "walruses": 0.1}
MOST_UNPACKED_TUPLES = 0


def test_dense_forms_are_counted():
    source = "a, b = 1, 2\nf(*(a, b))\nif (c := a) > b:\n    d = a if b else c\n"
    assert density(source) == Density(4, 32, 1, 1, 1, 1)


def test_the_package_is_not_written_more_densely():
    counts = sum(densities(PACKAGE).values(), Density())
    assert counts.tokens <= MOST_TOKENS_A_LINE * counts.code_lines, (
        "write one thing a statement, one statement a line"
    )
    rates = {name: counts.per_thousand(getattr(counts, name)) for name in MOST_PER_THOUSAND}
    over = {name: rate for name, rate in rates.items() if rate > MOST_PER_THOUSAND[name]}
    assert over == {}, "write an `if`, or two statements"
    assert counts.unpacked_tuples <= MOST_UNPACKED_TUPLES, "name the arguments"


CHECKOUT = Path(__file__).parent.parent
OURS = ("jaxspec", "benchmarks", "data_prep", "models")


def module(name: str) -> ModuleType | None:
    """Imports one of our modules; None if there is none of that name, or if a library that it needs
    is missing.
    """
    try:
        return importlib.import_module(name) if importlib.util.find_spec(name) else None
    except ImportError:
        return None


def missing_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the names of our modules that a file uses and that do not exist, with their lines."""
    modules = dict[str, ModuleType]()
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.ImportFrom)
            or (node.module or "").split(".")[0] not in OURS
            or node.level
        ):
            continue
        parent = module(node.module)
        for alias in node.names if parent else ():
            inner = getattr(parent, alias.name, None) or module(f"{node.module}.{alias.name}")
            if inner is None and not hasattr(parent, alias.name):
                yield f"{node.module}.{alias.name}", node.lineno
            elif isinstance(inner, ModuleType):
                modules[alias.asname or alias.name] = inner
    rebound = {name for name, _ in local_names(tree)}
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.Attribute)
            or not isinstance(node.value, ast.Name)
            or node.value.id in rebound
        ):
            continue
        if (owner := modules.get(node.value.id)) and not hasattr(owner, node.attr):
            yield f"{owner.__name__}.{node.attr}", node.lineno


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from jaxspec.core import noise\nnoise.at", []),
        ("from jaxspec.core import noise\nnoise.nothing = 1", ["jaxspec.core.noise.nothing"]),
        ("def f():\n    from jaxspec import nothing", ["jaxspec.nothing"]),
        ("from jaxspec.core import noise\nnoise = 1\nnoise.real", []),
    ],
)
def test_missing_names_are_seen(source: str, names: list[str]):
    assert [name for name, _ in missing_names(ast.parse(source))] == names


def test_names_of_our_modules_exist():
    """Slow tests, benchmarks and scripts use names that are moved; each file that does is found
    without running it.
    """
    missing = [
        f"{file.relative_to(CHECKOUT)}:{line}: {name}"
        for folder in (*OURS, "tests")
        for file in sorted((CHECKOUT / folder).rglob("*.py"))
        for name, line in missing_names(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert missing == []


def test_a_round_reads_as_the_papers_algorithm():
    """`step` of `decode.speculative` names few types and calls few functions; JAX's own are not
    counted.
    """
    source = (PACKAGE / "decode" / "speculative.py").read_text(encoding="utf-8")
    (step,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "step"
    )
    names = {node.id for node in ast.walk(step) if isinstance(node, ast.Name)}
    calls = {ast.unparse(node.func) for node in ast.walk(step) if isinstance(node, ast.Call)}
    types = {name for name in names if name[0].isupper()}
    helpers = {
        call
        for call in calls
        if not call.startswith(("jax.", "jnp.")) and not call.endswith("._replace")
    }
    assert len(types) <= 8 and len(helpers - types) <= 10, (types, helpers)
