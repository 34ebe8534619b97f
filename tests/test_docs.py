"""The pages: their commands exist, their tables are tables, and they build without a warning."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import jax
import pytest
import safetensors
import typer
import typer.main
from typer.testing import CliRunner

import jaxspec
from jaxspec.analysis import roofline
from jaxspec.cli.main import app
from jaxspec.cli.main import command as command_of
from jaxspec.nets import encoder_decoder, t5
from jaxspec.sampling.params import SamplingOptions
from jaxspec.training import recipes
from jaxspec.weights import orbax
from jaxspec.weights.loading import shipped

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))] if README.is_file() else []
MINUTES = re.compile(r"\b([\d.]+) minutes")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = typer.main.get_command(app)
CHEAP = "jaxspec plan --alpha"  # needs no model: run, and compared with what the page shows

if not PAGES:
    pytest.skip("not in a checkout", allow_module_level=True)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> Iterator[tuple[str, str | None]]:
    """The jaxspec commands of a page, and what a console block shows after them (None: somewhere in
    the text).
    """
    text = page.read_text("utf-8")
    for block in re.findall(r"```(?:console|sh)\n(.*?)```", text, re.DOTALL):
        for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
            first, _, output = part.removeprefix("$ ").partition("\n")
            for command in first.split(" && "):
                yield command, output
    for command in re.findall(
        r"`(jaxspec\s[^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        yield " ".join(command.split()), None


COMMANDS = [  # of all pages: which page, the command, and what it shows
    (name_of(page), command, output)
    for page in PAGES
    for command, output in commands(page)
    if command.startswith("jaxspec ")
]
CHECKED = [
    (page, command, output)
    for page, command, output in COMMANDS
    if output and command.startswith(CHEAP)
]


def what_is_wrong(command: str, output: str | None) -> str | None:
    """Says what is wrong with a command line, or returns None. Nothing is run."""
    _, name, *arguments = shlex.split(command)
    if name not in COMMAND.commands:
        return f"expected one of {', '.join(COMMAND.commands)}"
    click_command = command_of(name)
    options = {
        option
        for parameter in click_command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = {argument.partition("=")[0] for argument in arguments if re.match(r"--?[a-z]", argument)}
    unknown = used - options - {"-h", "--help"}
    if unknown:
        return f"{', '.join(sorted(unknown))}: no such option"
    if output is not None:
        try:
            click_command.make_context(name, arguments)  # reads every value
        except typer.BadParameter as error:
            return error.format_message()
    return None


def test_wrong_commands_are_seen():
    assert what_is_wrong("jaxspec genrate", None).startswith("expected one of generate, ")
    assert what_is_wrong("jaxspec generate --gama 3", None) == "--gama: no such option"
    assert "valid integer" in what_is_wrong("jaxspec generate --gamma x", "")
    assert what_is_wrong("jaxspec generate --gamma 3 -n 5", "") is None


def test_commands_of_pages_exist():
    wrong = {(page, command): what_is_wrong(command, output) for page, command, output in COMMANDS}
    assert {at: complaint for at, complaint in wrong.items() if complaint} == {}


@pytest.mark.parametrize(("page", "command", "output"), CHECKED)
def test_command_prints_what_the_page_shows(page: str, command: str, output: str, tmp_path: Path):
    result = CliRunner().invoke(
        app, shlex.split(command)[1:], env={"COLUMNS": "100", "XDG_CACHE_HOME": str(tmp_path)}
    )
    assert result.exit_code == 0
    printed = [line.rstrip() for line in result.output.strip().splitlines()]
    assert printed == [line.rstrip() for line in output.strip().splitlines()], page


def test_every_command_is_on_a_page():
    named = {command.split()[1] for _, command, _ in COMMANDS}
    assert set(COMMAND.commands) <= named


def public_modules(package: ModuleType) -> Iterator[ModuleType]:
    """Return the modules to import from, where a package that lists its names stands for its
    modules.
    """
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name == "jaxspec.cli":
            continue  # commands: --help says what they do
        module = importlib.import_module(info.name)
        if hasattr(module, "__all__") or not info.ispkg:
            yield module
        if info.ispkg and not hasattr(module, "__all__"):
            yield from public_modules(module)


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return [
            name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)
        ]
    defined = {
        name: x
        for name, x in vars(module).items()
        if getattr(x, "__module__", None) == module.__name__
    }
    return [
        name
        for name, x in defined.items()
        if not name.startswith("_") and not isinstance(x, TypeVar)
    ]


def tables_of_source(text: str) -> list[int]:
    """Return the number of rows of each table: after each line |---|, the lines that begin with
    |.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        len(rows.splitlines())
        for rows in re.findall(r"^\|[-:| ]*-[-:| ]*\|\n((?:\|.*\n?)*)", prose, re.MULTILINE)
    ]


