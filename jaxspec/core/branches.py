"""Branches that change a cache in place, which those of `jax.lax.cond` and `jax.lax.switch` do not.

XLA puts the results of a conditional into new buffers. Every branch then copies the whole cache
before it writes one token to it. The loop around it copies it once more. What a loop carries, on
the other hand, is updated in place. So a branch is a loop here, which runs once or not at all. What
it updates has to be its carry: an array that it reads from outside and updates is copied. Loops
have no gradients in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Carry = TypeVar("Carry")
Outputs = TypeVar("Outputs")


def run_if(runs: Bool[Array, ""], update: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns the updated carry where that is wanted, and otherwise the carry as it is.

    >>> run_if(jnp.array(True), lambda cache: cache.at[0].set(5), jnp.zeros(2)).tolist()
    [5.0, 0.0]
    """

    def once(state: tuple[Bool[Array, ""], Carry]) -> tuple[Bool[Array, ""], Carry]:
        return jnp.zeros((), bool), update(state[1])

    with jax.named_scope("branch"):
        return jax.lax.while_loop(lambda state: state[0], once, (runs, carry))[1]


def run_or_zeros(
    runs: Bool[Array, ""], branch: Callable[[Carry], tuple[Outputs, Carry]], carry: Carry
) -> tuple[Outputs, Carry]:
    """Returns outputs and the updated carry where these are wanted, and otherwise zeros and the
    carry as it is.

    >>> outputs, carry = run_or_zeros(
    ...     jnp.array(False), lambda cache: (cache.sum(), cache + 1), jnp.ones(2)
    ... )
    >>> outputs.tolist(), carry.tolist()
    (0.0, [1.0, 1.0])
    """
    outputs = _zeros(branch, carry)
    return run_if(runs, lambda state: branch(state[1]), (outputs, carry))


def switch(
    index: Int[Array, ""],
    branches: Sequence[Callable[[Carry], tuple[Outputs, Carry]]],
    carry: Carry,
) -> tuple[Outputs, Carry]:
    """Runs the branch with the given number. Without such a branch the outputs are zeros and the
    carry stays.

    Each makes outputs of the same shapes, and updates the carry, which keeps its shapes.

    >>> writes = [lambda cache, n=n: (cache[n], cache.at[n].set(5.0)) for n in range(2)]
    >>> [leaf.tolist() for leaf in switch(jnp.array(1), writes, jnp.ones(2))]
    [1.0, [1.0, 5.0]]
    """
    outputs = _zeros(branches[0], carry)
    with jax.named_scope("one_of"):
        for number, branch in enumerate(branches):
            outputs, carry = run_if(
                index == number, lambda state, branch=branch: branch(state[1]), (outputs, carry)
            )
    return outputs, carry


def _zeros(branch: Callable[[Carry], tuple[Outputs, Carry]], carry: Carry) -> Outputs:
    shapes: Outputs = jax.eval_shape(branch, carry)[0]
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
