"""Integers that users give."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import numpy as np


def integer(value: Any, name: str, expected: str) -> int:
    """An integer of any kind as Python's; True and False are none.

    >>> integer(np.int64(3), "gamma", "an integer")
    3
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0 and np.issubdtype(value.dtype, np.integer):
        return int(value)
    raise ValueError(f"{name} is {value!r}: expected {expected}")


def integers(**values: Any) -> tuple[int, ...]:
    """Several at once, by their names.

    >>> integers(nodes=np.int64(3), depth=2)
    (3, 2)
    """
    return tuple(integer(value, name, "an integer") for name, value in values.items())
