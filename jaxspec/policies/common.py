"""What policies share: checks of their values, states that never change, what a law is read for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.base import Draft, Law, Params, Prompt, Verdict


def checked(value: Any, name: str, low: float, high: float, dtype: Any = np.float32) -> np.ndarray:
    """A number, or one per prompt.

    Raises:
        ValueError: one that is not between `low` and `high`, or not finite.

    >>> checked(0.5, "threshold", 0, 1).dtype
    dtype('float32')
    """
    array, largest = np.asarray(value), float(np.finfo(np.float32).max)  # infinity makes NaN of an average
    kinds = "iuf" if np.issubdtype(dtype, np.floating) else "iu"
    if array.dtype.kind not in kinds or array.ndim > 1 or not np.all((array >= low) & (array <= min(high, largest))):
        expected = f"a number from {low} to {high}" if np.isfinite(high) else f"a finite number of at least {low}"
        raise ValueError(f"{name} is {value!r}: expected {expected}, or one for each prompt")
    return array.astype(dtype)


def forgetful(params: Params, prompt: Prompt) -> tuple[()]:
    """The state of a policy that remembers nothing."""
    del params, prompt
    return ()


def unmoved(params: Params, state: Any, draft: Draft, verdict: Verdict, kept: Int[Array, " B"]) -> Any:
    """An update that changes nothing."""
    del params, draft, verdict, kept
    return state


def log_probs(law: Law) -> Float[Array, "B V"]:
    """The law of one position; where the temperature is 0, what it was at 1."""
    if law.soft is not None:
        return jax.nn.log_softmax(law.soft[:, 0], axis=-1)
    if law.log_probs is None:
        raise ValueError("this policy reads probabilities: make the warp greedy(soft=True), as jaxspec.generate does")
    return law.log_probs[:, 0]


def as_length(guesses: Float[Array, " B"]) -> Int[Array, " B"]:
    """A number of guesses, rounded.

    >>> as_length(jnp.array([1.4, 2.6])).tolist()
    [1, 3]
    """
    return jnp.round(guesses).astype(jnp.int32)
