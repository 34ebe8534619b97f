"""Rotary positions (Su et al., arXiv 2104.09864): queries and keys are rotated by angles that grow with position.

Shapes: B batch, T step, H heads, D head dimension, F = D / 2 frequencies.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

SCALINGS = ("default", "linear", "llama3")


class RopeScaling(NamedTuple):
    """How a model trained on short rows was made to read longer ones: its frequencies are lowered.

    Attributes:
        kind: "default" leaves them alone; "linear" divides all by `factor`; "llama3" those whose wavelength is
            longer than the original context, and passes smoothly to those that are left alone.
        factor: the divisor.
        low, high: of llama3: wavelengths above original / low are divided, those below original / high are not.
        original: of llama3: the context of the training.
    """

    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


class Rotation(NamedTuple):
    """Cosines and sines of each fed token's angles."""

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]


def frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians per position, from 1 down to nearly 1 / base; float32.

    >>> frequencies(4, 100.0).round(4).tolist()
    [1.0, 0.10000000149011612]
    >>> frequencies(4, 100.0, RopeScaling("linear", 2.0)).round(4).tolist()
    [0.5, 0.05000000074505806]
    """
    scaling = scaling or RopeScaling()
    # In float32, as every published implementation has it: at position 100,000 the last bit is a tenth of a degree.
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1.0) / np.float32(base) ** exponent).astype(np.float32)
    if scaling.kind == "default":
        return plain
    slow = plain / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    wavelength = 2 * math.pi / plain
    blend = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    blend = np.clip(blend, 0.0, 1.0).astype(np.float32)
    return (1 - blend) * slow + blend * plain


def rotation(position: Int[Array, "B T"], frequency: np.ndarray) -> Rotation:
    """The rotation of each position, computed in float32."""
    angle = position.astype(jnp.float32)[:, :, None] * jnp.asarray(frequency)[None, None, :]
    return Rotation(jnp.cos(angle), jnp.sin(angle))


def rotate(x: Float[Array, "B H T D"], rotary: Rotation) -> Float[Array, "B H T D"]:
    """Rotates dimensions i and i + D / 2, as a pair, by the angle of frequency i.

    >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> rotate(x, rotation(jnp.array([[1]]), np.array([np.pi / 2]))).round(3).tolist()
    [[[[-0.0, 1.0]]]]
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
