"""The look that tables share."""

import io

import pytest
from rich.console import Console

from jaxspec import progress
from jaxspec.cli import console


def test_names_are_on_the_left_and_numbers_on_the_right(shown):
    table = console.table(["two\nlines"], first="name", title="Sizes")
    table.add_row("it", "7")
    title, _, upper, lower, _, row, _ = [line.strip() for line in shown(table).splitlines()]
    assert title == "Sizes"
    assert (upper, lower) == ("│      │   two │", "│ name │ lines │")
    assert row == "│ it   │     7 │"


def test_a_table_of_a_document_has_one_line_of_heads():
    table = console.table(["pre-\ndicted", "tokens\na round"], first="name", title="Sizes")
    table.add_row("it", "7", "1.50")
    printed = io.StringIO()
    console.show(Console(file=printed, width=400), table, markdown=True)
    lines = [line.rstrip() for line in printed.getvalue().splitlines() if line.strip()]
    assert lines == [
        "**Sizes**",
        "| name | predicted | tokens a round |",
        "|------|-----------|----------------|",
        "| it   |         7 |           1.50 |",
    ]


def test_a_table_that_is_too_wide_is_several_with_whole_heads(shown):
    table = console.table(
        ["parameters", "tokens\na round", "speed-up"], first="name", title="Sizes"
    )
    table.add_row("debian-t5-large", "36.2M", "1.50", "1.31×")
    printed = io.StringIO()
    console.show(Console(file=printed, width=40), table)
    lines = printed.getvalue().splitlines()
    assert max(map(len, lines)) <= 40 and "…" not in printed.getvalue()
    assert printed.getvalue().count("debian-t5-large") == 2
    assert all(
        part in printed.getvalue()
        for part in ("parameters", "a round", "speed-up", "36.2M", "1.31×")
    )


@pytest.mark.parametrize("done", [0, 1, 3])
def test_a_bar_ends_with_all_that_there_is(done, monkeypatch):
    bars = []
    monkeypatch.setattr(
        console, "progress", lambda **options: bars.append(progress.bar(False)) or bars[-1]
    )
    with console.counting("steps", 3) as advance:
        for step in range(done):
            advance(f"step {step}")
    with console.sharing("speed") as (_, doing):
        doing("plain", done / 4)
    assert [(task.completed, task.total) for bar in bars for task in bar.tasks] == [
        (3, 3),
        (100, 100),
    ]
