"""The wheel's content, and the table of which package may import which."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(jaxspec.__file__).parent  # the installed one, where the tests run against a wheel
SHIPPED = (
    *(f"debian-t5-{size}" for size in ("large", "draft", "base", "small")),
    "debian-gpt-base",
    "debian-gpt-small",
)
WHEEL_LIMIT = 42e6  # bytes of the checkpoints in the wheel
CHECKPOINT_LIMIT = 48e6  # bytes, of all shipped weights together

TYPES = (
    "language_model",
    "distribution",
    "processor",
    "draft",
    "rule",
    "drafter",
    "policy",
    "decoder",
)  # of core
CORE = {"core", "sampling", "structured"}
DECODING = CORE | {"rules", "drafters", "policies", "decode", "trace"}
MODELS = {"nets", "weights", "vocab", "draft_heads"}
# package: what it may import besides itself. A new one needs a row here, and DESIGN a reason.
IMPORTS = {
    "core": set(),
    "interrupts": set(),
    "optional_imports": set(),
    "progress": set(),
    "trace": set(),
    "structured": {"core", "progress"},
    "sampling": {"core", "structured"},
    "sharding": CORE,
    "rules": CORE,
    "policies": {"core"},
    "files": {"core"},
    # one may be a speculative decoder itself
    "drafters": CORE | {"rules", "files", "optional_imports"},
    "speculative_execution": CORE | {"rules"},
    "decode": CORE | {"rules", "drafters", "policies", "trace", "sharding"},
    "testing": DECODING | {"speculative_execution", "optional_imports"},
    # n-gram tables are a family; a network says how it is split
    "nets": CORE | {"drafters", "sharding", "files"},
    "vocab": CORE | {"nets"},  # the head of a network of ours is trimmed
    "weights": CORE | {"nets", "vocab", "sharding", "drafters", "files", "optional_imports"},
    # sound to text: features, and decoding in windows
    "audio": CORE | {"decode", "nets", "files", "optional_imports"},
    "draft_heads": DECODING | {"nets", "vocab", "weights", "sharding", "files"},
    "training": DECODING
    | MODELS
    | {"sharding", "files", "progress", "front door", "optional_imports"},
    "front door": DECODING
    | MODELS
    | {"audio", "jobs", "speculative_execution", "sharding", "testing"},  # see `FRONT_DOORS`
    "jobs": DECODING | {"files", "sharding", "vocab"},  # a prompt may choose its languages
    "ray": {"core", "jobs"},
    "integrations": DECODING | {"nets", "training"},
    "analysis": DECODING | MODELS | {"sharding", "files", "testing", "progress", "front door"},
    "cli": DECODING
    | MODELS
    | {
        "audio",
        "jobs",
        "sharding",
        "testing",
        "training",
        "analysis",
        "front door",
        "files",
        "progress",
        "interrupts",
    },
    "__main__": {"cli"},
}
# hand on names of any package, when they are asked for
FRONT_DOORS = ("__init__.py", "drafters/__init__.py")
NEEDS_NO_FLAX = (
    *(
        "core",
        "sampling",
        "structured",
        "rules",
        "drafters",
        "policies",
        "decode",
        "sharding",
        "speculative_execution",
    ),
    *("files", "optional_imports", "progress", "vocab.remap", "vocab.cross_tokenizer"),
)


def package_of(path: Path) -> str:
    """The package or module at the top that a file belongs to: decode/loop.py -> decode, cache.py
    -> cache.
    """
    path = path.relative_to(PACKAGE)
    return "front door" if path.as_posix() in FRONT_DOORS else path.parts[0].removesuffix(".py")


def imported_packages(source: str) -> set[str]:
    """The packages that a file imports, at its top or inside functions."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports here are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] == "jaxspec":
                packages.add(parts[1] if parts[1:] and parts[1] in IMPORTS else "front door")
    return packages


@pytest.mark.parametrize(
    ("line", "packages"),
    [
        ("from jaxspec.core import kv_cache as kv", {"core"}),
        ("from jaxspec.decode.loop import run", {"decode"}),
        ("import jaxspec.nets.t5, jax", {"nets"}),
        ("from jaxspec import load", {"front door"}),
        ("import jaxspec", {"front door"}),
        ("def f():\n    from jaxspec import rules, sharding", {"rules", "sharding"}),
        ("from jaxspeculative import core", set()),
    ],
)
def test_imports_are_found_wherever_they_are(line: str, packages: set[str]):
    assert imported_packages(line) == packages


