"""Kangaroo's network (Liu et al., arXiv 2404.18911): attention and a norm between a target's layer and its head.

It reads the output of one layer at each position: of a draft token, what the target's own first layers make of it. The
target's head makes logits of what it gives.

Shapes: B batch, T step, K draft tokens, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec import cache as kv
from jaxspec.base import ExitAdapter, Forward, Needs, Params, Shared
from jaxspec.nets import stack, unroll
from jaxspec.nets.attention import RMSNorm
from jaxspec.nets.decoder import AttentionInputs, DecoderConfig, DecoderLayer, rotation_of


@dataclasses.dataclass(frozen=True)
class ExitAdapterConfig:
    """The shape of an adapter.

    Attributes:
        layer: of its layers (Kangaroo has one), which have no feed-forward block: `ff_dim` is not read. Its vocabulary
            and width are the target's.
        exit: after how many of the target's layers it reads.
    """

    layer: DecoderConfig
    exit: int

    def __post_init__(self):
        if self.layer.positions != "rotary" or any(self.layer.local):
            raise ValueError("an adapter's layers are as Llama's: expected rotary positions and no windows")

    @property
    def taps(self) -> tuple[int, ...]:
        """What it reads, counted as `language_model(config, taps)` does."""
        return (self.exit - 1,)


class Net(nn.Module):
    """The network; its output is what the head reads."""

    config: ExitAdapterConfig

    def setup(self):
        c = self.config.layer
        self.layers = [DecoderLayer(c) for _ in range(c.layers)]
        self.norm = RMSNorm(c.epsilon, c.norms_from_one, jnp.dtype(c.dtype))

    def __call__(self, x: Float[Array, "B T M"], cache: kv.KVCache, parent: Int[Array, "B N"] | None = None):
        """Reads T further positions of each row."""
        length, step, capacity = cache.length, x.shape[1], cache.keys[0].shape[2]
        mask, position = kv.mask(length, step, capacity, parent)[:, None], kv.positions(length, step, parent)
        inputs = AttentionInputs(mask, rotation_of(self.config.layer, position), None)
        layers = [functools.partial(layer, inputs=inputs, mlp=False) for layer in self.layers]
        x, _, cache = stack.with_cache(layers, x.astype(self.config.layer.dtype), cache)
        return self.norm(x), cache


@functools.lru_cache
def head(config: ExitAdapterConfig) -> ExitAdapter:
    """An adapter as pure functions, for `drafters.early_exit`."""
    module, c = Net(config), config.layer

    def empty(batch: int, capacity: int) -> kv.KVCache:
        return kv.empty(batch, c.layers, c.kv_heads, capacity, c.head_dim, jnp.dtype(c.dtype))

    def extend(params: Params, cache, hidden, parent=None):
        return module.apply({"params": params}, hidden, cache, parent)

    def logits(params: Params, shared: Shared, hidden):
        return shared.logits(hidden).astype(jnp.float32)

    return ExitAdapter(empty, extend, kv.rewind, logits, Needs(c.vocab_size, c.dim, config.taps, head=True))


@functools.lru_cache
def unroll_of(config: ExitAdapterConfig) -> unroll.Unroll:
    """The adapter over whole rows, for training: the draft tokens stand in the text, so one pass has all of them."""

    def run(params: Params, shared: Shared, forward: Forward, tokens: Array, depths: int) -> Float[Array, "B S K M"]:
        adapter, (batch, size) = head(config), forward.features.shape[:2]
        assert forward.taps is not None
        made, _ = adapter.extend(params, adapter.empty(batch, size), forward.taps)
        place = jnp.arange(size, dtype=jnp.int32)[:, None] + 1 + jnp.arange(depths, dtype=jnp.int32)[None]
        return made[:, jnp.minimum(place, size - 1)]  # past the end nothing is compared

    return run


def init(config: ExitAdapterConfig, key: Key[Array, ""]) -> Params:
    """Random parameters."""
    return stack.init_params(Net(config), key, jnp.zeros((1, 2, config.layer.dim)), head(config).empty(1, 2))
