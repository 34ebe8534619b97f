"""Multi-head attention over a key-value cache, and the feed-forward block: what every network here is made of.

Shapes: B batch, T step, S keys, H query heads, K key-value heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.nets.dense import Dense, parameter, precision
from jaxspec.nets.rotary import Rotation, rotate

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
}
MASKED = -1e30  # finite: a fully masked row (a padded prompt position) averages garbage instead of becoming NaN


class Attention(nn.Module):
    """The projections and the softmax between them; masks, biases and the cache are the caller's.

    Attributes:
        heads, kv_heads: query heads, and key-value heads that groups of them share.
        head_dim, dim: per-head and model dimension.
        scale: multiplies the scores (T5 folds it into its initialisation and uses 1).
        qkv_bias, out_bias: whether the projections have biases.
        softcap: scores s become cap * tanh(s / cap), and so stay between -cap and cap.
        head_norm: makes the normalisation of each query head and each key head, before they are rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    scale: float = 1.0
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float | None = None
    head_norm: Callable[[], nn.Module] | None = None
    init_scale: float = 1.0
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        def dense(features: int, scale: float, use_bias: bool):
            init = nn.initializers.variance_scaling(scale**2, "fan_in", "normal", in_axis=-1, out_axis=-2)
            return Dense(features, use_bias, self.dtype, init)

        query_scale = self.init_scale if self.scale != 1.0 else self.init_scale * self.head_dim**-0.5
        self.query = dense(self.heads * self.head_dim, query_scale, self.qkv_bias)
        self.key = dense(self.kv_heads * self.head_dim, self.init_scale, self.qkv_bias)
        self.value = dense(self.kv_heads * self.head_dim, self.init_scale, self.qkv_bias)
        self.out = dense(self.dim, self.init_scale, self.out_bias)
        if self.head_norm is not None:
            self.query_norm, self.key_norm = self.head_norm(), self.head_norm()

    def keys_values(
        self, x: Float[Array, "B T M"], rotary: Rotation | None = None
    ) -> tuple[Float[Array, "B K T D"], Float[Array, "B K T D"]]:
        """Makes keys and values of `x`, in the cache's layout; keys are rotated by `rotary`."""
        keys, values = self._split(self.key(x), self.kv_heads), self._split(self.value(x), self.kv_heads)
        if self.head_norm is not None:
            keys = self.key_norm(keys)
        return (keys if rotary is None else rotate(keys, rotary)), values

    def __call__(
        self,
        x: Float[Array, "B T M"],
        keys: Float[Array, "B K S D"],
        values: Float[Array, "B K S D"],
        mask: Bool[Array, "#B 1 T S"],
        bias: Float[Array, "#B #H T S"] | None = None,
        rotary: Rotation | None = None,
    ) -> Float[Array, "B T M"]:
        """Attends from `x` to the keys and values that `mask` allows; `bias` is added to the scores.

        Garbage in masked keys, NaN included, has no effect; garbage in masked values must be finite.
        """
        B, T, _ = x.shape
        group = self.heads // self.kv_heads  # query heads that share a key-value head
        query = self._split(self.query(x), self.heads)
        if self.head_norm is not None:
            query = self.query_norm(query)
        if rotary is not None:
            query = rotate(query, rotary)
        # [B, K, G T, D]: a group's heads stand one after the other on the axis of steps; one product serves them all.
        query = query.reshape(B, self.kv_heads, group * T, self.head_dim)
        exact = precision(self.dtype)
        scores = jnp.einsum("bktd,bksd->bkts", query, keys, precision=exact, preferred_element_type=jnp.float32)
        scores = scores.reshape(B, self.heads, T, keys.shape[2]) * self.scale  # [B, H, T, S], as mask and bias
        if self.softcap is not None:
            scores = softcap(scores, self.softcap)
        if bias is not None:
            scores = scores + bias
        scores = jnp.where(mask, scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(self.dtype)
        weights = weights.reshape(B, self.kv_heads, group * T, keys.shape[2])
        mixed = jnp.einsum("bkts,bksd->bktd", weights, values, precision=exact)
        mixed = mixed.reshape(B, self.heads, T, self.head_dim).transpose(0, 2, 1, 3)
        return self.out(mixed.reshape(B, T, self.heads * self.head_dim))

    def _split(self, x: Float[Array, "B T _"], heads: int) -> Float[Array, "B heads T D"]:
        return x.reshape(x.shape[0], x.shape[1], heads, self.head_dim).transpose(0, 2, 1, 3)


def softcap(x: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """Squeezes values into (-cap, cap), nearly unchanged where small (Gemma 2, arXiv 2408.00118).

    >>> [f"{x:.2f}" for x in softcap(jnp.array([1.0, 10.0, 100.0]), 30.0)]
    ['1.00', '9.65', '29.92']
    """
    return cap * jnp.tanh(x / cap)


class FeedForward(nn.Module):
    """Two or, when gated, three projections: `out(act(wi(x)))` or `out(act(gate(x)) * wi(x))`."""

    dim: int
    hidden: int
    activation: str
    gated: bool = False
    use_bias: bool = False
    init_scale: float = 1.0
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        def dense(features: int, name: str):
            init = nn.initializers.variance_scaling(self.init_scale**2, "fan_in", "normal", in_axis=-1, out_axis=-2)
            return Dense(features, self.use_bias, self.dtype, init, name=name)

        act = ACTIVATIONS[self.activation]
        hidden = act(dense(self.hidden, "gate" if self.gated else "wi")(x))
        if self.gated:
            hidden = hidden * dense(self.hidden, "wi")(x)
        return dense(self.dim, "out")(hidden)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in float32, without mean or bias (T5's layer norm).

    Attributes:
        unit_offset: whether what is stored is the scale minus 1 (Gemma).
    """

    epsilon: float = 1e-6
    unit_offset: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*batch M"]) -> Float[Array, "*batch M"]:
        start = nn.initializers.zeros if self.unit_offset else nn.initializers.ones
        scale = parameter(self, "scale", start, (x.shape[-1],))
        scale = jnp.expand_dims(1.0 + scale if self.unit_offset else scale, range(x.ndim - 1))
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(self.dtype)


class LayerNorm(nn.Module):
    """Normalisation to mean 0 and variance 1 in float32, with scale and bias."""

    epsilon: float = 1e-5
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        scale = parameter(self, "scale", nn.initializers.ones, (x.shape[-1],))
        bias = parameter(self, "bias", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale[None, None, :] + bias[None, None, :]).astype(self.dtype)