def test_packages_import_only_what_lies_below_them():
    files = sorted(PACKAGE.rglob("*.py"))
    assert {package_of(file) for file in files} <= set(IMPORTS), (
        "a package without a row in IMPORTS"
    )
    upwards = {}
    for file in files:
        package = package_of(file)
        # Each package finds its modules by `optional_imports.submodules`, which imports nothing of
        # jaxspec.
        allowed = IMPORTS[package] | {package, "optional_imports"}
        wrong = imported_packages(file.read_text(encoding="utf-8")) - allowed
        if wrong:
            upwards[str(file.relative_to(PACKAGE))] = sorted(wrong)
    assert upwards == {}


def modules_imported(file: Path, modules: set[str]) -> set[str]:
    """The package's modules that a file imports, at its top, inside functions or for types
    alone.
    """
    imported = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in modules else str(node.module) for name in names}
    return imported & modules


def test_no_files_import_each_other_in_a_circle():
    """Folders' own files are left out: what they hand on may import its neighbours."""
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py"
    }
    below = {name: modules_imported(file, set(files)) for name, file in files.items()}
    while ready := {name for name, imported in below.items() if not imported & set(below)}:
        below = {name: imported for name, imported in below.items() if name not in ready}
    assert below == {}


def test_hints_name_extras_that_a_checkout_has():
    named = set()
    homes = (PACKAGE, ROOT / "benchmarks", ROOT / "data_prep")
    for file in [file for home in homes for file in home.rglob("*.py")]:
        source = file.read_text(encoding="utf-8")
        assert "jaxspec-decoding[" not in source, (
            f"{file.name}: that name is not on the package index"
        )
        named |= set(re.findall(r'pip install "\.\[(\w+)\]"', source))
        named |= set(re.findall(r'optional_imports\.missing\(.*, "(\w+)"\)', source))
    extras = importlib.metadata.metadata("jaxspec-decoding").get_all("Provides-Extra") or []
    assert {"datastore", "figures", "gguf", "train"} <= named <= set(extras)


def test_types_have_one_address():
    types = re.compile(rf"jaxspec\.core\.({'|'.join(TYPES)})\b")
    elsewhere = [file for file in sorted(PACKAGE.rglob("*.py")) if package_of(file) != "core"]
    assert [file.name for file in elsewhere if types.search(file.read_text(encoding="utf-8"))] == []
    defined = set()
    for file in (PACKAGE / "core" / f"{name}.py" for name in TYPES):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
                defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.ClassDef):
                defined.add(node.name)
    assert defined == set(jaxspec.core.__all__)


def test_the_table_of_imports_has_no_cycle():
    done: set[str] = set()
    while done < set(IMPORTS):
        ready = {name for name, below in IMPORTS.items() if below <= done} - done
        assert ready, f"a cycle among {sorted(set(IMPORTS) - done)}"
        done |= ready


@pytest.mark.slow
def test_decoding_core_imports_no_flax(tmp_path: Path):
    paths = [
        file.relative_to(PACKAGE.parent).with_suffix("") for file in sorted(PACKAGE.rglob("*.py"))
    ]
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    homes = {f"jaxspec.{name}" for name in NEEDS_NO_FLAX}
    assert homes <= modules
    names = {name for name in modules if any(f"{name}.".startswith(f"{home}.") for home in homes)}
    names |= {"jaxspec", "jaxspec.drafters"}
    script = f"import sys, {', '.join(sorted(names))}; print('flax' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", script]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == ["False"], run.stderr


