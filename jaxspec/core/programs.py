"""Compiled programs of functions that are given functions: those of the last decoders and models, not of all ever."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax

KEPT = 128  # combinations of static arguments, as `functools.lru_cache` keeps by default

Result = TypeVar("Result")


class Jitted(Generic[Result]):
    """A function as `jax.jit` compiles it, that forgets the programs of static arguments that were not used for long.

    `jax.jit` holds on to every static argument, and so to each decoder or model that a long-lived process ever made,
    with its programs. Here each combination of static arguments has a jitted function of its own, which goes with them.
    """

    def __init__(self, function: Callable[..., Result], static_argnames: Sequence[str], kept: int, options: Any):
        functools.update_wrapper(self, function)
        self._signature, self._static = inspect.signature(function), tuple(static_argnames)
        self._alive = alive = weakref.WeakSet[Any]()

        @functools.lru_cache(kept)
        def program(*static: Any) -> Any:
            bound = functools.partial(function, **dict(zip(static_argnames, static, strict=True)))
            jitted = jax.jit(bound, **options)
            alive.add(jitted)
            return jitted

        self._program = program

    def _of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The program for some arguments, and those of them that are traced."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._program(*(bound.arguments.pop(name) for name in self._static)), bound.arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        program, traced = self._of(args, kwargs)
        return program(**traced)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program, as `jax.jit(...).lower` does."""
        program, traced = self._of(args, kwargs)
        return program.lower(**traced)

    def num_programs(self) -> int:
        """Counts the programs that are kept, compiled."""
        return sum(program._cache_size() for program in self._alive)


def jit(
    static_argnames: Sequence[str], *, kept: int = KEPT, **options: Any
) -> Callable[[Callable[..., Result]], Jitted[Result]]:
    """Decorates a function as `jax.jit` does, for static arguments that are functions, or hold some; see `Jitted`.

    Args:
        static_argnames: the static ones, by name.
        kept: of how many combinations of them the programs are kept.
        **options: further ones of `jax.jit`.

    >>> import jax.numpy as jnp
    >>> @jit(static_argnames=("activation",), kept=2)
    ... def layer(activation, x):
    ...     return activation(2 * x)
    >>> [float(layer(f, jnp.array(1.0))) for f in (jnp.negative, jnp.sqrt, jnp.square, jnp.square)]
    [-2.0, 1.4142135381698608, 4.0, 4.0]
    >>> layer.num_programs()
    2
    """
    return lambda function: Jitted(function, static_argnames, kept, options)
