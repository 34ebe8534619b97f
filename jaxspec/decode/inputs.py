"""Reads users' keys, end tokens and option names, with clear errors; `encoding` reads prompts."""

from __future__ import annotations

import importlib
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.core import Tracer
from jax.extend.core import jaxprs_in_params
from rich import filesize

from jaxspec import sharding
from jaxspec.core import LanguageModel, Model, chunks
from jaxspec.sampling.params import as_list

LOADED = ("target", "drafter")  # arguments that are models
MOST = 2**29  # new tokens: what a row holds is counted in int32
WIDE = 2**12  # tokens of a prompt, and
LONG = 2**16  # tokens of all rows: above any of these it is asked whether memory can hold them


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


def end_ids(eos_ids: Any, tokenizer: Any, name: str = "eos_ids") -> list[int]:
    """End tokens as ids: one or several, by id or by name."""
    ids = []
    for end in as_list(eos_ids):
        if isinstance(end, str):
            if tokenizer is None:
                raise ValueError(
                    f"{name} has {end!r}, and this model has no tokenizer: give its id"
                )
            vocabulary = tokenizer.get_vocab()
            if end not in vocabulary:
                raise ValueError(f"{name} has {end!r}, which is not a token of the target's")
            end = vocabulary[end]
        ids.append(end)
    return ids


def size_of(state: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes.

    >>> size_of({"a": np.zeros((2, 3), np.float32)})
    24
    """
    return sum(
        x.size * (4 if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x.dtype.itemsize)
        for x in jax.tree.leaves(state)
    )


def sizes_of(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[int, int]:
    """Returns the bytes of a function's results, and of the largest array that it makes on the way.

    The latter is one of all rows, the batch first, that is not kept for each position of long rows:
    such as the scores or the hidden layer of a chunk. A compiled program takes at least as much
    besides its arguments and results.

    >>> sizes_of(lambda x: jnp.sum(jnp.sin(x[:, None] + x[:, :, None]), axis=1), jnp.ones((2, 8)))
    (64, 512)
    """
    # The program is traced and not compiled. Bodies of loops and branches are programs in an
    # operation's parameters.
    program, outputs = jax.make_jaxpr(function, return_shape=True)(*arguments, **named)
    returned = {x.shape for x in jax.tree.leaves(outputs)}
    batches = {shape[0] for shape in returned}

    def counts(shape: tuple[int, ...]) -> bool:
        return (
            shape[0] in batches
            and max(shape[1:2], default=0) <= chunks.LONGEST
            and shape not in returned
        )

    def largest(program: Any) -> int:
        sizes = [0]
        for step in program.eqns:
            sizes += [largest(inner) for inner in jaxprs_in_params(step.params)]
            sizes += [
                size_of(x.aval)
                for x in step.outvars
                if getattr(x.aval, "shape", ()) and counts(x.aval.shape)
            ]
        return max(sizes)

    return size_of(outputs), largest(program.jaxpr)


def is_large(batch: int, width: int, more: int) -> bool:
    """Says whether rows of prompts `width` wide, with so many more tokens, may be too much for the
    memory.
    """
    return width > WIDE or batch * (width + more) > LONG


def devices(weights: Any) -> int:
    """Counts the devices that share parameters."""
    mesh = sharding.mesh_of(weights)
    if mesh is None:
        return 1
    return mesh.size


class NotEnoughMemory(ValueError):
    """A request needs more memory than the device has."""


def check_memory(parts: Mapping[str, int], purpose: str, lower: str, devices: int = 1) -> None:
    """Raises NotEnoughMemory for a request for more bytes than so many devices like the first have,
    and says how much would fit.

    Args:
        parts: bytes by what takes them; "weights", if among them, cannot be lowered.
        purpose: the request, in words.
        lower: the option to lower, so that the largest part becomes smaller.
        devices: the number of devices that share the parts.

    >>> parts = {"weights": 10**9, "caches and rows": 2**60}
    >>> check_memory(parts, "2**40 new tokens", "max_new_tokens")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    jaxspec.decode.inputs.NotEnoughMemory: 2**40 new tokens take 1.2 EB of memory (weights 1.0 GB, caches ...
    """
    # A CPU has no limit of its own: there it is the host's memory.
    stats = jax.local_devices()[0].memory_stats() or {}
    available = devices * stats.get("bytes_limit", 0) or psutil.virtual_memory().total
    needed = sum(parts.values())
    if needed <= available:
        return
    listed = ", ".join(f"{name} {filesize.decimal(size)}" for name, size in parts.items())
    # Only the largest part is lowered: how much of it would fit beside the others.
    largest = max(size for name, size in parts.items() if name != "weights")
    room = max(0, available - (needed - largest))
    raise NotEnoughMemory(
        f"{purpose} take {filesize.decimal(needed)} of memory ({listed}), and there are "
        f"{filesize.decimal(available)}: lower {lower} (about {room / largest:.1%} of it would fit)"
    )
