"""Lists on a command line: values that are separated by commas."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any


def values(text: str, option: str, kind: Callable[[str], Any] = str, wanted: str = "values") -> tuple[Any, ...]:
    """Values separated by commas, each once; `kind` makes one of its text, or raises ValueError.

    >>> values("a, b,a", "--draft"), integers("1,4, 7,4", "--gamma"), temperatures("0,0.7", "--temperature")
    (('a', 'b'), (1, 4, 7), (0.0, 0.7))
    """
    try:
        parts = [part.strip() for part in text.split(",")]
        return tuple(dict.fromkeys(kind(part) if part else int("") for part in parts))
    except ValueError:
        raise ValueError(f"{option} is {text!r}: expected {wanted} separated by commas") from None


def positive(part: str) -> int:
    """A positive integer of its text."""
    return int(part) if part.isdecimal() and int(part) else int("")


def _temperature(part: str) -> float:
    found = float(part)
    return found if 0 <= found < math.inf else float("")


integers = functools.partial(values, kind=positive, wanted="positive integers")
temperatures = functools.partial(values, kind=_temperature, wanted="numbers 0 or more,")
