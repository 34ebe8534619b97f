"""Output that all commands share: tables, JSON, large numbers, a progress bar."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import box
from rich.progress import Progress
from rich.status import Status
from rich.table import Table
from rich.text import Text

from jaxspec.progress import Console
from jaxspec.progress import bar as progress

Record = dict[str, Any]  # plain values by their names: a row, a report, options for a manifest


def out() -> Console:
    """Makes the console of standard output."""
    return Console(highlight=False)


def err() -> Console:
    """Makes the console of standard error."""
    return Console(stderr=True, highlight=False)


def status(doing: str) -> Status:
    """Shows on standard error what a block does, while it runs."""
    return err().status(doing)


def note(sentence: str, style: str = "") -> None:
    """Prints a sentence on standard error, as `say` does."""
    say(err(), sentence, style)


def say(out: Console, sentence: str, style: str = "") -> None:
    """Prints a sentence, wrapped between words on a terminal, on one line in a pipe or a file."""
    out.print(Text(sentence, style), soft_wrap=not out.is_terminal)


def message(error: Exception) -> str:
    """Returns the message of an error: `file: reason` for an OSError, else its text.

    >>> (
    ...     message(FileNotFoundError(2, "No such file", "a.txt")),
    ...     message(ValueError("γ is -1")),
    ...     message(ValueError()),
    ... )
    ('a.txt: No such file', 'γ is -1', 'ValueError')
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def printer(markdown: bool) -> Console:
    """Makes a console of standard output, wide enough for the tables of a document."""
    return Console(highlight=False, width=400 if markdown else None)


def table(heads: Sequence[str], *, first: str | None = None, title: str | None = None) -> Table:
    """Makes an empty table: names under the head `first`, then a column of numbers per head."""
    view = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    if first is not None:
        view.add_column(first, no_wrap=True)
    for head in heads:
        view.add_column(head, justify="right", vertical="bottom", no_wrap=True)
    return view


@contextlib.contextmanager
def counting(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Shows a bar; yields a function to call at each step, with a description of it."""
    with progress(remaining=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda doing: bar.update(task, advance=1, description=doing)
        bar.update(task, completed=total)


@contextlib.contextmanager
def sharing(title: str) -> Iterator[tuple[Progress, Callable[[str, float], None]]]:
    """Shows a bar in percent; yields it and a function of a description and the share done."""
    with progress(remaining=True) as bar:
        task = bar.add_task(title, total=100)
        yield (
            bar,
            lambda doing, share: bar.update(task, description=doing, completed=round(100 * share)),
        )
        bar.update(task, completed=100)


def show(out: Console, view: Table, markdown: bool = False) -> None:
    """Prints a table on a screen, or for a document."""
    from jaxspec.analysis.fitting import fitting

    if markdown:
        out.print(f"\n**{view.title}**\n" if view.title else "")
        view.title = None
        view.box = box.MARKDOWN
        for column in view.columns:  # a document's table has one line of heads, however wide
            column.header = one_line(str(column.header))
            column.no_wrap = True
        out.print(view)
    else:
        out.print(*fitting(view, out.width), sep="\n")


def one_line(head: str) -> str:
    r"""Joins the lines of a column's head, and the parts of a word that was divided.

    >>> [one_line(head) for head in ("pre-\ndicted", "tokens\na round", "no\nprefill")]
    ['predicted', 'tokens a round', 'no prefill']
    """
    return head.replace("-\n", "").replace("\n", " ")


def print_json(report: Any) -> None:
    """Prints one object on one line and flushes; escapes characters if the output is not UTF-8."""
    from jaxspec.analysis.result import to_json

    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(to_json(report), ensure_ascii=not unicode), flush=True)


def print_measured(**report: Any) -> None:
    """Prints one object, with the environment that its numbers were measured in."""
    from jaxspec.analysis import environment

    print_json({"environment": environment.current()} | report)


def count(number: int) -> str:
    """Shortens a number of parameters.

    >>> [count(n) for n in (999, 76_961_152, 11_135_332_352)]
    ['999', '77.0M', '11.1B']
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)
