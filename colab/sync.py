"""Writes the notebooks from their text forms: `python colab/sync.py`; with `--run` runs them, too,
and keeps what they print.

The text forms (name.py, jupytext's percent format) are what is edited. All of them begin with the
same two cells: badges, and the installation in `first_cell.py`. The repository's address comes from
`repo_url` in mkdocs.yml. Cells that did not change keep their outputs and numbers; `--run` makes
all anew, of the notebooks that are named or of all. It needs the extra "notebooks".
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import jupytext
import nbformat

if TYPE_CHECKING:
    import nbclient

FOLDER = Path(__file__).resolve().parent
SITE = (FOLDER.parent / "mkdocs.yml").read_text(encoding="utf-8")
# a fork has another
ADDRESS = re.findall(r"^repo_url: (https://github\.com/\S+)", SITE, re.MULTILINE)[0]
REPOSITORY = ADDRESS.removeprefix("https://github.com/")  # what the badges open
FIRST_CELL = "first_cell"
TITLE = "# %% [markdown]\n# # "  # what begins after the common cells
# A cell that repeats a part of a file: `# @title docs/nano.py, part 1: A transformer`, and the part.
PART = re.compile(r"(?m)^(# @title (docs/\w+\.py), part (\d): .*\n)((?:(?!# %%).*\n?)*)")
LINK = re.compile(r"https://github\.com/[\w.-]+/jaxspec/blob/main/")  # to a file of this repository

BADGES = """\
# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/REPOSITORY/blob/main/colab/NAME.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=ADDRESS/blob/main/colab/NAME.ipynb)

# %%
"""

PREPARATIONS = {  # what must run before jax is imported
    "tpu": """\
# Where there is no accelerator, this simulates 8 devices. It must run before jax is imported.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

""",
}

WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGETS = "application/vnd.jupyter.widget-state+json"

METADATA = {
    "colab": {"provenance": []},
    "jupytext": {
        "formats": "ipynb,py:percent",
        "notebook_metadata_filter": "-all",
        "cell_metadata_filter": "-all",
    },
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class Result(NamedTuple):
    """What a cell printed when it was run, and the number that it was run as."""

    outputs: list[nbformat.NotebookNode]
    number: int


def names() -> list[str]:
    """The notebooks: every text form in this folder."""
    return sorted({path.stem for path in FOLDER.glob("*.py")} - {Path(__file__).stem, FIRST_CELL})


def with_head(name: str, text: str) -> str:
    """A text form whose first two cells are the common ones, and whose links lead to this
    repository.

    Raises:
        ValueError: it has no title to tell where the common cells end.
    """
    if TITLE not in text:
        raise ValueError(
            f"colab/{name}.py has no title: expected a cell that begins with {TITLE!r}"
        )
    badges = (
        BADGES.replace("REPOSITORY", REPOSITORY).replace("ADDRESS", ADDRESS).replace("NAME", name)
    )
    first_cell = (FOLDER / f"{FIRST_CELL}.py").read_text(encoding="utf-8")
    first_cell = first_cell.replace("ADDRESS", ADDRESS).replace(
        "# PREPARATION\n", PREPARATIONS.get(name, "")
    )
    body = LINK.sub(f"{ADDRESS}/blob/main/", text[text.index(TITLE) :])
    body = PART.sub(_filled, body)
    return f"{badges}{first_cell}\n{body}"


def _filled(cell: re.Match) -> str:
    # Blank lines as the formatter has them: one after imports, two after functions and classes.
    end = "\n\n" if cell[3] == "0" else "\n\n\n"
    return f"{cell[1]}{part(cell[2], int(cell[3]))}{end}"


def part(file: str, number: int) -> str:
    """A part of a file, which begins with a comment `# ---- 1. A transformer`; 0 is its imports."""
    source = (FOLDER.parent / file).read_text(encoding="utf-8")
    imports, *parts = re.split(r"(?m)^# -+ \d\. .*\n+", source)
    if number == 0:
        return imports[imports.index("from __future__") :].strip()
    return parts[number - 1].strip()


def notebook(name: str, text: str, results: Mapping[str, Result] = MappingProxyType({})) -> str:
    """A text form as the JSON of a notebook; the same arguments give the same JSON.

    Args:
        name: the notebook's name.
        text: its text form.
        results: outputs and number of each cell that was run, by its source.
    """
    cells = jupytext.reads(text, "py:percent").cells
    for position, cell in enumerate(cells):
        cell.update(id=f"{name}-{position}", metadata={})
        if cell.cell_type == "code" and cell.source in results:
            result = results[cell.source]
            cell.update(outputs=list(result.outputs), execution_count=result.number)
    written = nbformat.v4.new_notebook(cells=cells, metadata=METADATA)
    nbformat.validate(written)
    return nbformat.writes(written) + "\n"


def results_of(ran: nbformat.NotebookNode) -> dict[str, Result]:
    """What each cell of a notebook printed, by its source; cells that were not run are left out."""
    numbered = [cell for cell in ran.cells if cell.cell_type == "code" and cell.execution_count]
    return {cell.source: Result(cell.outputs, cell.execution_count) for cell in numbered}


def run(text: str) -> dict[str, Result]:
    """Runs a notebook from a clean kernel in an empty folder, and returns what each cell printed.

    Progress bars and other messages on stderr are left out, and so are sliders, which only a kernel
    shows, and what was skipped on this machine. A picture that sliders draw is kept as they first
    draw it.
    """
    ran = nbformat.reads(text, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        execute(ran, folder, timeout=3600)
    widgets = ran.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {})
    return {
        source: result._replace(outputs=_kept(_without_widgets(result.outputs, widgets)))
        for source, result in results_of(ran).items()
    }


def execute(
    notebook: nbformat.NotebookNode,
    folder: str,
    *,
    timeout: int = 600,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs a notebook from a clean kernel in a folder, and keeps in it what its cells printed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
        nbclient.exceptions.CellTimeoutError: a cell took more than `timeout` seconds.
    """
    import nbclient

    client = nbclient.NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    asyncio.run(_executed(client, os.environ if environment is None else environment))


