"""Says before a run whether its arrays fit the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax.extend.core import jaxprs_in_params
from rich import filesize

from jaxspec import sharding
from jaxspec.core import chunks

WIDE = 2**12  # tokens of a prompt, and
LONG = 2**16  # tokens of all rows: above any of these it is asked whether memory can hold them


def size_of(state: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes.

    >>> import numpy as np
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
    jaxspec.decode.device_memory.NotEnoughMemory: 2**40 new tokens take 1.2 EB of memory (weights 1.0 GB, caches ...
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
