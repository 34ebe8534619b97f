"""Writes the notebooks from their text forms: `python colab/sync.py`; with `--run` runs them, too, and keeps what they print.

The text forms (name.py, jupytext's percent format) are what is edited. All of them begin with the same two cells, a
badge and an installation, which are written here, with the address. Cells that did not change keep their
outputs; `--run` makes all anew, of the notebooks that are named or of all. It needs the extra "notebooks".
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jupytext
import nbformat

REPOSITORY = "jaxspec/jaxspec"  # on GitHub: what the badges open, and what is installed
FOLDER = Path(__file__).resolve().parent
TITLE = "# %% [markdown]\n# # "  # what begins after the common cells

HEAD = """\
# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/REPOSITORY/blob/main/colab/NAME.ipynb)

# %%
# Installs jaxspec where it is missing (from the checkout that this lies in, or from git), and prints what it runs on.
import glob
import importlib.util
import os
import shutil
import subprocess
import sys

if importlib.util.find_spec("jaxspec") is None:
    tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    extra = "cuda," if shutil.which("nvidia-smi") else "tpu," if tpu else ""
    package = f"jaxspec-decoding[{extra}figures] @ git+https://github.com/REPOSITORY"
    if os.path.isfile("../jaxspec/__init__.py"):  # the checkout that this notebook lies in
        package = f"..[{extra}figures]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

PREPARATIONimport jax

import jaxspec
from jaxspec.core import programs

programs.keep()  # on disk: what is compiled here, the next kernel need not compile
SMOKE = bool(os.environ.get("JAXSPEC_SMOKE"))  # shorter loops, for tests
device = jax.devices()[0]
print(f"jaxspec {jaxspec.__version__}, jax {jax.__version__}, {jax.device_count()} x {device.device_kind}")

"""

PREPARATIONS = {  # what must run before jax is imported
    "tpu": """\
# Where there is no accelerator, this simulates 8 devices. It must run before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

""",
}

WIDGET = "application/vnd.jupyter.widget-view+json"

METADATA = {
    "colab": {"provenance": []},
    "jupytext": {"formats": "ipynb,py:percent", "notebook_metadata_filter": "-all", "cell_metadata_filter": "-all"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def names() -> list[str]:
    """The notebooks: every text form in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path != Path(__file__).resolve())


def with_head(name: str, text: str) -> str:
    """A text form whose first two cells are the common ones.

    Raises:
        ValueError: it has no title to tell where the common cells end.
    """
    if TITLE not in text:
        raise ValueError(f"colab/{name}.py has no title: expected a cell that begins with {TITLE!r}")
    head = HEAD.replace("REPOSITORY", REPOSITORY).replace("NAME", name)
    return head.replace("PREPARATION", PREPARATIONS.get(name, "")) + text[text.index(TITLE) :]


def notebook(name: str, text: str, outputs: Mapping[str, list] = MappingProxyType({})) -> str:
    """A text form as the JSON of a notebook; the same arguments give the same JSON.

    Args:
        name, text: the name and the text of the text form.
        outputs: the output of each cell, by its source; other cells have none.
    """
    cells = jupytext.reads(text, "py:percent").cells
    for number, cell in enumerate(cells):
        cell.update(id=f"{name}-{number}", metadata={})
        if cell.cell_type == "code":
            cell.update(outputs=list(outputs.get(cell.source, [])))
    made = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    nbformat.validate(made)
    return nbformat.writes(made) + "\n"


def outputs_of(made: nbformat.NotebookNode) -> dict[str, list]:
    """What each cell of a notebook printed, by its source."""
    return {cell.source: cell.outputs for cell in made.cells if cell.cell_type == "code" and cell.outputs}


def run(text: str) -> dict[str, list]:
    """Runs a notebook from a clean kernel in an empty folder, and returns what each cell printed.

    Progress bars and other messages on stderr are left out, and so are widgets, which only a kernel shows, and what was
    skipped on this machine.
    """
    import nbclient

    made = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(made, timeout=3600, resources={"metadata": {"path": folder}}).execute()
    return {source: kept for source, found in outputs_of(made).items() if (kept := _kept(found))}


def _kept(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        skipped = str(output.get("text", "")).startswith("skipped:")
        if output.get("name") == "stderr" or skipped or WIDGET in output.get("data", {}):
            continue
        if kept and kept[-1].output_type == output.output_type == "stream":  # printed piece by piece
            kept[-1].text += output.text
            continue
        if "execution_count" in output:
            output.execution_count = None
        kept.append(output)
    return kept


def write(path: Path, text: str) -> None:
    """Replaces a file, as a whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the notebooks from their text forms.")
    parser.add_argument("--run", action="store_true", help="run them, and keep what they print")
    parser.add_argument("names", nargs="*", default=names(), help="of notebooks; all if there are none")
    given = parser.parse_args()
    for name in given.names:
        source, path = FOLDER / f"{name}.py", FOLDER / f"{name}.ipynb"
        text = with_head(name, source.read_text(encoding="utf-8"))
        write(source, text)
        known = outputs_of(nbformat.read(path, as_version=4)) if path.is_file() else {}
        write(path, notebook(name, text, run(notebook(name, text)) if given.run else known))
        print(f"colab/{name}.ipynb")


if __name__ == "__main__":
    main()
