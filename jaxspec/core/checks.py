"""Numbers that users give."""

from __future__ import annotations

import math
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


def number(value: Any, name: str, expected: str) -> float:
    """A finite real number of any kind as Python's; True and False are none.

    >>> import numpy as np
    >>> number(np.float32(0.5), "factor", "a finite number")
    0.5
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if getattr(value, "shape", None) == ():  # NumPy's and JAX's
        dtype = getattr(value, "dtype", None)
        real = getattr(dtype, "kind", "") in ("i", "u", "f") or str(dtype) == "bfloat16"
    if real and math.isfinite(value):
        return float(value)
    raise ValueError(f"{name} is {value!r}: expected {expected}")
