"""Integers that users give."""

from __future__ import annotations

import numbers
from typing import Any


def integer(value: Any, name: str, expected: str) -> int:
    """An integer of any kind as Python's; True and False are none.

    >>> import numpy as np
    >>> integer(np.int64(3), "gamma", "an integer")
    3
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "") in ("i", "u"):  # NumPy's and JAX's
        return int(value)
    raise ValueError(f"{name} is {value!r}: expected {expected}")


def integers(**values: Any) -> tuple[int, ...]:
    """Several at once, by their names.

    >>> integers(nodes=3, depth=2)
    (3, 2)
    """
    return tuple(integer(value, name, "an integer") for name, value in values.items())
