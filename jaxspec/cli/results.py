"""`jaxspec bench --results`: a page of tables, each written by the command that stands before it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from jaxspec.files import read_text, write_text

BLOCK = re.compile(r"(```console\n(?P<commands>(?:\$ jaxspec (?:bench|measure) [^\n]*\n)+)```\n\n<!-- measured -->\n)"
                   r".*?(?=<!-- /measured -->)", re.DOTALL)  # fmt: skip


def fill(page: Path, store: Path | None) -> None:
    """Runs the commands of a page and puts their tables in the place of those that it has.

    A table is between `<!-- measured -->` and `<!-- /measured -->`, after a console block with its commands.

    Args:
        page: a markdown file.
        store: of the rows: what it has is not measured again.

    Raises:
        ValueError: the page has no such block, or there is no store.
        OSError: a command failed; what it has found is in the store.
    """
    text = read_text(page)
    if store is None:
        raise ValueError(
            "--results needs --resume FILE: the tables are made of its rows, and what it lacks is measured"
        )
    if not BLOCK.search(text):
        raise ValueError(f"{page} has no console block of jaxspec bench or measure before a line <!-- measured -->")

    for found in BLOCK.finditer(text):
        commands = [line.removeprefix("$ ") for line in found["commands"].splitlines()]
        tables = "\n".join(printed(command, store) for command in commands)
        now = read_text(page)  # with the tables before, and whatever was edited meanwhile
        write_text(page, [now.replace(found[0], f"{found[1]}\n{tables}\n")])


def printed(command: str, store: Path) -> str:
    """The tables of a command, which runs in a process of its own."""
    arguments = [*shlex.split(command)[1:], "--markdown", "--resume", str(store.resolve())]
    print(f"$ {command}", file=sys.stderr, flush=True)
    utf8 = os.environ | {"PYTHONIOENCODING": "utf-8"}  # whatever the terminal can show
    done = subprocess.run([sys.executable, "-m", "jaxspec", *arguments], stdout=subprocess.PIPE, env=utf8)
    if done.returncode:
        raise OSError(f"{command}: ended with {done.returncode}; its messages are above")
    text = re.sub(r"[ \t]+$", "", done.stdout.decode(), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
