"""What the commands share on a screen: the look of tables, JSON, large numbers, a progress bar."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box, filesize
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jaxspec.progress import bar as progress


def table(heads: Sequence[str], *, first: str | None = None, title: str | None = None) -> Table:
    """An empty table of numbers: `heads` are of its columns, `first` is of one of names before them."""
    made = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    if first is not None:
        made.add_column(first, no_wrap=True)
    for head in heads:
        made.add_column(head, justify="right", vertical="bottom")
    return made


@contextlib.contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of one task, as a function to call with what is being done, once for each of its steps."""
    with progress(remaining=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda doing: bar.update(task, advance=1, description=doing)


@contextlib.contextmanager
def paused(bar: Progress) -> Iterator[None]:
    """A bar that makes room for what is printed."""
    bar.stop()
    yield
    bar.start()


def show(out: Console, made: Table, markdown: bool) -> None:
    """A table on a screen, or for a document."""
    if markdown:
        out.print(f"\n**{made.title}**\n" if made.title else "")
        made.title, made.box = None, box.MARKDOWN
        for column in made.columns:  # a document's table has one line of heads, however wide
            column.header, column.no_wrap = one_line(str(column.header)), True
    out.print(made)


def one_line(head: str) -> str:
    r"""Joins the lines of a column's head, and the parts of a word that was divided.

    >>> [one_line(head) for head in ("pre-\ndicted", "tokens\na round", "no\nprefill")]
    ['predicted', 'tokens a round', 'no prefill']
    """
    return head.replace("-\n", "").replace("\n", " ")


def print_json(report: Any) -> None:
    """One object in one line, which a reader has at once; escaped where the output is not UTF-8."""
    from jaxspec.analysis.bench import to_json

    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(to_json(report), ensure_ascii=not unicode), flush=True)


def print_measured(**report: Any) -> None:
    """One object, with the environment that its numbers are of."""
    from jaxspec.analysis import environment

    print_json({"environment": environment.current()} | report)


def count(number: int) -> str:
    """A number of parameters.

    >>> [count(n) for n in (999, 76_961_152, 11_135_332_352)]
    ['999', '77.0M', '11.1B']
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def size(number: float) -> str:
    """A number of bytes.

    >>> [size(n) for n in (512, 73_728, 307_844_608)]
    ['512 bytes', '73.7 kB', '307.8 MB']
    """
    return filesize.decimal(int(number))