def tables_of_html(html: str) -> list[int]:
    """Return the number of rows of each <table> below its heads."""
    return [
        body.count("<tr>")
        for body in re.findall(r"<table>.*?<tbody>(.*?)</tbody>", html, re.DOTALL)
    ]


def test_tables_of_pages_are_tables():
    """A line without its last bar, or a table without a blank line before it, is read as a
    paragraph.
    """
    markdown = pytest.importorskip("markdown", reason='pip install -e ".[docs]" brings it')
    rows_read, rows_written = {}, {}
    for page in [*PAGES, *sorted(ROOT.glob("[!.]*/README.md"))]:
        text = page.read_text("utf-8")
        rows_written[name_of(page)] = tables_of_source(text)
        html = markdown.markdown(text, extensions=["tables", "fenced_code"])
        rows_read[name_of(page)] = tables_of_html(html)
    assert sum(map(len, rows_written.values())) > 100 and rows_read == rows_written


def parameters_of(name: str) -> int | None:
    """Return the number of parameters of a shipped model or drafter, as its files say; None for any
    other.
    """
    if name in shipped():
        return orbax.read_manifest(shipped()[name]).parameters
    tensors = ROOT / "checkpoints" / name / "model.safetensors"
    if not tensors.is_file():
        return None
    with safetensors.safe_open(tensors, "np") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    "page", [ROOT / "models" / "README.md", ROOT / "checkpoints" / "README.md"], ids=name_of
)
def test_tables_of_models_say_what_manifests_and_recipes_say(page: Path):
    checked = set()
    for table in re.findall(r"(?:^\|.*\n)+", page.read_text("utf-8"), re.MULTILINE):
        heads, _, *rows = [
            [cell.strip() for cell in line.strip("|\n ").split("|")] for line in table.splitlines()
        ]
        for cells in rows if "parameters" in heads else ():
            row = dict(zip(heads, cells, strict=True))
            names = re.findall(r"`([\w-]+)`", cells[0])
            for name, cell in zip(
                names, re.sub(r"\(.*?\)", "", row["parameters"]).split(", "), strict=True
            ):
                if (number := parameters_of(name)) is not None:
                    assert cell.strip() in (f"{number:,}", f"{number / 1e6:.1f}M"), name
                    checked.add(name)
            for name in names:
                header = (
                    (ROOT / "models" / f"{name}.toml").read_text("utf-8").partition("\nname = ")[0]
                )
                times = {
                    time
                    for head in heads
                    if head.startswith("trained")
                    for time in MINUTES.findall(row[head])
                }
                assert times <= set(MINUTES.findall(header)), name
                if re.match(r"\d", loss := row.get("held-out loss", "")):
                    assert (
                        loss == f"{orbax.read_manifest(shipped()[name]).about['heldout_loss']:.2f}"
                    ), name
    assert {"debian-t5-large", "debian-t5-draft", "debian-gpt-eagle"} <= checked


def test_parameters_in_the_text_of_pages_are_the_manifests():
    checked = set()
    for page in [*PAGES, *sorted((ROOT / "colab").glob("*.ipynb"))]:
        text = page.read_text("utf-8")
        named = re.findall(r"(debian-[\w-]+)[`\")]+ +[(#] ?([\d.]+)M", text)
        for name, number in named + re.findall(
            r"(debian-[\w-]+): ([\d.]+) million parameters", text
        ):
            assert number == f"{(parameters_of(name) or 0) / 1e6:.1f}", f"{name_of(page)}: {name}"
            checked.add((page.suffix, name))
    assert {(".md", "debian-t5-large"), (".md", "debian-t5-draft")} <= checked


def test_pages_agree_on_what_the_default_drafter_has_of_its_target():
    manifest = orbax.read_manifest(shipped()["debian-t5-draft"])
    parts = jax.eval_shape(lambda: t5.init(manifest.model, jax.random.key(0)))
    theirs = sum(x.size for x in jax.tree.leaves(encoder_decoder.encoder_params(parts)))
    extra = manifest.parameters - theirs
    for page, words in {
        "README.md": f"{extra / 1e6:.0f}M of its own",
        "checkpoints/README.md": f"({extra:,} its own)",
        "docs/index.md": f"{theirs / 1e6:.1f}M of them the target's",
        "docs/models.md": f"the encoder and the embedding, {theirs / 1e6:.1f}M, are its target's",
        "models/debian-t5-draft.toml": f"{extra / 1e6:.1f}M parameters",
    }.items():
        assert words in " ".join((ROOT / page).read_text("utf-8").split()), page


