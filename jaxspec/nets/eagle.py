"""EAGLE's networks: one transformer layer (or a few) that continues the target's hidden states, token by token.

EAGLE-1 (Li et al., arXiv 2401.15077; EAGLE-2 drafts trees with the same network) reads the target's features and
predicts the next one; the target's head makes logits of it. EAGLE-3 (Li et al., arXiv 2503.01840) fuses the outputs of
several of the target's layers, has a head of its own, and often a vocabulary of its own.

A pair is the hidden state of one position and the token of the next: pair t gives the hidden state of position t + 1,
and the logits of token t + 2.

Shapes: B batch, T step, M the layers' width, F what is read of the target, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.base import Forward, Needs, Params, RecurrentHead, Shared
from jaxspec.nets import recurrent, stack, unroll
from jaxspec.nets.attention import Attention, FeedForward, RMSNorm
from jaxspec.nets.decoder import AttentionInputs, DecoderConfig, DecoderLayer
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.recurrent import Recurrent
from jaxspec.nets.target_parts import in_target_vocabulary


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """The shape of an EAGLE head.

    Attributes:
        layer: of its layers; its vocabulary is the target's.
        hidden_size: width of the target's hidden states; EAGLE-1's layers have the same.
        taps: EAGLE-3: the layers that it reads, counted as `language_model(config, taps)` does. Empty: EAGLE-1.
        draft_vocab: size of its own vocabulary; None: the target's.
        own_embedding, own_head: whether it has these, or takes the target's.
        fc_bias: whether the projection of what is read has a bias.
        norm_before_residual: whether the layer adds to the normalised hidden state.
        norm_before_fc: whether what is read is normalised, all layers as one vector.
        norm_each_tap: whether what is read is normalised, each layer by itself (EAGLE 3.1's `fc_norm`).
        norm_output: whether the next pair is given the normalised hidden state (EAGLE 3.1).
    """

    layer: DecoderConfig
    hidden_size: int
    taps: tuple[int, ...] = ()
    draft_vocab: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_each_tap: bool = False
    norm_output: bool = False

    def __post_init__(self):
        c = self.layer
        if c.positions != "rotary" or any(c.local) or c.post_norms:
            raise ValueError(
                "an EAGLE head's layers are as Llama's: expected rotary positions, no windows, no post-norms"
            )
        if not self.taps and (c.dim != self.hidden_size or self.draft_vocab is not None):
            raise ValueError(
                f"without taps this is EAGLE-1, whose width is the target's, {self.hidden_size}, and whose vocabulary "
                f"is the target's: got width {c.dim} and draft_vocab {self.draft_vocab}"
            )
        if not self.own_embedding and c.dim != self.hidden_size:
            raise ValueError(
                f"width {c.dim} is not the target's, {self.hidden_size}, so its embedding cannot be shared: "
                "expected own_embedding"
            )
        if not self.own_head and (c.dim != self.hidden_size or self.draft_vocab is not None):
            raise ValueError(
                "a head of another width or vocabulary than the target's cannot be shared: expected own_head"
            )
        if self.norm_before_fc and self.norm_each_tap:
            raise ValueError("got norm_before_fc and norm_each_tap: expected one of them at most")


class FusingLayer(nn.Module):
    """EAGLE-3's first layer: attention reads the token and the hidden state side by side."""

    config: EagleConfig

    def setup(self):
        c, dtype = self.config.layer, jnp.dtype(self.config.layer.dtype)
        norm = functools.partial(RMSNorm, c.epsilon, c.norms_from_one, dtype)
        self.embedding_norm, self.hidden_norm, self.ff_norm = norm(), norm(), norm()
        self.attention = _attention(c, norm)
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, gated=True, use_bias=c.ff_bias, dtype=dtype)

    def __call__(self, x, update_cache: stack.UpdateCache, embedded: Float[Array, "B T M"], inputs: AttentionInputs):
        hidden = self.hidden_norm(x)
        y = jnp.concatenate([self.embedding_norm(embedded), hidden], axis=-1)
        keys, values = update_cache(*self.attention.keys_values(y, inputs.rotary))
        x = hidden if self.config.norm_before_residual else x
        x = x + self.attention(y, keys, values, inputs.mask, inputs.bias, inputs.rotary)
        return x + self.ff(self.ff_norm(x)), keys, values


class BareLayer(nn.Module):
    """EAGLE-1's first layer, whose attention reads its input as it is."""

    config: EagleConfig

    def setup(self):
        c, dtype = self.config.layer, jnp.dtype(self.config.layer.dtype)
        norm = functools.partial(RMSNorm, c.epsilon, c.norms_from_one, dtype)
        self.ff_norm = norm()
        self.attention = _attention(c, norm)
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, gated=True, use_bias=c.ff_bias, dtype=dtype)

    def __call__(self, x, update_cache: stack.UpdateCache, inputs: AttentionInputs):
        keys, values = update_cache(*self.attention.keys_values(x, inputs.rotary))
        x = x + self.attention(x, keys, values, inputs.mask, inputs.bias, inputs.rotary)
        return x + self.ff(self.ff_norm(x)), keys, values