IMPORT_EACH = """
import importlib, sys
import jax, flax.linen, optax, orbax.checkpoint, transformers  # once: they take seconds
for name in sys.argv[1:]:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == "jaxspec"]:
        del sys.modules[loaded]
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    files = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    names = sorted(
        {
            ".".join(path.parts).removesuffix(".__init__")
            for path in files
            if path.name != "__main__"
        }
    )
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *names], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0 and not run.stderr, run.stderr  # nothing is logged, either


def test_examples_that_are_slow_exist(slow_examples):
    for name in sorted(slow_examples):
        module, _, function = f"jaxspec.{name}".rpartition(".")
        assert ">>>" in getattr(importlib.import_module(module), function).__doc__, name


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 100


def test_weights_stay_small():
    size = sum(file.stat().st_size for file in (ROOT / "checkpoints").rglob("*") if file.is_file())
    assert size <= CHECKPOINT_LIMIT


def test_weights_in_the_wheel_stay_small():
    files = [
        file
        for name in SHIPPED
        for file in (ROOT / "checkpoints" / name).rglob("*")
        if file.is_file()
    ]
    assert sum(file.stat().st_size for file in files) <= WHEEL_LIMIT


def shipped_models_of(text: str) -> set[str]:
    """Returns the shipped models that a page loads in its Python, or names in its commands as
    targets and drafters.

    What a page's own commands make is a path.
    """
    python = "".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    commands = "".join(re.findall(r"^```(?:console|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    loaded = re.findall(
        r"""load\(\s*["'](?:checkpoints/)?(debian-[\w-]+)""", python.replace("recipes.load", "")
    )
    loaded += re.findall(r"--(?:target|draft) (?:checkpoints/)?(debian-[\w-]+)", commands)
    trained = set(re.findall(r"jaxspec train (debian-[\w-]+)", commands))
    return set(loaded) - trained


def test_pages_load_models_that_the_wheel_has():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    loaded = {page.name: shipped_models_of(page.read_text(encoding="utf-8")) for page in pages}
    assert sum(map(bool, loaded.values())) > 15, "pages that load a model are no longer found"
    assert {
        name: names - set(SHIPPED) for name, names in loaded.items() if names - set(SHIPPED)
    } == {}


def build(target: str, source: Path, out: Path) -> Path:
    """Builds the "wheel" or the "sdist" of a source tree with hatchling alone: no network
    needed.
    """
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        str(out),
    ]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory):
    absent = [name for name in SHIPPED if not (ROOT / "checkpoints" / name).is_dir()]
    if absent:
        pytest.skip(f"checkpoints/ lacks {absent}")
    with zipfile.ZipFile(build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def relative_files(folder: Path, pattern: str = "**/*") -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.glob(pattern) if file.is_file()}


@pytest.mark.slow
def test_wheel_is_the_package_and_its_metadata_only(wheel: zipfile.ZipFile):
    top = {name.split("/")[0] for name in wheel.namelist()}
    (metadata,) = top - {"jaxspec"}
    assert metadata == f"jaxspec_decoding-{jaxspec.__version__}.dist-info"
    scripts = wheel.read(f"{metadata}/entry_points.txt").decode()
    assert "jaxspec = jaxspec.cli.main:app" in scripts
    assert f"{metadata}/licenses/LICENSE" in wheel.namelist()


@pytest.mark.slow
def test_wheel_carries_what_it_needs_away_from_a_checkout(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    modules = {f"jaxspec/{file}" for file in relative_files(ROOT / "jaxspec", "**/*.py")}
    assert modules <= names
    prompts = relative_files(ROOT / "jaxspec" / "data" / "heldout")
    assert "translation.jsonl" in prompts
    assert {f"jaxspec/data/heldout/{file}" for file in prompts} <= names

    recipes = {
        name.removeprefix("jaxspec/data/recipes/") for name in names if "/data/recipes/" in name
    }
    assert recipes == relative_files(ROOT / "models", "*.toml")
    assert {f"{name}.toml" for name in SHIPPED} <= recipes

    prefix = "jaxspec/data/checkpoints/"
    assert {name.split("/")[3] for name in names if name.startswith(prefix)} == set(SHIPPED)
    for name in SHIPPED:
        files = relative_files(ROOT / "checkpoints" / name)
        assert "manifest.toml" in files and any(file.startswith("params/") for file in files)
        assert {f"{prefix}{name}/{file}" for file in files} <= names


@pytest.mark.slow
def test_wheel_of_the_sdist_is_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path):
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    with zipfile.ZipFile(build("wheel", source, tmp_path / "wheel")) as again:
        assert set(again.namelist()) == set(wheel.namelist())


def test_no_dependency_is_unbounded_below():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [d for d in project["dependencies"] if ">=" not in d] == []
    assert "torch" not in " ".join(project["dependencies"])


def test_modules_are_attributes_of_their_packages():
    """As errors and pages write them, after `import jaxspec` alone."""
    code = (
        "import jaxspec\n"
        "names = 'nets.adapters', 'core.kv_cache', 'drafters.stepwise', "
        "'weights.hf_families.llama', 'decode.loop'\n"
        "import operator\n"
        "print([operator.attrgetter(name)(jaxspec).__name__ for name in names])\n"
        "for package in (jaxspec, jaxspec.nets, jaxspec.drafters):\n"
        "    print(hasattr(package, 'nothing'), hasattr(package, '__wrapped__'))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    names = [f"jaxspec.{name}" for name in ("nets.adapters", "core.kv_cache", "drafters.stepwise")]
    names += ["jaxspec.weights.hf_families.llama", "jaxspec.decode.loop"]
    assert done.stdout.splitlines() == [str(names), *["False False"] * 3], done.stderr
