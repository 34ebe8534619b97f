"""The paper's GPT-like decoder (arXiv 2211.17192, section 4): pre-norm, GELU, learned positions.

The paper's has a head of its own, by the sizes that it gives; GPT-2's is the embedding.

Shapes: B batch, T step, S cache capacity, H heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import cache as kv
from jaxspec.base import Forward, LanguageModel, Params, Tree
from jaxspec.nets import stack
from jaxspec.nets.attention import Attention, FeedForward, LayerNorm
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size, dim, ff_dim, layers, heads: as they say; a head has dim / heads dimensions.
        max_positions: rows of the position table: the longest row it can hold.
        dtype: of the computation: "float32" or "bfloat16". Logits are float32 always.
        tied_head: whether the head is the embedding.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    layers: int
    heads: int
    max_positions: int = 1024
    dtype: str = "float32"
    tied_head: bool = True

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

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.attention_norm, self.ff_norm = (LayerNorm(dtype=dtype) for _ in range(2))
        scale = c.head_dim**-0.5
        self.attention = Attention(
            c.heads, c.heads, c.head_dim, c.dim, scale, qkv_bias=True, out_bias=True, dtype=dtype
        )
        self.ff = FeedForward(c.dim, c.ff_dim, "gelu", use_bias=True, dtype=dtype)

    def __call__(self, x: Float[Array, "B T M"], store: stack.Store, mask: Bool[Array, "#B 1 T S"]):
        """`store` takes this step's keys and values and returns all that may be attended to (the cache)."""
        y = self.attention_norm(x)
        keys, values = store(*self.attention.keys_values(y))
        x = x + self.attention(y, keys, values, mask)
        return x + self.ff(self.ff_norm(x)), keys, values


class GPT(nn.Module):
    """The network. `__call__` is teacher forcing; `trunk` and `forward` are the two halves of decoding."""

    config: GPTConfig

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        init = nn.initializers.normal(0.02)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=init)
        self.position = Embedding(c.max_positions, c.dim, dtype=dtype, embedding_init=init)
        self.layers = [GPTLayer(c) for _ in range(c.layers)]
        self.norm = LayerNorm(dtype=dtype)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, dtype=dtype, weight_init=init)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of each position of whole rows."""
        position = jnp.arange(tokens.shape[1])
        visible = (position[None, :] <= position[:, None])[None, None]
        x = self.embedding(tokens) + self.position(position)[None]
        return self.forward(stack.without_cache(self._layers(visible), x), training=True).logits

    def trunk(
        self, cache: kv.KVCache, tokens: Int[Array, "B T"], tree: Tree | None = None
    ) -> tuple[Float[Array, "B T M"], kv.KVCache]:
        """Feeds `tokens` at each row's own length, as far as the head."""
        length, step, capacity = cache.length, tokens.shape[1], cache.keys[0].shape[2]
        mask = kv.mask(length, step, capacity, tree)[:, None]
        position = jnp.clip(kv.positions(length, step, tree), 0, self.config.max_positions - 1)
        x = self.embedding(tokens) + self.position(position)
        return stack.with_cache(self._layers(mask), x, cache)

    def _layers(self, mask: Bool[Array, "#B 1 T S"]) -> list[stack.Layer]:
        return [functools.partial(layer, mask=mask) for layer in self.layers]

    def forward(self, x: Float[Array, "B T M"], training: bool = False) -> Forward:
        """What the model says where its layers left `x`."""
        x = self.norm(x)
        return Forward(self.logits(x, training), x)

    def logits(self, x: Float[Array, "B T M"], training: bool = False) -> Float[Array, "B T V"]:
        """The head."""
        logits = self.embedding.logits(x, training) if self.config.tied_head else self.head(x)
        return logits.astype(jnp.float32)


def language_model(config: GPTConfig) -> LanguageModel:
    """A GPT as pure functions of (params, ...), for `jaxspec.decode`.

    >>> import jax, jaxspec
    >>> config = GPTConfig(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=16)
    >>> lm = language_model(config)
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(init(config, jax.random.key(0)), prompt, capacity=8)
    >>> forward.logits.shape, cache.length.tolist()
    ((2, 1, 32), [5, 3])
    """
    return _language_model(config)


@functools.cache
def _language_model(config: GPTConfig) -> LanguageModel:
    c, dtype = config, jnp.dtype(config.dtype)

    def empty(batch: int, capacity: int) -> kv.KVCache:
        return kv.empty(batch, c.layers, c.heads, capacity, c.head_dim, dtype)

    return stack.decoder_only(GPT(c), empty, c.vocab_size, c.max_positions)


def init(config: GPTConfig, key: Key[Array, ""]) -> Params:
    """Random parameters, initialised as GPT-2's are."""
    return jax.jit(GPT(config).init)(key, jnp.zeros((1, 2), jnp.int32))["params"]
