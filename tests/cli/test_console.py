"""The look that tables share."""

from jaxspec.cli import console


def test_names_are_on_the_left_and_numbers_on_the_right(shown):
    made = console.table(["two\nlines"], first="name", title="Sizes")
    made.add_row("it", "7")
    title, _, upper, lower, _, row, _ = [line.strip() for line in shown(made).splitlines()]
    assert title == "Sizes"
    assert (upper, lower) == ("│      │   two │", "│ name │ lines │")
    assert row == "│ it   │     7 │"
