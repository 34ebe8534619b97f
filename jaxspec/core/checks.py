"""Checks of what users give: numbers, names, types, models and keys."""

from __future__ import annotations

import difflib
import importlib
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxspec.core.language_model import LanguageModel, Model

LOADED = ("target", "drafter")  # arguments that are models

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


def check_untraced(*trees: Any) -> None:
    """Raises TypeError where a generation is prepared and arrays have no values yet."""
    leaves = [jnp.zeros((), jnp.float32), *jax.tree.leaves(trees)]
    if any(isinstance(x, Tracer) for x in leaves):
        raise TypeError(
            "decoding was prepared inside jit, vmap or another transformation of JAX's: it checks "
            "prompts and makes "
            "text, on the host. Prepare outside, prepared = jaxspec.prepare(target, prompts, ...), "
            "and inside call "
            'jaxspec.rollout(prepared, prompt=..., key=...): the page "Inside your own jit" shows '
            "both"
        )


def check_model(
    value: Any, name: str, expected: str = "a jaxspec.Model, as jaxspec.load gives"
) -> None:
    """Raises TypeError for anything but a `Model` with a `LanguageModel`, and says how to make
    one.
    """
    check_type(value, Model, name, expected, "jaxspec")
    lm: Any = value.lm
    if isinstance(lm, LanguageModel):
        return
    # The module that a class comes from tells its library, which need not be installed to be
    # recognised.
    homes = {base.__module__ for base in type(lm).__mro__}
    if "flax.linen.module" in homes:
        way = 'Model(adapters.from_linen(module, vocab_size), module.init(key, tokens)["params"])'
    elif any(module.startswith("flax.nnx") for module in homes):
        way = "Model(*adapters.from_nnx(module, vocab_size))"
    elif callable(lm):
        way = "Model(adapters.from_function(function, vocab_size), params)"
    else:
        way = "Model(adapters.from_function(apply, vocab_size), params)"
    raise TypeError(
        f"{name} is Model({type(lm).__name__}, ...), whose first argument is not a LanguageModel. "
        f"jaxspec.nets.adapters makes one: {way}"
    )


def check_type(value: Any, types: Any, name: str, expected: str, home: str = "") -> None:
    """Raises TypeError for a value of another type. With a `home`, a module, the message suggests
    one of its names.
    """
    if not isinstance(value, types):
        if home:
            shown = uncalled(value, name, home)
        else:
            shown = f"{name} is of type {type(value).__name__}"
        raise TypeError(f"{shown}: expected {expected}")


def is_here(array: Any) -> bool:
    """Says whether an array's values can be read: it is not traced, and no part of it is another
    process's.
    """
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)


def uncalled(value: Any, name: str, home: str) -> str:
    """Explains why a value is not one of `home`'s objects: perhaps a name, or a factory that was
    not called.
    """
    if isinstance(value, str | os.PathLike):
        is_name = value in getattr(importlib.import_module(home), "__all__", ())
        if is_name:
            advice = f"{home}.{value}(...)"
        elif name in LOADED:
            advice = f"jaxspec.load({str(value)!r})"
        else:
            advice = ""
        return f"{name} is {str(value)!r}, a name" + (f": pass {advice}" if advice else "")
    if hasattr(value, "state_dict"):
        return (
            f"{name} is a {type(value).__name__} of PyTorch: pass jaxspec.load(...) of the folder "
            "or hub id that it came from"
        )
    if callable(value) and getattr(value, "__module__", "").startswith("jaxspec"):
        factory = f"{home}.{value.__name__}"
        return (
            f"{name} is the function {value.__name__}: call it, and pass what it returns, "
            f"{factory}(...)"
        )
    return f"{name} is of type {type(value).__name__}"


def key_of(key: Any) -> jax.Array:
    """A key, or one per row; arrays of `jax.random.PRNGKey` work as well.

    >>> key_of(jax.random.PRNGKey(0)) == jax.random.key(0)
    Array(True, dtype=bool)
    """
    if isinstance(key, numbers.Integral):
        raise TypeError(f"key is {key}: expected a key, such as jax.random.key({key})")
    if isinstance(key, np.ndarray | jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            return jnp.asarray(key)
        # What PRNGKey returns: two numbers, or two for each row.
        if key.dtype == np.uint32 and key.ndim in (1, 2) and key.shape[-1] == 2:
            return jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32")
    raise TypeError(
        f"key is of type {type(key).__name__}: expected jax.random.key(0), or such a key for each "
        "prompt"
    )
