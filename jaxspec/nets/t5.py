"""T5 (Raffel et al., arXiv 1910.10683) and T5 v1.1: encoder-decoders with relative position biases.

v1.1 has a gated GELU feed-forward and its own output head; 1.0 has a ReLU one and reuses the embedding, scaled by
dim ** -0.5, as its head. Cross-attention keys and values are computed once, in prefill. Attention is not scaled (the
initialisation is), there are no biases, and normalisation is RMS.

Shapes: B batch, P prompt (encoder), T step (decoder), S cache capacity, H heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import cache as kv
from jaxspec.base import Forward, LanguageModel, Params, Prompt, Tree
from jaxspec.nets import stack
from jaxspec.nets.attention import Attention, FeedForward, RMSNorm
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.relative import RelativeBias, biases, distances


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The shape of a T5.

    Attributes:
        vocab_size: rows of the embedding (and columns of the head).
        dim, ff_dim, heads, head_dim: model, feed-forward, and attention sizes.
        encoder_layers, decoder_layers: depth of either side.
        activation, gated: "gelu" and True for v1.1, "relu" and False for 1.0.
        tied_head: whether the head is the embedding, scaled by dim ** -0.5 (1.0), or a matrix of its own (v1.1).
        buckets, max_distance: of the relative position biases.
        start_token: what the decoder's row begins with (T5 uses its padding id).
        max_positions: longest prompt and longest output to accept; T5's biases would go on for ever.
        dtype: of the computation: "float32" or "bfloat16". Logits are float32 always.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    heads: int
    head_dim: int
    encoder_layers: int
    decoder_layers: int
    activation: str = "gelu"
    gated: bool = True
    tied_head: bool = False
    buckets: int = 32
    max_distance: int = 128
    start_token: int = 0
    max_positions: int | None = None
    dtype: str = "float32"

    def __post_init__(self):
        if not 4 <= self.buckets < 2 * self.max_distance:
            raise ValueError(
                f"{self.buckets} buckets for distances up to {self.max_distance}: "
                "expected at least 4, and fewer than twice the distance"
            )
        if not 0 <= self.start_token < self.vocab_size:
            raise ValueError(f"the start token is {self.start_token}, expected an id from 0 to {self.vocab_size - 1}")


def _v11(dim: int, ff_dim: int, heads: int, layers: int) -> T5Config:
    return T5Config(32128, dim, ff_dim, heads, 64, layers, layers)


def _v10(dim: int, ff_dim: int, heads: int, head_dim: int, layers: int) -> T5Config:
    return T5Config(32128, dim, ff_dim, heads, head_dim, layers, layers, "relu", gated=False, tied_head=True)


SIZES = {  # the models of the paper's tables (v1.1) and their 1.0 ancestors
    "t5-v1_1-small": _v11(512, 1024, 6, 8),
    "t5-v1_1-base": _v11(768, 2048, 12, 12),
    "t5-v1_1-large": _v11(1024, 2816, 16, 24),
    "t5-v1_1-xl": _v11(2048, 5120, 32, 24),
    "t5-v1_1-xxl": _v11(4096, 10240, 64, 24),
    "t5-small": _v10(512, 2048, 8, 64, 6),
    "t5-base": _v10(768, 3072, 12, 64, 12),
    "t5-large": _v10(1024, 4096, 16, 64, 24),
    "t5-3b": _v10(1024, 16384, 32, 128, 24),
    "t5-11b": _v10(1024, 65536, 128, 128, 24),
}


Cross = tuple[Float[Array, "B H P D"], Float[Array, "B H P D"]]  # keys and values of an encoded prompt


class EncoderLayer(nn.Module):
    """Self-attention over the whole prompt, then the feed-forward block."""

    config: T5Config

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.attention_norm, self.ff_norm = RMSNorm(dtype=dtype), RMSNorm(dtype=dtype)
        self.attention = Attention(c.heads, c.heads, c.head_dim, c.dim, dtype=dtype)
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, c.gated, dtype=dtype)

    def __call__(self, x: Float[Array, "B P M"], mask: Bool[Array, "B 1 P P"], bias: Float[Array, "1 H P P"]):
        y = self.attention_norm(x)
        x = x + self.attention(y, *self.attention.keys_values(y), mask, bias)
        return x + self.ff(self.ff_norm(x))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to what the encoder read, then the feed-forward block."""

    config: T5Config

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.attention_norm, self.cross_norm, self.ff_norm = (RMSNorm(dtype=dtype) for _ in range(3))
        self.attention = Attention(c.heads, c.heads, c.head_dim, c.dim, dtype=dtype)
        self.cross = Attention(c.heads, c.heads, c.head_dim, c.dim, dtype=dtype)
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, c.gated, dtype=dtype)

    def cross_keys_values(self, encoded: Float[Array, "B P M"]) -> Cross:
        return self.cross.keys_values(encoded)

    def __call__(self, x: Float[Array, "B T M"], store: stack.Store, mask, bias, cross: Cross, cross_mask):
        """`store` takes this step's keys and values and returns all that may be attended to (the cache)."""
        y = self.attention_norm(x)
        keys, values = store(*self.attention.keys_values(y))
        x = x + self.attention(y, keys, values, mask, bias)
        x = x + self.cross(self.cross_norm(x), *cross, cross_mask)
        return x + self.ff(self.ff_norm(x)), keys, values


