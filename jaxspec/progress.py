"""The progress bar of commands and of training."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def bar(shown: bool = True, *, remaining: bool = False, transient: bool = False) -> Progress:
    """A bar on standard error: what is being done, how much of it is done, and for how long.

    Args:
        shown: if not, nothing is printed.
        remaining: whether to estimate the time that is left.
        transient: whether it disappears when it is done.
    """
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(
        *columns,
        *([TimeRemainingColumn()] if remaining else []),
        console=Console(stderr=True),
        transient=transient,
        disable=not shown,
    )
