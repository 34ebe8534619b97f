"""The look that tables share."""

import io

from rich.console import Console

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
