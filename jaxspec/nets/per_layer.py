"""Embeddings for each layer, and the block at a layer's end that adds them (Gemma 4).

A token's embeddings for all layers are one row of a table. To each is added a part of a projection
of the token's ordinary embedding. They go through the network behind the stream
(`DecoderConfig.side`), and each layer reads its part.

Shapes: B batch, T step, M model dimension, P dimension of the embeddings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.nets.attention import ACTIVATIONS, Norm
from jaxspec.nets.dense import Dense, parameter
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.shapes import Block, DecoderConfig


@dataclasses.dataclass(frozen=True)
class PerLayerShape(Block):
    """The table of embeddings of all layers, for `DecoderConfig.side`.

    Attributes:
        dim: the dimension P of each of them.
        vocab_size: rows of the table.
    """

    dim: int
    vocab_size: int

    @property
    def parts(self) -> Mapping[str, int]:
        return {"vocab": self.vocab_size}

    @property
    def layouts(self) -> Mapping[str, tuple[str, ...]]:
        return {"side/table": ("vocab", "dim")}

    def share(self, path: str) -> float:
        # The table is looked up.
        if path.startswith("table"):
            return 0.0
        return 1.0

    def module(self, config: DecoderConfig) -> PerLayerEmbedding:
        return PerLayerEmbedding(
            self, len(config.layers), config.norm.epsilon, jnp.dtype(config.dtype)
        )


class PerLayerEmbedding(nn.Module):
    """The table, and the projection that is added."""

    shape: PerLayerShape
    layers: int
    epsilon: float
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        width = self.layers * self.shape.dim
        self.table = Embedding(self.shape.vocab_size, width, dtype=self.dtype)
        self.projection = Dense(width, dtype=self.dtype)
        self.norm = Norm(self.epsilon, dtype=self.dtype)

    def __call__(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T M"]
    ) -> Float[Array, "B T layers P"]:
        """Embeds tokens for all layers; `x` are their ordinary embeddings."""
        shape = (*tokens.shape, self.layers, self.shape.dim)
        # Vectors that a drafter lends the network are no tokens: they have the row of padding.
        tokens = jnp.where(tokens < self.shape.vocab_size, tokens, 0)
        # The root is rounded to the table's dtype, as Gemma does with that of the ordinary
        # embedding.
        looked_up = self.table(tokens).reshape(shape) * jnp.asarray(self.shape.dim**0.5, self.dtype)
        projected = _times(self.projection(x), x.shape[-1] ** -0.5).reshape(shape)
        return _times(self.norm(projected) + looked_up, 2**-0.5)


@dataclasses.dataclass(frozen=True)
class LayerEndShape(Block):
    """The block at a layer's end, for `LayerShape.last`: it adds the layer's embedding and scales
    the stream.

    Attributes:
        dim: the dimension of the embedding; 0: none is added.
        activation: the field of `shapes.FeedForwardShape`.
    """

    dim: int = 0
    activation: str = "gelu"

    def module(self, config: DecoderConfig) -> LayerEnd:
        return LayerEnd(self, config.dim, config.norm.epsilon, jnp.dtype(config.dtype), parent=None)


class LayerEnd(nn.Module):
    """Adds `norm(out(act(gate(x)) * side))` to the stream, and multiplies it with one number."""

    shape: LayerEndShape
    dim: int
    epsilon: float
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        if self.shape.dim:
            self.gate = Dense(self.shape.dim, dtype=self.dtype)
            self.out = Dense(self.dim, dtype=self.dtype)
            self.norm = Norm(self.epsilon, dtype=self.dtype)
        self.scalar: Array = parameter(self, "scalar", nn.initializers.ones, (1,))

    def __call__(
        self, x: Float[Array, "B T M"], side: Float[Array, "B T P"] | None
    ) -> Float[Array, "B T M"]:
        """Computes the block; see `shapes.LayerShape.last`."""
        if self.shape.dim:
            assert side is not None
            x = x + self.norm(self.out(ACTIVATIONS[self.shape.activation](self.gate(x)) * side))
        return x * self.scalar.astype(x.dtype)[None, None]


def _times(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """Multiplies in float32, as PyTorch does with a number."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
