"""What networks share that are fed pairs of a hidden state and the token after it: EAGLE's heads and MTP modules.

Shapes: B batch, T step, S positions of whole rows, D what is paired with tokens, M the layers' width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import cache as kv
from jaxspec.base import Forward, Needs, Params, RecurrentHead, Shared
from jaxspec.nets import stack, unroll
from jaxspec.nets.decoder import AttentionInputs, rotation_of
from jaxspec.nets.target_parts import zeros


class Recurrent(nn.Module):
    """Such a network, by halves, as `base.RecurrentHead` has them; `config.layer` is the shape of its layers."""

    config: Any

    def read(self, forward: Forward) -> Float[Array, "B T D"]:
        """What is paired with tokens, of the target's pass."""
        return forward.features

    def joined(
        self,
        shared: Shared,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        """What goes into the layers, and these."""
        raise NotImplementedError

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """What the next pairs are given of the layers' output."""
        return x

    def logits(self, shared: Shared, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Of what follows the tokens of the pairs."""
        raise NotImplementedError

    def __call__(self, forward: Forward, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Teacher forcing over whole rows, with an embedding and a head of zeros where the target's are used."""
        c = self.config.layer
        shared, cache = zeros(c.dim, c.vocab_size), self.empty(*tokens.shape)
        return self.logits(shared, self.extend(shared, cache, self.read(forward), tokens)[0])

    @nn.nowrap
    def empty(self, batch: int, capacity: int) -> kv.KVCache:
        """A cache without pairs."""
        c = self.config.layer
        return kv.empty(batch, c.layers, c.kv_heads, capacity, c.head_dim, jnp.dtype(c.dtype))

    def extend(
        self,
        shared: Shared,
        cache: kv.KVCache,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B T M"], kv.KVCache]:
        """Feeds further pairs."""
        length, step, capacity = cache.length, tokens.shape[1], cache.keys[0].shape[2]
        mask, position = kv.mask(length, step, capacity, parent)[:, None], kv.positions(length, step, parent)
        x, layers = self._layers(shared, hidden, tokens, position, mask)
        x, _, cache = stack.with_cache(layers, x, cache)
        return self.fed_on(x), cache

    def step(
        self,
        shared: Shared,
        hidden: Float[Array, "B S D"],
        tokens: Int[Array, "B S"],
        position: Int[Array, "1 S"],
        mask: Bool[Array, "1 1 S past"],
        past: unroll.Past,
    ) -> tuple[Float[Array, "B S M"], unroll.Past]:
        """`extend` over whole rows, in training: see `nets.unroll`."""
        x, layers = self._layers(shared, hidden, tokens, position, mask)
        x, past = unroll.with_past(layers, x, past)
        return self.fed_on(x), past

    def _layers(self, shared, hidden, tokens, position, mask):
        inputs = AttentionInputs(mask, rotation_of(self.config.layer, position), None)
        return self.joined(shared, hidden, tokens, position, inputs)


def functions(module: Recurrent, needs: Needs) -> RecurrentHead:
    """A network as pure functions."""

    def call(params: Params, method, *arguments: Any):
        return nn.apply(method, module)({"params": params}, *arguments)

    def read(params: Params, forward: Forward) -> Float[Array, "B T D"]:
        return call(params, lambda net: net.read(forward))

    def extend(params: Params, shared: Shared, cache, hidden, tokens, parent=None):
        return call(params, lambda net: net.extend(shared, cache, hidden, tokens, parent))

    def logits(params: Params, shared: Shared, hidden):
        return call(params, lambda net: net.logits(shared, hidden))

    return RecurrentHead(read, module.empty, extend, kv.rewind, logits, needs)


def unroll_of(module: Recurrent) -> unroll.Unroll:
    """A network over whole rows, fed what it made, for training."""

    def run(params: Params, shared: Shared, forward: Forward, tokens: Array, depths: int) -> Float[Array, "B S K M"]:
        def step(params: Params, *arguments: Any, **named: Any):
            return nn.apply(lambda net: net.step(shared, *arguments, **named), module)({"params": params})

        hidden = nn.apply(lambda net: net.read(forward), module)({"params": params})
        return unroll.unrolled(step, params, hidden, tokens, depths)

    return run
