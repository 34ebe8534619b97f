"""Tables that fit a screen."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.table import Table

RANGE = "min..max"  # the head of the least and the largest


def fitting(view: Table, width: int | None, beside: int = 1) -> list[Table]:
    """Splits a table into tables of at most so many characters, each with the first columns.

    Args:
        view: the table; its title goes to the first part.
        width: characters of a line; None for any number.
        beside: columns that each part begins with.

    >>> view = Table("name", "parameters", "memory")
    >>> view.add_row("small", "1.0M", "4.0 MB")
    >>> [[str(column.header) for column in part.columns] for part in fitting(view, 25)]
    [['name', 'parameters'], ['name', 'memory']]
    """
    first = view.columns[:beside]
    columns = view.columns[beside:]
    parts = list[Table]()
    unlimited = Console(width=1000)
    while columns:
        for count in range(len(columns), 0, -1):
            piece = Table(
                title=None if parts else view.title,
                title_justify="left",
                title_style="bold",
                box=view.box,
            )
            piece.columns = [dataclasses.replace(column) for column in (*first, *columns[:count])]
            piece.rows = view.rows
            # A range stays beside the number that it is around.
            is_parted = count < len(columns) and columns[count].header == RANGE
            if count == 1 or not (
                is_parted or (width and unlimited.measure(piece).maximum > width)
            ):
                break
        parts.append(piece)
        columns = columns[count:]
    return parts or [view]
