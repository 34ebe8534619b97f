"""A stack of layers over a key-value cache, which is what decoding adds to a decoder.

Shapes: B batch, T step, P prompt, S cache capacity, K key-value heads, D head dimension, M model dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import cache as kv
from jaxspec.base import Forward, Head, LanguageModel, Params, Prompt, Tree

KeysValues = tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]
Store = Callable[[Float[Array, "B K T D"], Float[Array, "B K T D"]], KeysValues]
Layer = Callable[[Float[Array, "B T M"], Store], tuple[Float[Array, "B T M"], *KeysValues]]


def with_cache(
    layers: Iterable[Layer], x: Float[Array, "B T M"], cache: kv.KVCache
) -> tuple[Float[Array, "B T M"], kv.KVCache]:
    """Runs layers over T tokens at each row's own length; the cache grows by them.

    Args:
        layers: functions (x, store) -> (x, keys, values), one for each layer of the cache: `store` takes the keys and
            values of this step and returns all that may be attended to, which the layer hands on.
        x: the embedded tokens.
        cache: what was fed before.

    Example:
        >>> import jax
        >>> def running_sum(x, store):  # a "layer" whose keys are its inputs
        ...     keys, values = store(x[:, None], x[:, None])
        ...     return jnp.cumsum(keys[:, 0], axis=1)[:, -x.shape[1]:], keys, values
        >>> x, cache = with_cache([running_sum], jnp.ones((1, 3, 1)), kv.empty(1, 1, 1, capacity=3, head_dim=1))
        >>> x[0, :, 0].tolist(), cache.length.tolist()
        ([1.0, 2.0, 3.0], [3])
    """
    length, keys, values = cache.length, [], []
    for layer, old_keys, old_values in zip(layers, cache.keys, cache.values, strict=True):

        def store(k, v, old_keys=old_keys, old_values=old_values):
            return kv.write(old_keys, k, length), kv.write(old_values, v, length)

        x, k, v = layer(x, store)
        keys.append(k)
        values.append(v)
    return x, kv.KVCache(tuple(keys), tuple(values), length + jnp.asarray(x.shape[1], length.dtype))


def without_cache(layers: Iterable[Layer], x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """Runs layers over whole rows, as in training: what a layer may attend to is what it was given."""
    for layer in layers:
        x, _, _ = layer(x, lambda k, v: (k, v))
    return x


def last(x: Float[Array, "B P M"], prompt: Prompt) -> Float[Array, "B 1 M"]:
    """What stands at each row's last token: all that the head need read of a prompt."""
    return jnp.take_along_axis(x, (prompt.length - 1)[:, None, None], axis=1)


def head_of(module: nn.Module) -> Head:
    """The `LanguageModel.head` of a network with a method `logits`."""

    def head(params: Params, features: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        return nn.apply(lambda net: net.logits(features), module)({"params": params})

    return head


class Decoder(Protocol):
    """A network as `decoder_only` takes it: a Linen module with these methods."""

    def trunk(
        self, cache: kv.KVCache, tokens: Int[Array, "B T"], tree: Tree | None = None
    ) -> tuple[Float[Array, "B T M"], kv.KVCache]:
        """Embeds and runs the layers at each row's own length; the cache grows by the tokens."""
        ...

    def forward(self, x: Float[Array, "B T M"]) -> Forward:
        """Norm and head."""
        ...

    def logits(self, x: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """The head."""
        ...


def decoder_only(
    module: nn.Module, empty: Callable[[int, int], kv.KVCache], vocab_size: int, max_positions: int | None
) -> LanguageModel:
    """The pure functions of a network that is a `Decoder`; `empty` makes a cache for (batch, capacity)."""

    def prefill(params: Params, prompt: Prompt, capacity: int) -> tuple[Forward, kv.KVCache]:
        def read(net: Decoder) -> tuple[Forward, kv.KVCache]:
            x, cache = net.trunk(empty(prompt.tokens.shape[0], capacity), prompt.tokens)
            return net.forward(last(x, prompt)), cache._replace(length=prompt.length)

        return nn.apply(read, module)({"params": params})

    def extend(
        params: Params, cache: kv.KVCache, tokens: Int[Array, "B T"], tree: Tree | None = None
    ) -> tuple[Forward, kv.KVCache]:
        def feed(net: Decoder) -> tuple[Forward, kv.KVCache]:
            x, grown = net.trunk(cache, tokens, tree)
            return net.forward(x), grown

        return nn.apply(feed, module)({"params": params})

    return LanguageModel(prefill, extend, kv.rewind, vocab_size, max_positions=max_positions, head=head_of(module))
