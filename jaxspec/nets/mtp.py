"""Multi-token prediction: a further layer that was trained with the model, to draft what follows the next token.

DeepSeek-V3 (arXiv 2412.19437) and Qwen3-Next publish such modules beside their models' layers. A module joins the
target's features of a position with the token after it, runs one of the model's own layers, and uses the model's
embedding and head. To draft several tokens it is fed what it made.

Shapes: B batch, T step, M model dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import cache as kv
from jaxspec.base import Forward, Needs, Params, RecurrentHead, Shared
from jaxspec.nets import stack, unroll
from jaxspec.nets.attention import RMSNorm
from jaxspec.nets.decoder import AttentionInputs, DecoderConfig, DecoderLayer, rotation_of
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.target_parts import zeros


@dataclasses.dataclass(frozen=True)
class MTPConfig:
    """The shape of a module, and where the families differ.

    Attributes:
        layer: of its one layer, and of the model: vocabulary and width.
        hidden_first: whether the hidden state comes before the token where the two are joined (MiMo).
        feeds_normed: whether the module is fed its normalised output (Qwen, MiMo), or what comes before the norm
            (DeepSeek).
        zero_first: whether the embedding of the first pair is zeros (DeepSeek, MiMo).
        own_embedding, own_head: whether it has copies of these (DeepSeek), or takes the target's.
    """

    layer: DecoderConfig
    hidden_first: bool = False
    feeds_normed: bool = True
    zero_first: bool = False
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self):
        if self.layer.positions != "rotary" or any(self.layer.local) or self.layer.layers != 1:
            raise ValueError("expected one layer, with rotary positions and no window")


class MTP(nn.Module):
    """The network, by halves: `extend` and `logits` as `base.RecurrentHead` has them."""

    config: MTPConfig

    def setup(self):
        config, c = self.config, self.config.layer
        dtype = jnp.dtype(c.dtype)
        norm = functools.partial(RMSNorm, c.epsilon, c.norms_from_one, dtype)
        self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.fc = Dense(c.dim, dtype=dtype)
        self.layer = DecoderLayer(c)
        if config.own_embedding:
            init = nn.initializers.normal(0.02)
            self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=init)
        if config.own_head:
            self.head = Dense(c.vocab_size, dtype=dtype)

    def __call__(self, features: Float[Array, "B T M"], tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Teacher forcing over whole rows, with an embedding and a head of zeros where the target's are used."""
        c = self.config.layer
        cache = kv.empty(tokens.shape[0], 1, c.kv_heads, tokens.shape[1], c.head_dim, jnp.dtype(c.dtype))
        shared = zeros(c.dim, c.vocab_size)
        return self.logits(shared, self.extend(shared, cache, features, tokens)[0])

    def extend(
        self,
        shared: Shared,
        cache: kv.KVCache,
        hidden: Float[Array, "B T M"],
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B T M"], kv.KVCache]:
        length, step, capacity = cache.length, tokens.shape[1], cache.keys[0].shape[2]
        mask = kv.mask(length, step, capacity, parent)[:, None]
        x, layers = self._layers(shared, hidden, tokens, kv.positions(length, step, parent), mask)
        x, _, cache = stack.with_cache(layers, x, cache)
        return self._fed_on(x), cache

    def step(
        self,
        shared: Shared,
        hidden: Float[Array, "B S M"],
        tokens: Int[Array, "B S"],
        position: Int[Array, "1 S"],
        mask: Bool[Array, "1 1 S past"],
        past: unroll.Past,
    ) -> tuple[Float[Array, "B S M"], unroll.Past]:
        """`extend` over whole rows, in training: see `nets.unroll`."""
        x, layers = self._layers(shared, hidden, tokens, position, mask)
        x, past = unroll.with_past(layers, x, past)
        return self._fed_on(x), past

    def _layers(
        self,
        shared: Shared,
        hidden: Float[Array, "B T M"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        mask: Bool[Array, "#B 1 T S"],
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        """What goes into the layer, and this."""
        config, c = self.config, self.config.layer
        inputs = AttentionInputs(mask, rotation_of(c, position), None)
        embedded = self.embedding(tokens) if config.own_embedding else shared.embed(tokens)
        if config.zero_first:
            embedded = jnp.where((position == 0)[..., None], 0.0, embedded)
        joined = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x = self.fc(jnp.concatenate(joined[::-1] if config.hidden_first else joined, axis=-1))
        return x, [functools.partial(self.layer, inputs=inputs)]

    def _fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        return self.norm(x) if self.config.feeds_normed else x

    def logits(self, shared: Shared, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        x = hidden if self.config.feeds_normed else self.norm(hidden)
        return (self.head(x) if self.config.own_head else shared.logits(x)).astype(jnp.float32)


@functools.cache
def head(config: MTPConfig) -> RecurrentHead:
    """A module as pure functions, for `drafters.mtp`."""
    module, c = MTP(config), config.layer

    def read(params: Params, forward: Forward) -> Float[Array, "B T M"]:
        return forward.features

    def extend(params: Params, shared: Shared, cache, hidden, tokens, parent=None):
        return nn.apply(lambda net: net.extend(shared, cache, hidden, tokens, parent), module)({"params": params})

    def logits(params: Params, shared: Shared, hidden):
        return nn.apply(lambda net: net.logits(shared, hidden), module)({"params": params})

    def empty(batch: int, capacity: int) -> kv.KVCache:
        return kv.empty(batch, 1, c.kv_heads, capacity, c.head_dim, jnp.dtype(c.dtype))

    needs = Needs(c.vocab_size, c.dim, (), not config.own_embedding, not config.own_head)
    return RecurrentHead(read, empty, extend, kv.rewind, logits, needs)


@functools.cache
def unroll_of(config: MTPConfig) -> unroll.Unroll:
    """The module over whole rows, fed what it made, for training."""
    module = MTP(config)

    def run(params: Params, shared: Shared, forward: Forward, tokens: Array, depths: int) -> Float[Array, "B S K M"]:
        def step(params: Params, *arguments: Any, **named: Any):
            return nn.apply(lambda net: net.step(shared, *arguments, **named), module)({"params": params})

        return unroll.unrolled(step, params, forward.features, tokens, depths)

    return run


def init(config: MTPConfig, key: Key[Array, ""]) -> Params:
    """Random parameters."""
    features = jnp.zeros((1, 2, config.layer.dim))
    return stack.init_params(MTP(config), key, features, jnp.zeros((1, 2), jnp.int32))
