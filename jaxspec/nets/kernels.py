"""The place to put a kernel of your own instead of XLA's attention or product with a quantised
matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import Array

ArrayFunction = Callable[..., Array]
# Makes forms by the platform's name, for `jax.lax.platform_dependent`: ("cuda", ...). It is given
# the network's own form, for gradients, and what that is called with. No forms: XLA's stay.
Replacement = Callable[..., dict[str, ArrayFunction]]

_replacements: dict[str, Replacement] = {}


def forms(
    name: str, plain: ArrayFunction, *arrays: Any, **settings: Any
) -> dict[str, ArrayFunction]:
    """Returns the forms that replace the network's own while a program is traced, by platform.

    Args:
        name: "attention" (`nets.attention.attend`) or "product" (`nets.dense.product` with a
            quantised matrix).
        plain: the network's own form on that platform.
        *arrays: its arguments.
        **settings: other values that its result depends on.
    """
    replacement = _replacements.get(name)
    if replacement is None:
        return {}
    return replacement(plain, *arrays, **settings)


@contextlib.contextmanager
def replaced(**replacements: Replacement) -> Iterator[None]:
    """Replaces forms by their names; programs are traced anew, within and afterwards.

    XLA cannot split a kernel of yours over a mesh: load models without one.

    >>> def zeros(plain, x, matrix):
    ...     return {"default": lambda x, matrix: 0 * plain(x, matrix)}
    >>> with replaced(product=zeros):
    ...     sorted(forms("product", lambda x, matrix: x, 1, 2))
    ['default']
    """
    before = dict(_replacements)
    _replacements.update(replacements)
    jax.clear_caches()
    try:
        yield
    finally:
        _replacements.clear()
        _replacements.update(before)
        jax.clear_caches()
