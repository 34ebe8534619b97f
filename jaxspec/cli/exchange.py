"""A prompt and the text that answers it, side by side."""

from __future__ import annotations

import re

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def labels(prompt: str) -> tuple[str, str, str]:
    """What to call a prompt and its answer, and the prompt without its task prefix, if that is one of T5's.

    >>> labels("translate English to German: A new cat."), labels("summarize: A long story.")[:2]
    (('English', 'German', 'A new cat.'), ('text', 'summary'))
    """
    task = re.match(r"translate (\w+) to (\w+): ", prompt)
    if task:
        return task[1], task[2], prompt[task.end() :]
    if prompt.startswith("summarize: "):
        return "text", "summary", prompt.removeprefix("summarize: ")
    return "prompt", "answer", prompt


def exchange(prompt: str, settled: str, fresh: str, continues: bool, last: Text | None = None) -> RenderableType:
    """A prompt, what is generated of it (`fresh` by the last round), and a last line.

    Text goes on where the prompt ends, if it `continues` (a decoder-only model), or answers it.
    """
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(ratio=1)
    text = Text.assemble(settled, (fresh, "bold cyan"))
    if continues:
        grid.add_row("text", Text.assemble((prompt, "dim"), text))
    else:
        source, answer, body = labels(prompt)
        grid.add_row(source, Text(body, "dim"))
        grid.add_row(answer, text)
    if last is not None:
        grid.add_row("", last)
    return grid