def test_reference_lists_every_module_with_public_names():
    """The built pages are asked for every name; a module without a line is known without building
    them.
    """
    pages = "".join(page.read_text("utf-8") for page in sorted((DOCS / "reference").rglob("*.md")))
    listed = re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE)
    missing = [
        module.__name__
        for module in public_modules(jaxspec)
        if public_names(module)
        and not any(f"{line}.".startswith(f"{module.__name__}.") for line in listed)
    ]
    assert not missing, "give each a line in docs/reference: `::: jaxspec.module`"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built."""
    for needed in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(needed, reason='pip install -e ".[docs]" brings it')
    folder = tmp_path_factory.mktemp("site")
    command = (
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "--site-dir",
        str(folder),
    )
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


@pytest.mark.slow
def test_tables_are_tables_in_the_built_site(site: Path):
    for page in sorted(DOCS.rglob("*.md")):
        if expected := tables_of_source(page.read_text("utf-8")):
            folder = page.relative_to(DOCS).with_suffix("")
            html = (
                site / (folder if folder.name != "index" else folder.parent) / "index.html"
            ).read_text("utf-8")
            assert tables_of_html(html) == expected, name_of(page)


PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const wider = x => x.scrollWidth > x.clientWidth + 1, scrolls = x => getComputedStyle(x).overflowX == "auto"
  const cut = [...document.querySelectorAll(".md-content pre > code")].filter(wider)
  const tables = [...document.querySelectorAll(".md-typeset__scrollwrap")]
  cut.push(...tables.filter(x => wider(x) && !scrolls(x)))
  document.body.dataset.seen = `${cut.length} of ${tables.length}, ${tables.filter(wider).length} scroll`
}, 500))</script></body>"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "scrolling"), [("results", 0), ("rules", 0), ("choosing", 0), ("pairs", 0)]
)
def test_wide_tables_and_code_are_not_cut(
    page: str, scrolling: int, site: Path, chromium_command: list[str]
):
    """In a window of 1,300 pixels code is wrapped and tables fit; those of some twenty columns
    scroll.
    """
    source = site / page / "index.html"
    probed = source.with_name("probed.html")
    probed.write_text(source.read_text("utf-8").replace("</body>", PROBE), "utf-8")
    command = [
        *chromium_command,
        "--headless",
        "--window-size=1300,900",
        "--virtual-time-budget=4000",
        "--dump-dom",
    ]
    dom = subprocess.run(
        [*command, probed.as_uri()], capture_output=True, text=True, timeout=60
    ).stdout
    seen = re.search(r'data-seen="(\d+) of (\d+), (\d+) scroll"', dom)
    assert seen is not None and int(seen[1]) == 0 < int(seen[2]) and int(seen[3]) <= scrolling


@pytest.mark.slow
def test_pages_build_with_every_public_name(site: Path):
    loaded = re.findall(
        r'<(?:(?:script|img)[^>]* src|link[^>]* href)="([^"]*)',
        (site / "index.html").read_text("utf-8"),
    )
    assert loaded and not [address for address in loaded if "//" in address], (
        "a reader's browser should fetch nothing"
    )

    reference = [page.read_text("utf-8") for page in (site / "reference").rglob("*.html")]
    assert reference and not [page for page in reference if "<blockquote>" in page], (
        "an example that is no code"
    )

    # what other projects' pages link with
    raw = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = [line.split() for line in zlib.decompress(raw).decode().splitlines()]
    listed = {name for name, kind, *_ in entries if kind != "py:module"}
    missing = [
        f"{module.__name__}.{name}"
        for module in (jaxspec, *public_modules(jaxspec))
        for name in public_names(module)
        if not any(
            re.fullmatch(rf"{re.escape(module.__name__)}(\.\w+)*\.{name}", entry)
            for entry in listed
        )
    ]
    assert not missing, (
        "give them a docstring, and their module a line in docs/reference/: `::: jaxspec.module`"
    )


PAPERS = DOCS / "papers.md"
STATES = ("works", "partly", "not run here", "differs", "[differs]")
# Rows of the audit of each document: the page merges no more than rows that say the same.
LEAST_ROWS = (45, 41, 19, 16, 12, 16)


def rows_of_papers() -> list[list[list[str]]]:
    """Returns the cells of each table: what a document has, where it is, its state, the evidence."""
    return [
        [
            [cell.strip() for cell in line.strip("|\n").split(" | ")]
            for line in section.splitlines()
            if line.startswith("| ")
        ][1:]
        for section in PAPERS.read_text("utf-8").split("\n## ")[1:]
    ]


def test_what_the_papers_have_is_where_the_page_says():
    """Names are found below `jaxspec` or `jaxspec.analysis`; commands, options and tests exist."""
    tables = rows_of_papers()
    assert [len(table) >= least for table, least in zip(tables, LEAST_ROWS, strict=True)] == (
        [True] * len(LEAST_ROWS)
    )
    rows = [row for table in tables for row in table]
    assert {len(row) for row in rows} == {4}
    assert not [row for row in rows if not row[2].startswith(STATES)]
    assert not [row for row in rows if not re.search(r"`[^`]+`|\]\(", row[3])], "no evidence"
    missing = [
        name
        for _, here, _, evidence in rows
        for name in re.findall(r"`([^`]+)`", f"{here} {evidence}")
        if not is_there(name)
    ]
    assert not missing
    loose = [name for row in rows for name in re.findall(r"`([^`]+)`", row[3]) if not proves(name)]
    assert not loose, "evidence is a test, a command, or a link to a page"


def test_names_that_are_not_there_are_seen():
    assert is_there("tests/test_docs.py::test_names_that_are_not_there_are_seen")
    assert not is_there("tests/test_docs.py::test_names_that_are_there")
    assert not is_there("tests/test_dogs.py")
    assert is_there("jaxspec generate --trace") and not is_there("jaxspec generate --trade")
    assert is_there("--trace") and not is_there("--trade")
    assert is_there("python -m benchmarks.calm --target x")
    assert not is_there("python -m benchmarks.calm --aim x")
    assert not is_there("python -m benchmarks.balm")
    assert is_there("rules.rejection") and not is_there("rules.ejection")


def proves(name: str) -> bool:
    """Says whether a name in code is that of a test or a command."""
    return name.startswith(("tests/", "jaxspec ", "python -m "))


def is_there(name: str) -> bool:
    """Says whether a name in code on the page is a test, a command, a folder, an option or a name
    of the package.
    """
    first, *others = name.split()
    if first == "jaxspec":
        return what_is_wrong(name, None) is None
    if first == "python":
        return script_takes(others[1], others[2:])
    if first.startswith("--"):
        return first in OPTIONS
    if "/" in first:
        return path_exists(first)
    if "." not in first:
        options = {
            *inspect.signature(jaxspec.generate).parameters,
            *SamplingOptions.__annotations__,
        }
        return first in options or first in {
            "copy_from",
            "after",
            *MODULES,
            *shipped(),
            *recipes.shipped(),
            *roofline.published_shapes(),
        }
    roots = (jaxspec, jaxspec.analysis, jax)
    parts = first.removeprefix("jaxspec.").removeprefix("jax.").split(".")
    return first in MODULES or any(resolves(root, parts) for root in roots)


OPTIONS = {  # of all commands
    option
    for name in COMMAND.commands
    for parameter in command_of(name).params
    for option in (*parameter.opts, *parameter.secondary_opts)
}
MODULES = {
    info.name.removeprefix("jaxspec.")
    for info in pkgutil.walk_packages(jaxspec.__path__, "jaxspec.")
    if not info.name.startswith("jaxspec.cli")
}


def script_takes(module: str, arguments: list[str]) -> bool:
    """Says whether a script exists, and whether its source or a command of jaxspec has its
    options.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    source = Path(spec.origin).read_text("utf-8")
    options = [argument for argument in arguments if argument.startswith("--")]
    return all(f'"{option}"' in source or option in OPTIONS for option in options)


def path_exists(name: str) -> bool:
    """Says whether a path, and a test function after `::`, are in the repository."""
    path, _, function = name.partition("::")
    if not function:
        return (ROOT / path).exists()
    file = ROOT / path
    return file.is_file() and f"\ndef {function}(" in file.read_text("utf-8")


def resolves(value: object, parts: list[str]) -> bool:
    for part in parts[:-1]:
        value = getattr(value, part, None)
    return hasattr(value, parts[-1]) or parts[-1] in getattr(value, "__annotations__", {})
