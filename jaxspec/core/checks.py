"""Checks of numbers and names that users give, and of parameters that are shapes alone."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

OWN_NETWORK = (
    "expected a network of jaxspec.nets: jaxspec.load reads published models, and "
    "jaxspec.from_arrays converts those of other libraries"
)
"""The advice where an adapter's model, whose calls return logits only, is not enough."""


def integer(value: Any, name: str, expected: str) -> int:
    """Returns any library's integer as a Python int. True and False are rejected.

    >>> import numpy as np
    >>> integer(np.int64(3), "gamma", "an integer")
    3
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    # NumPy's and JAX's
    if getattr(value, "shape", None) == () and getattr(value.dtype, "kind", "") in ("i", "u"):
        return int(value)
    raise ValueError(f"{name} is {value!r}: expected {expected}")


def integers(least: int | None = None, /, **values: Any) -> tuple[int, ...]:
    """Returns several integers as Python's, checked by their names, and that none is less than
    `least`.

    >>> integers(1, nodes=3, depth=2)
    (3, 2)
    """
    result = {name: integer(value, name, "an integer") for name, value in values.items()}
    if least is not None:
        at_least(least, **result)
    return tuple(result.values())


def number(
    value: Any, name: str, expected: str, *, above: float = -math.inf, at_most: float = math.inf
) -> float:
    """Returns any library's finite real number as a Python float, within bounds. True and False are
    rejected.

    >>> import numpy as np
    >>> number(np.float32(0.5), "factor", "a finite number")
    0.5
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if getattr(value, "shape", None) == ():  # NumPy's and JAX's
        dtype = getattr(value, "dtype", None)
        real = getattr(dtype, "kind", "") in ("i", "u", "f") or str(dtype) == "bfloat16"
    if real and math.isfinite(value) and above < float(value) <= at_most:
        return float(value)
    raise ValueError(f"{name} is {value!r}: expected {expected}")


def check_ids(ids: Iterable[Any], name: str, vocab: int) -> list[int]:
    """Returns ids of tokens as Python's integers.

    >>> check_ids([5, 100], "eos_ids", 100)
    Traceback (most recent call last):
    ValueError: eos_ids has 100: expected ids from 0 to 99
    """
    expected = f"ids from 0 to {vocab - 1}"
    checked = [integer(token, f"one of {name}", f"an integer: {expected}") for token in ids]
    outside = [token for token in checked if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{name} has {outside[0]}: expected {expected}")
    return checked


def at_least(least: int, /, **values: float) -> None:
    """Raises ValueError for numbers that are less than there must be, by their names.

    >>> at_least(1, heads=3, blocks=0)
    Traceback (most recent call last):
    ValueError: blocks is 0: expected at least 1
    """
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}: expected at least {least}")


def in_range(low: float, high: float, /, *, below: bool = False, **values: float) -> None:
    """Raises ValueError for numbers outside of a range, whose high end is allowed unless numbers
    must be `below` it.

    >>> in_range(0, 1, below=True, decay=0.5, dropout=1.0)
    Traceback (most recent call last):
    ValueError: dropout is 1.0: expected a number from 0 to below 1
    """
    for name, value in values.items():
        if not (low <= value < high if below else low <= value <= high):
            raise ValueError(
                f"{name} is {value}: expected a number from {low} to {'below ' * below}{high}"
            )


def one_of(value: Any, name: str, expected: Iterable[Any]) -> None:
    """Raises ValueError if a name is not among the expected ones.

    >>> one_of("tanh", "activation", ["relu", "silu"])
    Traceback (most recent call last):
    ValueError: activation is 'tanh': expected one of relu, silu
    """
    if value not in expected:
        raise ValueError(f"{name} is {value!r}: expected one of {', '.join(expected)}")


def suggest(name: str, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Ends an error message by offering the nearest of several names, if one is near enough.

    >>> suggest("debian-t5-bass", ["debian-t5-base", "gpt-6m"])
    ": did you mean 'debian-t5-base'?"
    >>> suggest("elsewhere", ["gpt-6m"])
    ''
    """
    closest = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    if closest:
        return f": did you mean {closest[0]!r}?"
    return ""


def check_names(names: Iterable[str], options: Sequence[str], advice: Mapping[str, str]) -> None:
    """Raises TypeError for keywords that are not options, with the one that was probably meant.

    Args:
        names: the keywords given.
        options: the names of all options.
        advice: other libraries' names of options, with what to do in their place, as the end of the
            error.

    >>> check_names(["temprature"], ["temperature", "top_k"], {})
    Traceback (most recent call last):
    TypeError: there is no option 'temprature': did you mean temperature?
    >>> check_names(["do_sample"], ["temperature"], {"do_sample": "temperature 0 is greedy"})
    Traceback (most recent call last):
    TypeError: there is no option 'do_sample': temperature 0 is greedy
    """
    for name in names:
        if name in options:
            continue
        text = advice.get(name)
        if text is None:
            closest = difflib.get_close_matches(name, options, n=1)
            if closest:
                text = f"did you mean {closest[0]}?"
            else:
                text = f"expected one of {', '.join(options)}"
        raise TypeError(f"there is no option {name!r}: {text}")


def are_shapes(arrays: Any) -> bool:
    """Tells whether arrays, or some of them, are shapes alone, as of a model that is compiled here
    and runs elsewhere.

    >>> (
    ...     are_shapes({"weight": jax.ShapeDtypeStruct((2, 3), "float32")}),
    ...     are_shapes({"weight": jax.numpy.ones(3)}),
    ... )
    (True, False)
    """
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays))
