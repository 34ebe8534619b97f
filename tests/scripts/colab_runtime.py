"""Runs a notebook as a stranger does: in a new environment with a hosted runtime's versions, some
of them loaded.

    python tests/scripts/colab_runtime.py --python python3.13 --runtime 2026.08 FOLDER

makes the environment in FOLDER, puts a wheel of this checkout beside the notebook, as if uploaded,
and runs:

1. the first cell in a kernel that has loaded jax, too: it has to stop with one sentence, and cell 2
must not run;
2. the whole notebook in a new kernel, as after Runtime > Restart.

With `--no-restart` the first kernel has loaded what Colab's own has, and has to get to the end by
itself. It needs a package index, takes some three minutes, and prints one JSON object. What pip
prints goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[2]
# Colab's lists of packages, https://github.com/googlecolab/backend-info: what jaxspec needs too, or
# a kernel loads.
RUNTIMES = {
    "2026.08": {"python": "3.13", "numpy": "2.1.3"},
    "2026.07": {"python": "3.12", "numpy": "2.0.2"},
}
BOTH = (
    "jax==0.7.2",
    "flax==0.11.2",
    "psutil==5.9.5",
    "transformers==5.15.0",
    "scipy==1.16.3",
    "ipykernel",
)
LOADED_BY_COLAB = "numpy, psutil"
SHOWN = ("numpy", "jax", "flax", "psutil", "transformers")


def environment(folder: Path, python: str, numpy: str) -> Path:
    """Makes the environment, and returns its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    executable = folder / "bin" / "python"
    pip = [executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"numpy=={numpy}", *BOTH], check=True, stdout=sys.stderr)
    return executable


def versions(python: Path) -> dict[str, str]:
    """The versions that the environment has of the packages that are shown."""
    code = (
        f"import importlib.metadata as m, json; print(json.dumps({{name: m.version(name) for name "
        f"in {SHOWN!r}}}))"
    )
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


def kernel(folder: Path, python: Path, loaded: str) -> str:
    """Writes a kernel of that Python which loads modules before the first cell, and returns its
    name.
    """
    name = f"runtime-{loaded.replace(', ', '-')}"
    arguments = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    arguments.append(f"--IPKernelApp.exec_lines=import {loaded}")
    spec = folder / "kernels" / name / "kernel.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    spec.write_text(
        json.dumps({"argv": arguments, "display_name": name, "language": "python"}),
        encoding="utf-8",
    )
    return name


def run(
    path: Path, kernel_name: str, cells: int | None = None
) -> tuple[nbformat.NotebookNode, str]:
    """Runs a notebook where it lies, up to its first error. Returns it and what the error shows, or
    "".

    Args:
        path: the notebook's. What it has stored of former runs is dropped.
        kernel_name: the kernel that runs it.
        cells: how many of its code cells are run; all if None.
    """
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.execution_count, cell.outputs = None, []
    for cell in code[cells:] if cells is not None else []:
        notebook.cells.remove(cell)
    client = nbclient.NotebookClient(
        notebook,
        timeout=1200,
        kernel_name=kernel_name,
        resources={"metadata": {"path": str(path.parent)}},
    )
    with contextlib.suppress(nbclient.exceptions.CellExecutionError):  # the notebook has the error
        client.execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    errors = ["\n".join(output.traceback) for output in outputs if output.output_type == "error"]
    return notebook, errors[0] if errors else ""


def report(notebook: nbformat.NotebookNode, error: str) -> dict[str, object]:
    """Says how far a notebook ran, what its first code cell printed, and what its error shows."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    first = "".join(output.get("text", "") for output in code[0].outputs)
    return {
        "cells": len(code),
        "ran": sum(cell.execution_count is not None for cell in code),
        "first_cell": first,
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python",
        help="of the runtime's version; python3.13 or python3.12 on the PATH if left out",
    )
    parser.add_argument("--runtime", choices=list(RUNTIMES), default="2026.08")
    parser.add_argument("--notebook", default="quickstart")
    parser.add_argument("--cells", type=int, metavar="N", help="run the first N code cells only")
    parser.add_argument(
        "--no-restart", action="store_true", help="load no jax before the first cell"
    )
    parser.add_argument(
        "folder", type=Path, help="an empty folder for the environment and the notebook"
    )
    options = parser.parse_args()
    runtime = RUNTIMES[options.runtime]
    folder = options.folder.resolve()
    python = environment(
        folder / "env", options.python or f"python{runtime['python']}", runtime["numpy"]
    )

    content = folder / "content"
    content.mkdir()
    path = Path(shutil.copy(ROOT / "colab" / f"{options.notebook}.ipynb", content))
    wheel = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", content, ROOT]
    subprocess.run(wheel, check=True, stdout=sys.stderr)

    os.environ["JUPYTER_PATH"] = str(folder)  # where the kernels' specifications are
    os.environ["IPYTHONDIR"] = str(folder / "ipython")
    os.environ.pop("PYTHONPATH", None)  # or the kernel would have this checkout
    before = versions(python)
    result: dict[str, object] = {"before": before}
    if not options.no_restart:
        kernel_name = kernel(folder, python, f"{LOADED_BY_COLAB}, jax, flax")
        result["first kernel"] = report(*run(path, kernel_name, options.cells))
    kernel_name = kernel(folder, python, LOADED_BY_COLAB)
    result["last kernel"] = report(*run(path, kernel_name, options.cells))
    result["after"] = versions(python)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
