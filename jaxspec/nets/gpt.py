"""The paper's GPT-like decoder (arXiv 2211.17192, section 4): pre-norm, GELU, learned positions.

By the sizes that it gives, the paper's has a head of its own; GPT-2's is tied to the embedding.

Shapes: B batch, T step, S cache capacity, H heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Params, Parts, Room
from jaxspec.core import kv_cache as kv
from jaxspec.core.checks import one_of
from jaxspec.nets import stack
from jaxspec.nets.attention import ACTIVATIONS, Attention, FeedForward, LayerNorm, Mask, QueryMask, causal
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.network import Network
from jaxspec.sharding import Axes


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size, dim, ff_dim, layers, heads: as they say; a head has dim / heads dimensions.
        max_positions: rows of the position table: the longest row it can hold.
        dtype: of the computation: "float32" or "bfloat16". Logits are float32 always.
        tied_head: whether the head is the embedding.
        activation: of the feed-forward block: "gelu" (by tanh), "gelu_erf", "relu" or "silu".
        epsilon: added to the variance in every norm.
        scale_scores: whether scores are divided by the root of a head's dimension.
        scale_by_layer: whether they are also divided by the layer's number, counted from 1.
        end_tokens: what ends a row; empty for the tokenizer's end-of-sequence token.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    layers: int
    heads: int
    max_positions: int = 1024
    dtype: str = "float32"
    tied_head: bool = True
    activation: str = "gelu"
    epsilon: float = 1e-5
    scale_scores: bool = True
    scale_by_layer: bool = False
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        one_of(self.activation, "activation", ACTIVATIONS)

    @property
    def head_dim(self) -> int:
        """64 for the 97M model: 768 / 12."""
        return self.dim // self.heads


SIZES = {  # section 4.1 of the paper, trained on lm1b with 8k tokens; its counts have no biases and no positions
    "gpt-97m": GPTConfig(8192, 768, 3072, 12, 12, tied_head=False),
    "gpt-6m": GPTConfig(8192, 256, 1024, 2, 4, tied_head=False),
}


class GPTLayer(nn.Module):
    config: GPTConfig
    index: int = 0

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.attention_norm, self.ff_norm = (LayerNorm(c.epsilon, dtype) for _ in range(2))
        scale = (c.head_dim**-0.5 if c.scale_scores else 1.0) / (self.index + 1 if c.scale_by_layer else 1)
        self.attention = Attention(
            c.heads, c.heads, c.head_dim, c.dim, scale, qkv_bias=True, out_bias=True, dtype=dtype
        )
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, use_bias=True, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        update_cache: stack.UpdateCache,
        mask: Mask | QueryMask,
        attention: bool = True,
        mlp: bool = True,
    ):
        """Computes the layer; `update_cache` takes this step's keys and values, and returns all it may attend to."""
        keys = values = None
        if attention:
            y = self.attention_norm(x)
            keys, values = update_cache(*self.attention.keys_values(y))
            x = x + self.attention(y, keys, values, mask)
        return (x + self.ff(self.ff_norm(x)) if mlp else x), keys, values


class GPT(nn.Module):
    """The network. `__call__` is teacher forcing; `embed`, `run`, `features` and `logits` are the steps of decoding."""

    config: GPTConfig
    taps: tuple[int, ...] = ()

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        init = nn.initializers.normal(0.02)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=init)
        self.position = Embedding(c.max_positions, c.dim, dtype=dtype, embedding_init=init)
        self.layers = [GPTLayer(c, i) for i in range(c.layers)]
        self.norm = LayerNorm(c.epsilon, dtype)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, dtype=dtype, weight_init=init)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Computes the logits of each position of whole rows."""
        return self.logits(self.features(self.streams(tokens)[-1]), training=True)

    def streams(
        self, tokens: Int[Array, "B T"], runs: Bool[Array, "layers B"] | None = None
    ) -> list[Float[Array, "B T M"]]:
        """Computes the residual stream of whole rows after each layer; see `stack.without_cache`."""
        position = jnp.arange(tokens.shape[1])
        visible = causal(jnp.zeros((1,), jnp.int32), tokens.shape[1], tokens.shape[1])
        x = self.embedding(tokens) + self.position(position)[None]
        return stack.without_cache(self._layers(visible), x, runs)

    def embed(
        self, cache: kv.KVCache, tokens: Int[Array, "B T"], parent: Int[Array, "B N"] | None = None
    ) -> Float[Array, "B T M"]:
        """Embeds tokens for the first layer, at each row's own length."""
        position = kv.positions(cache.length, tokens.shape[1], parent)
        return self.embedding(tokens) + self.position(jnp.clip(position, 0, self.config.max_positions - 1))

    def run(
        self,
        cache: kv.KVCache,
        x: Float[Array, "B T M"],
        parent: Int[Array, "B N"] | None = None,
        parts: Parts | None = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T M"], stack.Taps, kv.KVCache]:
        """Runs layers at each row's own length, as far as the final norm."""
        at = kv.Pass(cache.length, x.shape[1], parent, real)
        mask = causal(cache.length, x.shape[1], cache.capacity, parent)
        return stack.with_cache(self._layers(mask), x, cache, self.taps, parts, at)

    def _layers(self, mask: Mask | QueryMask) -> list[stack.Layer]:
        return [functools.partial(layer, mask=mask) for layer in self.layers]

    def features(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Applies the final norm."""
        return self.norm(x)

    def logits(self, features: Float[Array, "B T M"], training: bool = False) -> Float[Array, "B T V"]:
        """Applies the head."""
        logits = self.embedding.logits(features, training) if self.config.tied_head else self.head(features)
        return logits.astype(jnp.float32)


def language_model(config: GPTConfig, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a GPT's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = GPTConfig(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=16)
    >>> lm = language_model(config)
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(init(config, jax.random.key(0)), prompt, Room(8))
    >>> forward.logits.shape, cache.length.tolist()
    ((2, 1, 32), [5, 3])
    """
    return _language_model(config, stack.check_taps(taps, config.layers))


@functools.lru_cache
def _language_model(config: GPTConfig, taps: tuple[int, ...]) -> LanguageModel:
    c, dtype = config, jnp.dtype(config.dtype)

    def empty(batch: int, room: Room) -> kv.KVCache:
        return kv.empty(batch, room, [kv.whole(c.heads, c.head_dim, dtype)] * c.layers)

    return stack.decoder_only(
        GPT(c, taps), init, c, empty, c.layers, c.vocab_size, c.max_positions, c.dim, taps, c.end_tokens
    )


def init(config: GPTConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters as GPT-2's begin."""
    return stack.init_params(GPT(config), key, jnp.zeros((1, 2), jnp.int32))


NETWORK = Network(
    "gpt",
    GPTConfig,
    init,
    language_model,
    GPT,
    stack.stack_of_layers,
    stack.pieces,
    axes=lambda c: Axes({"heads": c.heads, "kv_heads": c.heads, "ff": c.ff_dim, "vocab": c.vocab_size}),
    share=stack.share,
    trimmed=stack.trimmed,
)