async def _executed(client: nbclient.NotebookClient, environment: Mapping[str, str]) -> None:
    waking = asyncio.create_task(_wake(client))
    try:
        await client.async_execute(env=dict(environment))
    finally:
        waking.cancel()


async def _wake(client: nbclient.NotebookClient) -> None:
    """Looks for replies of the kernel once a second, for as long as a notebook runs.

    nbclient answers a widget over a second handle of the socket on which it waits for the kernel's
    reply. A reply that arrives meanwhile wakes the second handle only, and nbclient would wait
    until its time is up. Whoever polls the socket anew finds the reply, and wakes all who wait.
    """
    while True:
        await asyncio.sleep(1)
        if client.kc is not None:
            await client.kc.shell_channel.socket.poll(1)


def _without_widgets(
    outputs: list[nbformat.NotebookNode], widgets: Mapping[str, dict]
) -> list[nbformat.NotebookNode]:
    """Replaces each widget by what it shows: an Output's pictures, of a slider nothing."""
    plain: list[nbformat.NotebookNode] = []
    for output in outputs:
        view = output.get("data", {}).get(WIDGET)
        if view is None:
            plain.append(output)
        else:
            plain += map(nbformat.from_dict, widgets[view["model_id"]]["state"].get("outputs", []))
    return plain


def _kept(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    kept: list[nbformat.NotebookNode] = []
    for output in outputs:
        skipped = str(output.get("text", "")).startswith("skipped:")
        if output.get("name") == "stderr" or skipped:
            continue
        # printed piece by piece
        if kept and kept[-1].output_type == output.output_type == "stream":
            kept[-1].text += output.text
            continue
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
    parser.add_argument(
        "names", nargs="*", default=names(), help="of notebooks; all if there are none"
    )
    given = parser.parse_args()
    for name in given.names:
        source, path = FOLDER / f"{name}.py", FOLDER / f"{name}.ipynb"
        text = with_head(name, source.read_text(encoding="utf-8"))
        write(source, text)
        known = results_of(nbformat.read(path, as_version=4)) if path.is_file() else {}
        write(path, notebook(name, text, run(notebook(name, text)) if given.run else known))
        print(f"colab/{name}.ipynb")


if __name__ == "__main__":
    main()
