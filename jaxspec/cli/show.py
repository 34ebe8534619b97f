"""Decoding in front of a reader: text that grows round by round, or a trace with a line for each round."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxspec.cli import counts
from jaxspec.cli.session import Decoded, Session, decode_all, stream
from jaxspec.trace import Round, terminal


def show(session: Session, out: Console, batch: bool, trace: bool) -> list[Decoded]:
    """Decodes and prints, text as it appears unless all prompts are one batch."""
    if trace:
        out.print(terminal.legend(_colour(out)), "\n")
    if not batch:
        one = _stream_trace if trace else _stream_text
        return [one(session, index, out) for index in range(len(session.texts))]
    decoded = decode_all(session, len(session.texts))
    for text, row in zip(session.texts, decoded, strict=True):
        if trace:
            out.print(Text(text, "dim"))
            for number, step in enumerate(row.rounds):
                out.print(_trace_line(session, number, step, out))
            out.print()
        else:
            out.print(_exchange(session, text, row.text, "", counts.note(row.counts)), "")
    return decoded


def _stream_text(session: Session, index: int, out: Console) -> Decoded:
    """Decodes one prompt, its text growing round by round."""
    text, shown = session.texts[index], ""
    with Live(console=out, auto_refresh=False, transient=True, vertical_overflow="visible") as live:

        def grow(piece: Any, _: Round) -> None:
            nonlocal shown
            live.update(_exchange(session, text, shown, piece.text), refresh=out.is_terminal)
            shown += piece.text

        decoded = stream(session, index, grow)
    out.print(_exchange(session, text, decoded.text, "", counts.note(decoded.counts)), "")
    return decoded


def _stream_trace(session: Session, index: int, out: Console) -> Decoded:
    """Decodes one prompt, printing each round as it ends."""
    out.print(Text(session.texts[index], "dim"))
    numbers: Iterator[int] = iter(range(sys.maxsize))
    decoded = stream(session, index, lambda _, step: out.print(_trace_line(session, next(numbers), step, out)))
    out.print()
    return decoded


def _colour(out: Console) -> bool:
    return out.is_terminal and not out.no_color


def _trace_line(session: Session, number: int, step: Round, out: Console) -> Text:
    return terminal.trace(session.job.target.tokenizer, number, step, width=out.width, colour=_colour(out))


def _exchange(session: Session, prompt: str, settled: str, fresh: str, note: Text | None = None) -> Any:
    return exchange(prompt, settled, fresh, session.job.target.lm.start_token is None, note)


def exchange(prompt: str, settled: str, fresh: str, continues: bool, note: Text | None = None) -> RenderableType:
    """A prompt and the text that answers it so far, the newest part of it lit up.

    Args:
        prompt, settled, fresh: the prompt, the older part of the text, the part that the last round brought.
        continues: whether the text goes on where the prompt ends (a decoder-only model) or answers it.
        note: a last line.
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
    if note is not None:
        grid.add_row("", note)
    return grid


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
