"""Text of a command line as numbers, for all the commands that take several of them in one option."""

from __future__ import annotations


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Positive integers separated by commas, each once.

    Args:
        text: what was given.
        option: its name, for the error.

    Raises:
        ValueError: it is anything else.

    >>> numbers("1,4, 7,4", "--gamma")
    (1, 4, 7)
    """
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{option} is {text!r}: expected positive integers separated by commas")
    return found
