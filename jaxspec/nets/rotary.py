"""Rotary positions (Su et al., arXiv 2104.09864): queries and keys are rotated by angles that grow
with position.

Shapes: B batch, T step, H heads, D head dimension, F frequencies, D / 2 where all of a head is
rotated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The lower frequencies that let a model trained on short rows read longer ones.

    Attributes:
        kind: "default" leaves them alone, "linear" divides all by `factor`. "llama3" and "yarn"
            divide those that turn few times within the original context. Between these and the
            others llama3 goes by the number of turns, yarn by the number of the frequency (Peng et
            al., arXiv 2309.00071).
        factor: the divisor.
        low, high: bounds of llama3 and yarn, in turns: frequencies below low are divided, those
            above high are not.
        original: the context of the training, for llama3 and yarn.
        truncate: whether yarn rounds the numbers of the frequencies between which it passes
            outwards.
    """

    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotation of a layer's queries and keys.

    Attributes:
        base: the base of the frequencies.
        dims: how many dimensions of a head are rotated, the first ones; None for all.
        scaling: the change of the lower frequencies.
        magnitude: multiplies cosines and sines (YaRN).
        proportional: whether frequencies and pairs span the whole head; pairs beyond `dims` are not
            rotated (Gemma 4).
        factors: divisors of the frequencies, one for each; empty for none (Phi's "longrope").
        adjacent: whether dimensions 2 i and 2 i + 1 are a pair, not i and i + dims / 2 (Cohere,
            GLM-4).
        query_beta: queries are multiplied by 1 + query_beta ln(1 + floor(position /
            scaling.original)) (Ministral 3).
    """

    base: float = 10_000.0
    dims: int | None = None
    scaling: RopeScaling = RopeScaling()
    magnitude: float = 1.0
    proportional: bool = False
    adjacent: bool = False
    factors: tuple[float, ...] = ()
    query_beta: float = 0.0

    def at(self, position: Int[Array, "B T"], head_dim: int) -> Rotation:
        """Computes the rotation at some positions.

        >>> position = jnp.array([[1]])
        >>> for proportional in (False, True):
        ...     cos = Rotary(dims=4, proportional=proportional).at(position, 8).cos
        ...     print([f"{x:.3f}" for x in cos.ravel()])
        ['0.540', '1.000']
        ['0.540', '0.995', '1.000', '1.000']
        """
        if self.proportional:
            frequency = frequencies(head_dim, self.base, self.scaling)
            frequency = np.where(
                np.arange(len(frequency)) < (self.dims or head_dim) // 2, frequency, np.float32(0)
            )
        else:
            frequency = frequencies(self.dims or head_dim, self.base, self.scaling)
        if self.factors:
            frequency = frequency / np.asarray(self.factors, np.float32)
        turn = rotation(position, frequency, self.magnitude)
        if not self.query_beta:
            return turn
        # Attention over rows longer than those of the training stays as sharp: 1 within them, then
        # a little more.
        times = jnp.floor(position.astype(jnp.float32) / self.scaling.original)
        return turn._replace(query_scale=1 + self.query_beta * jnp.log1p(times))


class Rotation(NamedTuple):
    """Cosines and sines of each fed token's angles, and the factor of its queries where they have
    one.
    """

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]
    query_scale: Float[Array, "B T"] | None = None


def frequencies(head_dim: int, base: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns radians per position, from 1 down to nearly 1 / base; float32 [F].

    >>> frequencies(4, 100.0).round(4).tolist()
    [1.0, 0.10000000149011612]
    >>> frequencies(4, 100.0, RopeScaling("linear", 2.0)).round(4).tolist()
    [0.5, 0.05000000074505806]
    """
    scaling = scaling or RopeScaling()
    # In float32, as every published implementation has it: at position 100,000 the last bit is a
    # tenth of a degree.
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1.0) / np.float32(base) ** exponent).astype(np.float32)
    if scaling.kind == "default":
        return plain
    # Positions divided by the factor fall into the range that was trained on.
    slow = plain / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return slow
    if scaling.kind == "yarn":
        slowed = 1 - _passage(head_dim, base, scaling)
        return slow * (1 - slowed) + plain * slowed
    # Llama 3: long waves are slowed down, short ones stay, those between are blended.
    wavelength = 2 * math.pi / plain
    blend = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    blend = np.clip(blend, 0.0, 1.0).astype(np.float32)
    return (1 - blend) * slow + blend * plain


def _passage(head_dim: int, base: float, scaling: RopeScaling) -> np.ndarray:
    """Returns how far each frequency is divided, from 0 to 1, as YaRN has it."""

    def number(turns: float) -> float:
        return head_dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = number(scaling.high)
    last = number(scaling.low)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    width = last - first or 0.001
    return np.clip(
        (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Returns YaRN's factor on cosines and sines, which keeps attention over longer rows as sharp.

    >>> round(yarn_magnitude(4.0), 4)
    1.1386
    """
    if factor <= 1:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def rotation(
    position: Int[Array, "B T"], frequency: np.ndarray, magnitude: float = 1.0
) -> Rotation:
    """Computes the rotation of each position in float32; `magnitude` is multiplied in."""
    angle = position.astype(jnp.float32)[:, :, None] * jnp.asarray(frequency)[None, None, :]
    if magnitude == 1.0:
        return Rotation(jnp.cos(angle), jnp.sin(angle))
    return Rotation(jnp.cos(angle) * magnitude, jnp.sin(angle) * magnitude)


def pairs_apart(x: Float[Array, "B H T D"], dims: int) -> Float[Array, "B H T D"]:
    """Moves the two of each adjacent pair, among the first `dims` dimensions, to where `rotate`
    expects them.

    Queries and keys are moved alike, so their products stay as they are.

    >>> pairs_apart(jnp.arange(6.0).reshape(1, 1, 1, 6), 4).astype(int).ravel().tolist()
    [0, 2, 1, 3, 4, 5]
    """
    pairs = x[..., :dims].reshape(*x.shape[:-1], dims // 2, 2)
    apart = jnp.swapaxes(pairs, -1, -2).reshape(*x.shape[:-1], dims)
    if dims == x.shape[-1]:
        return apart
    return jnp.concatenate([apart, x[..., dims:]], axis=-1)


def rotate(x: Float[Array, "B H T D"], rotary: Rotation) -> Float[Array, "B H T D"]:
    """Rotates dimensions i and i + F, as a pair, by the angle of frequency i; those from 2 F on
    stay.

    >>> x = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> rotate(x, rotation(jnp.array([[1]]), np.array([np.pi / 2]))).round(3).tolist()
    [[[[-0.0, 1.0]]]]
    """
    # Halves are paired, i with i + F, as transformers has it; `pairs_apart` brings adjacent pairs
    # into this order.
    sin = rotary.sin[:, None]
    turned = 2 * rotary.cos.shape[-1]
    cos = rotary.cos[:, None]
    first, second = jnp.split(x[..., :turned].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)
    if turned == x.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x[..., turned:]], axis=-1)
