"""Loops that end when nothing is left to do, in a form that `jaxspec.testing` can take apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Carry = TypeVar("Carry")


def up_to(
    most: int,
    body: Callable[[Int[Array, ""], Carry], Carry],
    carry: Carry,
    going: Callable[[Int[Array, ""], Carry], Bool[Array, ""]] | None = None,
) -> Carry:
    """`body(i, carry)` for i = 0 .. most - 1, but only while `going(i, carry)`.

    Use it where noise is drawn in a loop of a drafter or a rule: the certificate replaces this function by an unrolled
    one, so that each draw is a call of its own. It cannot see into a `while_loop`.

    >>> int(up_to(5, lambda i, total: total + i, jnp.int32(0), lambda i, total: total < 3))
    3
    """
    if going is None:
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(most), body, carry)

    def unfinished(state: tuple[Int[Array, ""], Carry]) -> Bool[Array, ""]:
        return jnp.logical_and(state[0] < most, going(*state))

    def step(state: tuple[Int[Array, ""], Carry]) -> tuple[Int[Array, ""], Carry]:
        return state[0] + 1, body(*state)

    return jax.lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), carry))[1]
