"""Fills a page of tables, each written by the commands that stand before it.

    python -m benchmarks.results benchmarks/results/results.md

A table is between `<!-- measured -->` and `<!-- /measured -->`, after a console block with its
commands: each runs in a separate process, and machine, versions, date, table and what follows from
it take the place of what was there. The page is written after each table, so a run that was ended
goes on with `--skip N`, where N tables were written. Hours of two cores, for all of a page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import parser_of
from jaxspec.files import read_text, write_text

COMMAND = r"\$ (?:jaxspec bench|python -m benchmarks\.\w+) [^\n]*\n"
BLOCK = re.compile(
    rf"(```console\n(?P<commands>(?:{COMMAND})+)```\n\n<!-- measured -->\n).*?(?=<!-- /measured -->)",
    re.DOTALL,
)


def fill(page: Path, skip: int = 0) -> None:
    """Runs the commands of a page and puts their tables in the place of those that it has.

    A table is between `<!-- measured -->` and `<!-- /measured -->`, after a console block with its
    commands. The first `skip` tables stay.
    """
    text = read_text(page)
    if not BLOCK.search(text):
        raise ValueError(
            f"{page} has no console block of jaxspec bench or a benchmark before a line "
            "<!-- measured -->"
        )

    for block in list(BLOCK.finditer(text))[skip:]:
        commands = [line.removeprefix("$ ") for line in block["commands"].splitlines()]
        tables = "\n".join(printed(command) for command in commands)
        now = read_text(page)  # with the tables before, and whatever was edited meanwhile
        write_text(page, [now.replace(block[0], f"{block[1]}\n{tables}\n")])


def printed(command: str) -> str:
    """Runs a command in a process of its own, and returns its tables."""
    words = shlex.split(command)
    module, rest = ("jaxspec", words[1:]) if words[0] == "jaxspec" else (words[2], words[3:])
    arguments = [module, *rest, "--markdown"]
    print(f"$ {command}", file=sys.stderr, flush=True)
    utf8 = os.environ | {"PYTHONIOENCODING": "utf-8"}  # whatever the terminal can show
    done = subprocess.run([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, env=utf8)
    if done.returncode:
        raise OSError(f"{command}: ended with {done.returncode}; its messages are above")
    text = re.sub(r"[ \t]+$", "", done.stdout.decode(), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and fills a page."""
    parser = parser_of(__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--skip", type=int, default=0, help="tables at the beginning that stay")
    options = parser.parse_args(arguments)
    fill(options.page, options.skip)


if __name__ == "__main__":
    main()
