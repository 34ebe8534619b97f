"""Multi-token prediction: a further layer that was trained with the model, to draft what follows the next token.

DeepSeek-V3 (arXiv 2412.19437) and Qwen3-Next publish such modules beside their models' layers. A module joins the
target's features of a position with the token after it, runs one of the model's own layers, and uses the model's
embedding and head. To draft several tokens it is fed what it made.

Shapes: B batch, T step, M model dimension, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.base import Forward, Needs, Params, RecurrentHead, Shared
from jaxspec.nets import recurrent, stack, unroll
from jaxspec.nets.attention import RMSNorm
from jaxspec.nets.decoder import AttentionInputs, DecoderConfig, DecoderLayer
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.recurrent import Recurrent


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


class MTP(Recurrent):
    """The network."""

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

    def joined(
        self,
        shared: Shared,
        hidden: Float[Array, "B T M"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        config = self.config
        embedded = self.embedding(tokens) if config.own_embedding else shared.embed(tokens)
        if config.zero_first:
            embedded = jnp.where((position == 0)[..., None], 0.0, embedded)
        joined = self.embedding_norm(embedded), self.hidden_norm(hidden)
        x = self.fc(jnp.concatenate(joined[::-1] if config.hidden_first else joined, axis=-1))
        return x, [functools.partial(self.layer, inputs=inputs)]

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        return self.norm(x) if self.config.feeds_normed else x

    def logits(self, shared: Shared, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        x = hidden if self.config.feeds_normed else self.norm(hidden)
        return (self.head(x) if self.config.own_head else shared.logits(x)).astype(jnp.float32)


@functools.lru_cache
def head(config: MTPConfig) -> RecurrentHead:
    """A module as pure functions, for `drafters.mtp`."""
    c = config.layer
    needs = Needs(c.vocab_size, c.dim, (), not config.own_embedding, not config.own_head)
    return recurrent.functions(MTP(config), needs)


def unroll_of(config: MTPConfig) -> unroll.Unroll:
    """The module over whole rows, fed what it made, for training."""
    return recurrent.unroll_of(MTP(config))


def init(config: MTPConfig, key: Key[Array, ""]) -> Params:
    """Random parameters."""
    features = jnp.zeros((1, 2, config.layer.dim))
    return stack.init_params(MTP(config), key, Forward(features, features), jnp.zeros((1, 2), jnp.int32))
