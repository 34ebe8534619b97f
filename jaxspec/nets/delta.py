"""The gated delta rule (Yang et al., arXiv 2412.06464): a layer whose state does not grow with its
row.

Each head has a matrix from keys to values. A token makes it forget by a factor, then corrects what
it has for the token's key towards the token's value, and reads it with the token's query. Queries,
keys and values come from a short convolution over the last tokens' projections, which is part of
the state.

It has two forms. `DeltaRule.step` reads one token, in decoding and in the passes of rounds.
`DeltaRule.many` reads a prompt in chunks of CHUNK tokens by matrix products. Within a chunk the
corrections form a triangular system.

Shapes: B batch, T step, N tokens, C chunk, Hk key heads, H value heads, K and V their dimensions, M
model dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import kv_cache as kv
from jaxspec.nets.attention import LayerInputs, Norm
from jaxspec.nets.dense import Dense, parameter, precision
from jaxspec.nets.shapes import DecoderConfig, Mixer

CHUNK = 64
DeltaState = dict[str, Array]
"""`inputs` [B, kernel - 1, 2 Hk K + H V], the last tokens' projections, and `memory` [B, H, K, V]
in float32.
"""
DeltaEntries = dict[str, Array]
"""Of each token [B, N, ...]: `inputs`, its projections, and by head the logarithm `decay` <= 0 and
the rate `beta`.
"""
LAYOUTS = MappingProxyType(
    {f"attention/{name}": ("heads", "dim") for name in ("gate", "decay", "beta")}
)


@dataclasses.dataclass(frozen=True)
class DeltaShape(Mixer):
    """A layer of the gated delta rule, in place of attention.

    Attributes:
        key_heads, value_heads: heads of queries and keys, and heads of values; consecutive ones
            share a key.
        key_dim, value_dim: their dimensions.
        kernel: tokens that the convolution reads, the token's own included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads cannot share {self.key_heads} keys: expected a "
                "divisor"
            )

    @property
    def width(self) -> int:
        """The channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def parts(self) -> Mapping[str, int]:
        # Heads that share a key stay together.
        return {"heads": self.key_heads, "kv_heads": self.key_heads}

    @property
    def layouts(self) -> Mapping[str, tuple[str, ...]]:
        return LAYOUTS

    def module(self, config: DecoderConfig) -> Delta:
        return Delta(self, config.dim, config.norm.epsilon, jnp.dtype(config.dtype), parent=None)

    def cache(self, config: DecoderConfig) -> kv.CacheMaker:

        def of(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sizes, dtype)

        dtype = jnp.dtype(config.dtype)
        heads = self.value_heads
        state = {
            "inputs": of(self.kernel - 1, self.width, dtype=dtype),
            "memory": of(heads, self.key_dim, self.value_dim),
        }
        return kv.recurrent(
            state, {"inputs": of(self.width, dtype=dtype), "decay": of(heads), "beta": of(heads)}
        )


class Delta(nn.Module):
    """The projections, the recurrence and the gated norm of its output."""

    shape: DeltaShape
    dim: int
    epsilon: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def mix(
        self, x: Float[Array, "B T M"], read: Callable[..., Any], inputs: LayerInputs
    ) -> tuple[Float[Array, "B T M"], Any]:
        """Computes the layer's output and its record; see `shapes.Mixer`."""
        s = self.shape

        def dense(name: str, features: int) -> Any:
            return Dense(features, dtype=self.dtype, name=name)

        keys = s.key_heads * s.key_dim
        values = s.value_heads * s.value_dim
        projected = [
            dense(name, size)(x)
            for name, size in (("query", keys), ("key", keys), ("value", values))
        ]
        # Float32 from here on: a factor of each token is multiplied into all that was ever
        # remembered.
        rate = parameter(self, "rate", nn.initializers.zeros, (s.value_heads,)).astype(jnp.float32)
        bias = parameter(self, "bias", nn.initializers.ones, (s.value_heads,)).astype(jnp.float32)
        decay = dense("decay", s.value_heads)(x).astype(jnp.float32) + bias[None, None]
        entries = {
            "inputs": jnp.concatenate(projected, axis=-1),
            "decay": -jnp.exp(rate)[None, None] * jax.nn.softplus(decay),
            "beta": jax.nn.sigmoid(dense("beta", s.value_heads)(x)).astype(jnp.float32),
        }
        kernel = parameter(self, "convolution", nn.initializers.normal(0.3), (s.width, 1, s.kernel))
        rule = DeltaRule(s, kernel[:, 0].T.astype(self.dtype))
        record = read(rule.step, entries, rule.many)
        mixed = Norm(self.epsilon, dtype=self.dtype, name="norm")(record.outputs.astype(self.dtype))
        gate = dense("gate", values)(x).reshape(mixed.shape).astype(jnp.float32)
        mixed = (mixed.astype(jnp.float32) * jax.nn.silu(gate)).astype(self.dtype)
        return dense("out", self.dim)(mixed.reshape(*x.shape[:2], values)), record


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """The recurrence in its two forms.

    Attributes:
        shape: the sizes.
        kernel: the convolution's weights [kernel, channels], the oldest token's first.
    """

    shape: DeltaShape
    kernel: Float[Array, "kernel channels"]

    def step(
        self, state: DeltaState, entry: DeltaEntries
    ) -> tuple[DeltaState, Float[Array, "B H V"]]:
        """Reads one token; `entry` is without the axis of tokens."""
        window = jnp.concatenate([state["inputs"], entry["inputs"][:, None]], axis=1)
        query, key, value = (x[:, 0] for x in self._heads(window))
        # Products and sums of float32, no matrix products: they have the same bits however many
        # tokens a pass has.
        memory = state["memory"] * jnp.exp(entry["decay"])[:, :, None, None]
        error = value - jnp.sum(memory * key[:, :, :, None], axis=2)
        memory = memory + key[:, :, :, None] * (entry["beta"][:, :, None] * error)[:, :, None, :]
        read = jnp.sum(memory * query[:, :, :, None], axis=2)
        return {"inputs": window[:, 1:], "memory": memory}, read

    def many(
        self, state: DeltaState, entries: DeltaEntries, count: Int[Array, " B"]
    ) -> tuple[Float[Array, "B N H V"], DeltaState]:
        """Reads N tokens in chunks; returns their outputs, and the state after the first `count` of
        each row.
        """
        # [B, kernel - 1 + N, channels]
        window = jnp.concatenate([state["inputs"], entries["inputs"]], axis=1)
        last = count[:, None] + jnp.arange(self.shape.kernel - 1, dtype=count.dtype)[None, :]
        heads = [*self._heads(window), entries["decay"][..., None], entries["beta"][..., None]]
        outputs, memory = chunked(tuple(heads), state["memory"], count)
        return outputs, {
            "inputs": jnp.take_along_axis(window, last[:, :, None], axis=1),
            "memory": memory,
        }

    def _heads(self, window: Float[Array, "B _ channels"]) -> tuple[Float[Array, "B N H _"], ...]:
        """Mixes neighbouring tokens; returns queries, keys and values of every value head, in
        float32.
        """
        s = self.shape
        taps = self.shape.kernel
        size = window.shape[1] - taps + 1
        kernel = self.kernel.astype(jnp.float32)[:, None, None, :]
        wide = (window[:, i : i + size].astype(jnp.float32) * kernel[i] for i in range(taps))
        mixed = jax.nn.silu(sum(wide, jnp.float32(0)).astype(window.dtype)).astype(jnp.float32)
        query, key, value = jnp.split(
            mixed, (s.key_heads * s.key_dim, 2 * s.key_heads * s.key_dim), axis=-1
        )

        def normed(x: Array) -> Array:
            x = x.reshape(*x.shape[:2], s.key_heads, s.key_dim)
            x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
            return jnp.repeat(x, s.value_heads // s.key_heads, axis=2)

        return (
            normed(query) * s.key_dim**-0.5,
            normed(key),
            value.reshape(*value.shape[:2], s.value_heads, s.value_dim),
        )


def chunked(
    tokens: Sequence[Float[Array, "B N H _"]],
    memory: Float[Array, "B H K V"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B N H V"], Float[Array, "B H K V"]]:
    """Computes the gated delta rule by matrix products over CHUNK tokens at a time, in float32.

    Let k_i be the keys of a chunk, w_i its tokens' updates, and G_i the sum of decays up to token
    i. The memory after token i is exp(G_i) S + sum_{j <= i} exp(G_i - G_j) k_j w_j^T. Token i
    writes beta_i times its error, which is v_i - exp(G_i) S^T k_i - sum_{j < i} exp(G_i - G_j) (k_j
    k_i) w_j: a triangular system.

    Args:
        tokens: queries and keys [B, N, H, K], values [B, N, H, V], logarithms of decays and rates
            beta [B, N, H, 1].
        memory: the state S before them.
        count: the number of tokens of each row after which the state is wanted.

    Returns:
        What each token reads, and the state after `count` tokens.
    """
    batch, total, heads, _ = tokens[0].shape
    size = min(CHUNK, total)
    exact = precision(jnp.dtype(jnp.float32))
    chunks = -(-total // size)

    def by_chunks(x: Array) -> Array:
        """Splits the axis of tokens: [B, N, H, D] -> [chunks, B, H, C, D]."""
        x = jnp.pad(x, ((0, 0), (0, size * chunks - total), (0, 0), (0, 0)))
        return x.reshape(batch, chunks, size, heads, -1).transpose(1, 0, 3, 2, 4)

    def product(pattern: str, x: Array, y: Array) -> Array:
        return jnp.einsum(pattern, x, y, precision=exact)

    index = jnp.arange(size, dtype=count.dtype)
    order = (index[:, None] - index[None, :])[None, None]  # [1, 1, C, C]

    def next_chunk(
        carry: tuple[Array, Array], fed: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        (memory, kept), (start, query, key, value, decay, beta) = carry, fed
        total = jnp.cumsum(decay, axis=2)  # G, [B, H, C, 1]
        # Decays of tokens j + 1 to i are summed by themselves: a difference of two long sums would
        # lose two digits.
        between = jnp.cumsum(jnp.where(order > 0, decay, 0.0), axis=2)  # G_i - G_j, [B, H, C, C]
        # Masked before the exponential, which would be 1 above the diagonal.
        faded = jnp.exp(jnp.where(order >= 0, between, -jnp.inf))
        seen = jnp.where(order > 0, beta * product("bhik,bhjk->bhij", key, key) * faded, 0.0)
        error = value - jnp.exp(total) * product("bhik,bhkv->bhiv", key, memory)
        written = jax.lax.linalg.triangular_solve(
            seen, beta * error, left_side=True, lower=True, unit_diagonal=True
        )  # only what lies below the diagonal is read
        scores = product("bhik,bhjk->bhij", query, key) * faded
        outputs = jnp.exp(total) * product("bhik,bhkv->bhiv", query, memory)
        outputs = outputs + product("bhij,bhjv->bhiv", scores, written)

        def after(read: Int[Array, " #B"]) -> Array:
            """The memory after the first few tokens of the chunk, at least one."""
            # [B, H, 1, 1]
            end = jnp.take_along_axis(total, (read - 1)[:, None, None, None], axis=2)
            is_read = (index[None] < read[:, None])[:, None, :, None]
            row = jnp.broadcast_to((read - 1)[:, None, None, None], (batch, 1, 1, size))
            to_end = jnp.swapaxes(jnp.take_along_axis(between, row, axis=2), 2, 3)  # [B, H, C, 1]
            faded_keys = key * jnp.exp(jnp.where(is_read, to_end, -jnp.inf))
            return jnp.exp(end) * memory + product("bhik,bhiv->bhkv", faded_keys, written)

        remaining = count - start  # tokens from here on to the state that is returned
        partial_state = after(jnp.clip(remaining, 1, size))
        kept = jnp.where((remaining > 0)[:, None, None, None], partial_state, kept)
        return (after(jnp.full((1,), size, count.dtype)), kept), outputs

    starts = size * jnp.arange(chunks, dtype=count.dtype)
    fed = (starts, *map(by_chunks, tokens))
    (_, kept), outputs = jax.lax.scan(next_chunk, (memory, memory), fed)
    return outputs.transpose(1, 0, 3, 2, 4).reshape(batch, size * chunks, heads, -1)[
        :, :total
    ], kept