def _attention(c: DecoderConfig, norm) -> Attention:
    scale = (c.query_scalar or c.head_dim) ** -0.5
    head_norm = norm if c.head_norms else None
    return Attention(
        *(c.heads, c.kv_heads, c.head_dim, c.dim, scale, c.qkv_bias, c.out_bias, c.attention_cap, head_norm),
        dtype=jnp.dtype(c.dtype),
    )


class Eagle(Recurrent):
    """The network; what it reads are the features of EAGLE-1, and a projection of the taps of EAGLE-3."""

    config: EagleConfig

    def setup(self):
        config, c = self.config, self.config.layer
        dtype = jnp.dtype(c.dtype)
        norm = functools.partial(RMSNorm, c.epsilon, c.norms_from_one, dtype)
        self.fc = Dense(c.dim, config.fc_bias, dtype)
        if config.own_embedding:
            init = nn.initializers.normal(0.02)
            self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=init)
        if config.own_head:
            self.head = Dense(config.draft_vocab or c.vocab_size, dtype=dtype)
        if config.draft_vocab is not None:
            self.vocabulary = self.param("vocabulary", lambda _: jnp.arange(config.draft_vocab, dtype=jnp.int32))
        rest = [DecoderLayer(c) for _ in range(c.layers - 1)]
        if config.taps:
            self.layers = [FusingLayer(config), *rest]
            self.norm = norm()
            if config.norm_before_fc:
                self.taps_norm = norm()
            if config.norm_each_tap:
                self.tap_norms = [norm() for _ in config.taps]
        else:
            self.layers = [BareLayer(config), *rest]

    def read(self, forward: Forward) -> Float[Array, "B T D"]:
        config, taken = self.config, forward.taps if self.config.taps else forward.features
        assert taken is not None
        if not config.taps:
            return taken
        if config.norm_before_fc:
            taken = self.taps_norm(taken)
        if config.norm_each_tap:
            parts = jnp.split(taken, len(config.taps), axis=-1)
            taken = jnp.concatenate([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], axis=-1)
        return self.fc(taken)

    def joined(
        self,
        shared: Shared,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        config, dtype = self.config, jnp.dtype(self.config.layer.dtype)
        embedded = (self.embedding(tokens) if config.own_embedding else shared.embed(tokens)).astype(dtype)
        hidden = hidden.astype(dtype)
        first, *rest = self.layers
        if config.taps:
            layers = [functools.partial(first, embedded=embedded, inputs=inputs)]
        else:
            hidden = self.fc(jnp.concatenate([embedded, hidden], axis=-1))
            layers = [functools.partial(first, inputs=inputs)]
        return hidden, layers + [functools.partial(layer, inputs=inputs) for layer in rest]

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        return self.norm(x) if self.config.norm_output and self.config.taps else x

    def logits(self, shared: Shared, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        config = self.config
        x = self.norm(hidden) if config.taps and not config.norm_output else hidden
        logits = (self.head(x) if config.own_head else shared.logits(x)).astype(jnp.float32)
        if config.draft_vocab is None:
            return logits
        return in_target_vocabulary(logits, self.vocabulary, config.layer.vocab_size)


@functools.lru_cache
def head(config: EagleConfig) -> RecurrentHead:
    """An EAGLE head as pure functions, for `drafters.eagle`.

    >>> import jax, jaxspec
    >>> from jaxspec.nets import decoder
    >>> shape = decoder.DecoderConfig(32, dim=16, ff_dim=32, layers=4, heads=4, kv_heads=2, head_dim=4)
    >>> target = jaxspec.Model(decoder.language_model(shape, taps=(0, 2)), decoder.init(shape, jax.random.key(0)))
    >>> config = EagleConfig(dataclasses.replace(shape, layers=1), 16, taps=(0, 2), own_head=True)
    >>> made = jaxspec.drafters.eagle(jaxspec.Bound(head(config), init(config, jax.random.key(1))), target)
    >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
    >>> out = jaxspec.generate(target, prompt, drafter=made, gamma=3, max_new_tokens=9)
    >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
    True
    """
    return recurrent.functions(Eagle(config), needs(config))


def unroll_of(config: EagleConfig) -> unroll.Unroll:
    """The head over whole rows, fed what it made, for training."""
    return recurrent.unroll_of(Eagle(config))


def needs(config: EagleConfig) -> Needs:
    """What a head expects of its target."""
    embedding, own_head = not config.own_embedding, not config.own_head
    return Needs(config.layer.vocab_size, config.hidden_size, config.taps, embedding, own_head)


def init(config: EagleConfig, key: Key[Array, ""]) -> Params:
    """Random parameters; a vocabulary of its own is the target's first ids."""
    taken = jnp.zeros((1, 2, config.hidden_size * max(len(config.taps), 1)))
    return stack.init_params(Eagle(config), key, Forward(taken, taken, taken), jnp.zeros((1, 2), jnp.int32))
