"""Heads beside a model's own, each of which predicts a token further ahead from the same features.

Blockwise parallel decoding (Stern, Shazeer, Uszkoreit, arXiv 1811.03115) has a feed-forward block for each and shares
the model's head; Medusa (Cai et al., arXiv 2401.10774) has residual blocks and a head for each; in Hydra (Ankner et
al., arXiv 2402.05109) a head also reads the tokens before the one that it predicts.

Shapes: B batch, M model dimension, H heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.base import Needs, ParallelHeads, Params, Shared
from jaxspec.nets import stack
from jaxspec.nets.dense import Dense
from jaxspec.nets.target_parts import in_target_vocabulary, zeros

BLOCKS = ("residual", "feed_forward")


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """How many heads, and of what.

    Attributes:
        vocab_size, dim: the target's vocabulary, and the width of its features.
        heads: how many. Head i predicts the token after i draft tokens.
        blocks: of each head, one after the other.
        block: "residual": x + silu(W x + b), Medusa's. "feed_forward": x + W2 relu(W1 x + b1) + b2, of blockwise
            decoding.
        ff_dim: width inside of a feed-forward block.
        bias: whether blocks have biases.
        own_head: whether each head has a vocabulary projection, or takes the target's.
        draft_vocab: size of the heads' vocabulary; None: the target's.
        reads_tokens: whether a head reads the last committed token and the draft tokens before its own (Hydra): the
            first block then takes all of them side by side, and adds a projection of them instead of x.
        dtype: of the computation.
    """

    vocab_size: int
    dim: int
    heads: int
    blocks: int = 1
    block: str = "residual"
    ff_dim: int = 0
    bias: bool = True
    own_head: bool = True
    draft_vocab: int | None = None
    reads_tokens: bool = False
    dtype: str = "float32"

    def __post_init__(self):
        if self.block not in BLOCKS:
            raise ValueError(f"block is {self.block!r}, expected one of {', '.join(BLOCKS)}")
        if self.heads < 1:
            raise ValueError(f"heads is {self.heads}: expected at least 1")
        if self.blocks < 1:
            raise ValueError(f"blocks is {self.blocks}: expected at least 1")
        if self.block == "feed_forward" and self.ff_dim < 1:
            raise ValueError(f"ff_dim is {self.ff_dim}: feed-forward blocks need a width of at least 1")
        if self.draft_vocab is not None and not self.own_head:
            raise ValueError("the target's head has the target's vocabulary: a draft_vocab needs own_head")


class HeadBlock(nn.Module):
    """One block of a head."""

    config: HeadsConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T in"]) -> Float[Array, "B T M"]:
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        zero = nn.initializers.zeros
        base = x if x.shape[-1] == c.dim else Dense(c.dim, dtype=dtype, name="shortcut")(x)
        if c.block == "residual":
            return base + jax.nn.silu(Dense(c.dim, c.bias, dtype, zero, name="linear")(x))
        hidden = jax.nn.relu(Dense(c.ff_dim, c.bias, dtype, name="wi")(x))
        return base + Dense(c.dim, c.bias, dtype, zero, name="out")(hidden)


class Head(nn.Module):
    """A head: its blocks, and its vocabulary projection, should it have one."""

    config: HeadsConfig

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.blocks = [HeadBlock(c) for _ in range(c.blocks)]
        if c.own_head:
            self.head = Dense(c.draft_vocab or c.vocab_size, dtype=dtype)

    def __call__(self, x: Float[Array, "B T in"], shared: Shared) -> Float[Array, "B T V"]:
        for block in self.blocks:
            x = block(x)
        return (self.head(x) if self.config.own_head else shared.logits(x)).astype(jnp.float32)


class Heads(nn.Module):
    """The network: `__call__` is all heads at each position, as in training; `one` is one of them in decoding."""

    config: HeadsConfig

    def setup(self):
        c = self.config
        self.heads = [Head(c) for _ in range(c.heads)]
        if c.draft_vocab is not None:
            self.vocabulary = self.param("vocabulary", lambda _: jnp.arange(c.draft_vocab, dtype=jnp.int32))

    def __call__(
        self, features: Float[Array, "B T M"], tokens: Int[Array, "B T H"], shared: Shared
    ) -> Float[Array, "B T H V"]:
        """`tokens[:, t]`: those after position t, as many as there are heads; read by Hydra's only."""
        return jnp.stack([self.one(i, features, tokens[:, :, : i + 1], shared) for i in range(self.config.heads)], 2)

    def one(self, index: int, features: Float[Array, "B T M"], tokens: Int[Array, "B T i"], shared: Shared):
        c, x = self.config, features.astype(jnp.dtype(self.config.dtype))
        if c.reads_tokens:
            read = [shared.embed(tokens[:, :, i]).astype(x.dtype) for i in range(tokens.shape[2])]
            x = jnp.concatenate([x, *read], axis=-1)
        logits = self.heads[index](x, shared)
        return logits if c.draft_vocab is None else in_target_vocabulary(logits, self.vocabulary, c.vocab_size)


@functools.lru_cache
def head(config: HeadsConfig) -> ParallelHeads:
    """Heads as pure functions, for `drafters.heads`."""
    module = Heads(config)

    def logits(params: Params, shared: Shared, head: int, features: Array, tokens: Array) -> Float[Array, "B V"]:
        def run(net: Heads) -> Float[Array, "B 1 V"]:
            return net.one(head, features[:, None], tokens[:, None, : head + 1], shared)

        return nn.apply(run, module)({"params": params})[:, 0]

    needs = Needs(config.vocab_size, config.dim, (), config.reads_tokens, not config.own_head)
    return ParallelHeads(logits, config.heads, config.reads_tokens, needs)


def init(config: HeadsConfig, key: Key[Array, ""]) -> Params:
    """Random parameters; blocks begin as the identity."""
    c = config
    shared = zeros(c.dim, c.vocab_size)
    inputs = jnp.zeros((1, 1, c.dim)), jnp.zeros((1, 1, c.heads), jnp.int32)
    return stack.init_params(Heads(c), key, *inputs, shared=shared)