class T5Cache(NamedTuple):
    """The decoder's cache, and what prefill computed once.

    Attributes:
        decoder: self-attention keys and values.
        cross: keys and values of the encoded prompt, for each decoder layer.
        cross_mask: which encoder positions are real.
        bias: relative biases by distance, laid out so that the biases of one query are a contiguous slice.
    """

    decoder: kv.KVCache
    cross: tuple[Cross, ...]
    cross_mask: Bool[Array, "B 1 1 P"]
    bias: Float[Array, "H distances"]


class T5(nn.Module):
    """The network. `__call__` is teacher forcing; `prefill` and `extend` are the two halves of decoding."""

    config: T5Config

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=nn.initializers.normal(0.5))
        self.encoder_bias = RelativeBias(c.heads, c.buckets, c.max_distance, bidirectional=True)
        self.decoder_bias = RelativeBias(c.heads, c.buckets, c.max_distance, bidirectional=False)
        self.encoder = [EncoderLayer(c) for _ in range(c.encoder_layers)]
        self.decoder = [DecoderLayer(c) for _ in range(c.decoder_layers)]
        self.encoder_norm, self.decoder_norm = RMSNorm(dtype=dtype), RMSNorm(dtype=dtype)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, dtype=dtype)

    def __call__(self, prompt: Prompt, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of each decoder position, given the decoder's inputs (start token first)."""
        encoded, mask = self.encode(prompt)
        position = jnp.arange(tokens.shape[1])
        distance = position[None, :] - position[:, None]
        bias = self.decoder_bias(distance)[None]
        visible = (distance <= 0)[None, None]
        cross = [layer.cross_keys_values(encoded) for layer in self.decoder]
        x = stack.without_cache(self._decoder_layers(visible, bias, cross, mask), self.embedding(tokens))
        return self._forward(x, training=True).logits

    def encode(self, prompt: Prompt) -> tuple[Float[Array, "B P M"], Bool[Array, "B 1 1 P"]]:
        """The encoder's output, and which of its positions are real."""
        position = jnp.arange(prompt.tokens.shape[1], dtype=prompt.length.dtype)
        mask = (position[None, :] < prompt.length[:, None])[:, None, None, :]
        bias = self.encoder_bias(position[None, :] - position[:, None])[None]
        x = self.embedding(prompt.tokens)
        for layer in self.encoder:
            x = layer(x, mask, bias)
        return self.encoder_norm(x), mask

    def prefill(self, prompt: Prompt, capacity: int) -> tuple[Forward, T5Cache]:
        """Encodes, computes every layer's cross-attention keys and values, and feeds the start token."""
        c, batch = self.config, prompt.tokens.shape[0]
        encoded, mask = self.encode(prompt)
        cross = tuple(layer.cross_keys_values(encoded) for layer in self.decoder)
        empty = kv.empty(batch, c.decoder_layers, c.heads, capacity, c.head_dim, jnp.dtype(c.dtype))
        bias = self.decoder_bias(distances(capacity))
        made = T5Cache(empty, cross, mask, bias)
        return self.extend(made, jnp.full((batch, 1), c.start_token, jnp.int32))

    def extend(self, cache: T5Cache, tokens: Int[Array, "B T"], tree: Tree | None = None) -> tuple[Forward, T5Cache]:
        """Feeds `tokens` at each row's own length."""
        length, step, capacity = cache.decoder.length, tokens.shape[1], cache.decoder.keys[0].shape[2]
        mask = kv.mask(length, step, capacity, tree)[:, None]
        bias = biases(cache.bias, length, step, capacity, tree)
        layers = self._decoder_layers(mask, bias, cache.cross, cache.cross_mask)
        x, grown = stack.with_cache(layers, self.embedding(tokens), cache.decoder)
        return self._forward(x), cache._replace(decoder=grown)

    def _decoder_layers(self, mask, bias, cross: Iterable[Cross], cross_mask) -> list[stack.Layer]:
        told = {"mask": mask, "bias": bias, "cross_mask": cross_mask}
        return [functools.partial(layer, cross=x, **told) for layer, x in zip(self.decoder, cross, strict=True)]

    def _forward(self, x: Float[Array, "B T M"], training: bool = False) -> Forward:
        x = self.decoder_norm(x)
        return Forward(self.logits(x, training), x)

    def logits(self, x: Float[Array, "B T M"], training: bool = False) -> Float[Array, "B T V"]:
        """The head."""
        if self.config.tied_head:
            logits = self.embedding.logits(x * jnp.asarray(self.config.dim**-0.5, x.dtype), training)
        else:
            logits = self.head(x)
        return logits.astype(jnp.float32)


def language_model(config: T5Config) -> LanguageModel:
    """A T5 as pure functions of (params, ...), for `jaxspec.decode`.

    >>> import jax, jaxspec
    >>> config = T5Config(32, dim=16, ff_dim=32, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
    >>> lm = language_model(config)
    >>> params = init(config, jax.random.key(0))
    >>> prompt = Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(params, prompt, capacity=8)
    >>> forward.logits.shape, cache.decoder.length.tolist()
    ((2, 1, 32), [1, 1])
    """
    return _language_model(config)


@functools.cache
def _language_model(config: T5Config) -> LanguageModel:
    module = T5(config)

    def prefill(params, prompt, capacity):
        return module.apply({"params": params}, prompt, capacity, method="prefill")

    def extend(params, cache, tokens, tree=None):
        return module.apply({"params": params}, cache, tokens, tree, method="extend")

    def rewind(cache, length, path=None):
        return cache._replace(decoder=kv.rewind(cache.decoder, length, path))

    return LanguageModel(
        prefill,
        extend,
        rewind,
        config.vocab_size,
        config.start_token,
        config.max_positions,
        config.max_positions,
        stack.head_of(module),
    )


def init(config: T5Config, key: Key[Array, ""]) -> Params:
    """Random parameters: fan-in scaled matrices, attention queries scaled down by head_dim ** -0.5."""
    prompt = Prompt(jnp.zeros((1, 2), jnp.int32), jnp.full((1,), 2, jnp.int32))
    return jax.jit(T5(config).init)(key, prompt, jnp.zeros((1, 2), jnp.int32))["params"]
