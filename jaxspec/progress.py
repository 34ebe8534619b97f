"""The progress of commands and of training: a bar on a terminal, lines in a log."""

from __future__ import annotations

import datetime
import errno
import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

EVERY = 30.0  # seconds between two lines of a log, at least


class Console(rich.console.Console):
    """A rich console that raises BrokenPipeError when its reader is gone, instead of exiting."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def bar(
    shown: bool = True,
    *,
    remaining: bool = False,
    transient: bool = False,
    get_time: Callable[[], float] = time.monotonic,
) -> Progress:
    """Makes a bar on standard error with a label, the share that is done, and the time taken.

    Without a terminal it prints lines instead: at most one every 30 seconds, and one at the end.

    Args:
        shown: if not, nothing is printed.
        remaining: whether to estimate the time that is left.
        transient: whether the bar disappears, or the last line is not printed, when it is done.
        get_time: the clock, in seconds.
    """
    console = Console(stderr=True)
    if shown and not (console.is_terminal or console.is_jupyter):
        return _Lines(console, remaining, transient, get_time)
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    ]
    if remaining:
        columns.append(TimeRemainingColumn())
    return Progress(
        *columns,
        console=console,
        transient=transient,
        disable=not shown,
        get_time=get_time,
    )


class _Lines(Progress):
    """A progress bar that prints lines, for logs. Arguments as in `bar`."""

    def __init__(
        self, console: Console, remaining: bool, transient: bool, get_time: Callable[[], float]
    ):
        super().__init__(console=console, auto_refresh=False, disable=True, get_time=get_time)
        self._remaining = remaining
        self._transient = transient
        self._changed = set[TaskID]()
        self._printed_at = get_time()

    def update(self, task_id: TaskID, *arguments: Any, **changes: Any) -> None:
        super().update(task_id, *arguments, **changes)
        self._tell(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def stop(self) -> None:
        if not self._transient:
            self._print()

    def _tell(self, task_id: TaskID) -> None:
        """Prints lines if it is time, otherwise remembers that the task has changed."""
        self._changed.add(task_id)
        if self.get_time() - self._printed_at >= EVERY:
            self._print()

    def _print(self) -> None:
        for task in self.tasks:
            if task.id in self._changed:
                self.console.print(Text(_line(task, self._remaining)), soft_wrap=True)
        self._changed.clear()
        self._printed_at = self.get_time()


def _line(task: Task, remaining: bool) -> str:
    """Returns the line of a log for a task."""
    line = f"{task.description}: {task.completed:,.0f}"
    if task.total is not None:
        line += f" of {task.total:,.0f}"
    line += f", {_spelled(task.elapsed)}"
    if remaining and task.time_remaining is not None:
        line += f", {_spelled(task.time_remaining)} left"
    return line


def _spelled(seconds: float | None) -> str:
    return str(datetime.timedelta(seconds=int(seconds or 0)))
