"""Builds encoder-decoders: their layers with cross-attention, cache, prefill, and the record of
such a network.

A network is a subclass of `EncoderDecoder`: `nets.t5` and `nets.bart` are examples. The encoder
runs once, in prefill, and so do the keys and values of cross-attention. Rounds then run the decoder
alone.

Shapes: B batch, P prompt (encoder), T step (decoder), S cache capacity, H heads, D head dimension,
M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Encoder, LanguageModel, Limits, Params, Parts, Prompt, Room, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.nets import decoder, stack
from jaxspec.nets.attention import EncoderKeys, LayerInputs, causal
from jaxspec.nets.decoder import DecoderLayer
from jaxspec.nets.mismatch import Init, named_mismatch
from jaxspec.nets.network import Network
from jaxspec.nets.shapes import (
    AttentionShape,
    DecoderConfig,
    FeedForwardShape,
    LayerShape,
    NormShape,
)
from jaxspec.sharding import Axes

# keys and values of an encoded prompt
Cross = tuple[Float[Array, "B H P D"], Float[Array, "B H P D"]]


class EncoderDecoderCache(NamedTuple):
    """The decoder's cache, and what prefill computed once.

    Attributes:
        decoder: self-attention keys and values.
        cross: keys and values of the encoded prompt, for each decoder layer.
        cross_mask: True at real encoder positions.
    """

    decoder: kv.KVCache
    cross: tuple[Cross, ...]
    cross_mask: Bool[Array, "B 1 1 P"]


def side(
    config: Any,
    depth: int,
    attention: AttentionShape,
    ff: FeedForwardShape,
    norm: NormShape,
    *,
    has_cross: bool,
    **options: Any,
) -> list[DecoderLayer]:
    """Makes the layers of a side, which are alike.

    Args:
        config: the network's shape, with vocab_size, dim and dtype.
        depth: the number of layers.
        attention, ff, norm: the shape of their blocks and norms.
        has_cross: whether they also attend to the encoder's output, as a decoder's layers do.
        options: further attributes of `DecoderLayer`.
    """
    layer = LayerShape(attention, ff, cross=attention if has_cross else None)
    layers = DecoderConfig(
        config.vocab_size, config.dim, (layer,) * depth, norm, dtype=config.dtype
    )
    return decoder.layers_of(layers, **options)


def with_biases(config: Any, **options: Any) -> tuple[AttentionShape, FeedForwardShape]:
    """Returns the blocks of the first Transformer's layers: scaled attention, and biases
    everywhere.
    """
    sizes = config.heads, config.heads, config.head_dim
    attention = AttentionShape(*sizes, qkv_bias=True, out_bias=True, **options)
    return attention, FeedForwardShape(config.ff_dim, config.activation, gated=False, bias=True)


def empty_decoder(config: Any, batch: int, room: Room) -> kv.KVCache:
    """Makes empty caches of layers that attend to all of their row."""
    layer = kv.whole(config.heads, config.head_dim, jnp.dtype(config.dtype))
    return kv.empty(batch, room, [layer] * config.decoder_layers)


def stacks(config: Any) -> dict[str, int]:
    """Returns the depth of either side."""
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


class EncoderDecoder(nn.Module):
    """The steps of teacher forcing and of decoding. A network is a subclass.

    Its `setup` makes `embedding`, the lists `encoder` and `decoder` of layers (`DecoderLayer`), and
    `decoder_norm`. It has these methods:

    - `encode(source, mask)`: the encoder's output [B, P, M] for its input; `mask` comes from
      `real`.
    - `real(source)`: the mask [B, 1, 1, P] of the encoder's output, where that is not a prompt of
      tokens.
    - `embed_at(tokens, position)`: the first decoder layer's input [B, T, M], by tokens and
      positions [#B, T].
    - `logits(features, training, raw=False)`: the head.

    Attributes:
        config: its shape, a frozen dataclass.
        taps: decoder layers whose output passes return; see `stack.check_taps`.
    """

    config: Any
    taps: tuple[int, ...] = ()
    # (configuration, batch, room) -> empty caches of the decoder's own attention
    empty = staticmethod(empty_decoder)
    stacks = staticmethod(stacks)

    def __call__(self, prompt: Prompt, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Computes the logits of each decoder position, given the decoder's inputs (start token
        first).
        """
        return self.logits(self.features(self.streams(prompt, tokens)[-1]), training=True)

    def streams(
        self, prompt: Prompt, tokens: Int[Array, "B T"], runs: Bool[Array, "layers B"] | None = None
    ) -> list[Float[Array, "B T M"]]:
        """Computes the residual stream of whole rows after each decoder layer; see
        `stack.without_cache`.
        """
        mask = self.real(prompt)
        encoded = self.encode(prompt, mask)
        # Whole rows begin at 0, so one row's positions and masks broadcast over the batch.
        pass_ = kv.Pass(jnp.zeros((1,), jnp.int32), tokens.shape[1])
        cross = [layer.cross_keys_values(encoded) for layer in self.decoder]
        empty = jax.eval_shape(lambda: self.empty(self.config, 1, Room(pass_.step)))
        layers = self._decoder_layers(pass_, empty, cross, mask)
        return stack.without_cache(layers, self.embed_at(tokens, pass_.positions()), runs)

    @staticmethod
    def example(config: Any) -> Any:
        """Returns a possible input of an encoder; only shapes and dtypes matter."""
        return Prompt(jnp.zeros((1, 2), jnp.int32), jnp.full((1,), 2, jnp.int32))

    def real(self, prompt: Any) -> Bool[Array, "B 1 1 P"]:
        """Tells which of a prompt's positions hold tokens."""
        position = jnp.arange(prompt.tokens.shape[1], dtype=prompt.length.dtype)
        return (position[None, :] < prompt.length[:, None])[:, None, None, :]

    def cross(self, encoded: Float[Array, "B P M"]) -> tuple[Cross, ...]:
        """Computes the keys and values of an encoded prompt, layer by layer."""
        cross = list[Cross]()
        read = encoded
        for layer in self.decoder:
            cross.append(layer.cross_keys_values(read))
            read = _after(read, cross[-1])
        return tuple(cross)

    def embed(
        self,
        cache: EncoderDecoderCache,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
    ) -> Float[Array, "B T M"]:
        """Embeds tokens for the first layer, at each row's own length."""
        return self.embed_at(tokens, kv.positions(cache.decoder.length, tokens.shape[1], parent))

    def run(
        self,
        cache: EncoderDecoderCache,
        x: Float[Array, "B T M"],
        parent: Int[Array, "B N"] | None = None,
        parts: Parts | None = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T M"], stack.Taps, EncoderDecoderCache]:
        """Runs decoder layers at each row's own length, as far as the final norm."""
        pass_ = kv.Pass(cache.decoder.length, x.shape[1], parent, real)
        layers = self._decoder_layers(pass_, cache.decoder, cache.cross, cache.cross_mask)
        x, taps, grown = stack.with_cache(layers, x, cache.decoder, self.taps, parts, pass_)
        return x, taps, cache._replace(decoder=grown)

    def features(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Applies the decoder's final norm."""
        return self.decoder_norm(x)

    def layer_inputs(self, pass_: kv.Pass, cache: kv.KVCache) -> list[LayerInputs]:
        """Makes the inputs of each decoder layer's self-attention in a pass: here a mask, the same
        for all of them.
        """
        mask = causal(pass_.length, pass_.step, cache.capacity, pass_.parent)
        return [LayerInputs(mask, None, None)] * len(self.decoder)

    def run_encoder(
        self, x: Float[Array, "B P M"], inputs: Iterable[LayerInputs]
    ) -> Float[Array, "B P M"]:
        """Runs the encoder's layers, up to the final norm; `inputs` has each layer's."""
        layers = [
            functools.partial(layer, inputs=x)
            for layer, x in zip(self.encoder, inputs, strict=True)
        ]
        return stack.without_cache(layers, x)[-1]

    def _decoder_layers(
        self, pass_: kv.Pass, cache: kv.KVCache, cross: Iterable[Any], real: Array
    ) -> list[stack.Layer]:
        parts = zip(self.decoder, self.layer_inputs(pass_, cache), cross, strict=True)
        return [
            functools.partial(layer, inputs=inputs._replace(source=EncoderKeys(keys, values, real)))
            for layer, inputs, (keys, values) in parts
        ]


def _after(encoded: Float[Array, "B P M"], cross: Cross) -> Float[Array, "B P M"]:
    """Has a GPU's compiler compute a layer's cross-attention before it reads the encoder's output
    for the next one.

    Else it joins the products of all layers into one, and copies their weights into one matrix
    first: 1.6 GB of T5-XXL.
    """

    def barrier(encoded: Array, cross: Cross) -> Array:
        return jax.lax.optimization_barrier((encoded, cross))[0]

    return jax.lax.platform_dependent(
        encoded, cross, cuda=barrier, rocm=barrier, default=lambda encoded, _: encoded
    )


def language_model(
    net: type[EncoderDecoder], config: Any, taps: Sequence[int] = ()
) -> LanguageModel:
    """Makes the pure functions of an encoder-decoder; the same object for the same arguments.

    Args:
        net: the network's class.
        config: its shape.
        taps: decoder layers whose output `Forward.taps` is to hold; see `stack.check_taps`.
    """
    return _language_model(net, config, stack.check_taps(taps, config.decoder_layers))


@functools.lru_cache
def _language_model(net: type[EncoderDecoder], config: Any, taps: tuple[int, ...]) -> LanguageModel:
    module = net(config, taps)
    longest = config.max_positions
    ends = (config.end_tokens, config.begin_tokens)
    limits = Limits(config.start_token, longest, longest, *ends, config.source_vocab)
    init = functools.partial(init_params, net)

    def encode(
        module: Any, source: Any, encoded: Array | None
    ) -> tuple[Any, tuple[Cross, ...], Array]:
        mask = module.real(source)
        if encoded is None:
            encoded = module.encode(source, mask)
        return encoded, module.cross(encoded), mask

    def prefill(params, prompt, room, encoded=None):
        source, row = token_rows.encoder_and_row(prompt, limits.first_tokens)
        with named_mismatch(params, init, config, net.stacks(config)):
            encoded, cross, mask = nn.apply(encode, module)({"params": params}, source, encoded)

            def empty(batch: int, room: Room) -> EncoderDecoderCache:
                return EncoderDecoderCache(net.empty(config, batch, room), cross, mask)

            return stack.read_row(module, params, row, room, empty, rewind, encoded)

    def rewind(cache, length):
        return cache._replace(decoder=kv.rewind(cache.decoder, length))

    def select(cache, start, path):
        return cache._replace(decoder=kv.select(cache.decoder, start, path))

    def keys_values(cache, layer):
        return kv.keys_values(cache.decoder, layer)

    inside = stack.inside(module, config.dim, taps, config.decoder_layers)
    parameters = functools.partial(encoder_params, source_vocab=config.source_vocab)
    encoder = Encoder(parameters, lambda params, encoder: params | encoder, prefill)
    return LanguageModel(
        prefill,
        stack.extending(module),
        rewind,
        config.vocab_size,
        select,
        limits,
        inside._replace(encoder=encoder, keys_values=keys_values),
        is_causal=True,
    )


def encoder_params(params: Params, source_vocab: int | None = None) -> Params:
    """Returns the parameters that prompts are encoded with.

    Args:
        params: an encoder-decoder's.
        source_vocab: the configuration's; None: both sides read tokens with one embedding.
    """
    shared = ("embedding",) if source_vocab is None else ()
    return {
        name: value
        for name, value in params.items()
        if name.startswith("encoder") or name in shared
    }


def same_encoder(first: Any, second: Any) -> bool:
    """Tells whether two networks may share an encoder: they differ in the decoder's depth and the
    head at most.
    """
    if type(first) is not type(second):
        return False
    # The fields that no parameter of the encoder depends on.
    free = (
        *("decoder_layers", "layers", "tied_head", "scaled_head"),
        *("max_positions", "end_tokens", "begin_tokens", "dtype"),
    )
    names = [field.name for field in dataclasses.fields(first) if field.name in free]
    return dataclasses.replace(first, **{name: getattr(second, name) for name in names}) == second


def init_params(net: Any, config: Any, key: Key[Array, ""]) -> Params:
    """Draws an encoder-decoder's random parameters."""
    return stack.init_params(net(config), key, net.example(config), jnp.zeros((1, 2), jnp.int32))


def _pieces(config: Any) -> list[tuple[Any, int]]:
    shallow = dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
    more = [
        (dataclasses.replace(shallow, **{f"{side}_layers": 2}), depth - 1)
        for side, depth in stacks(config).items()
    ]
    return [(shallow, 1 - sum(times for _, times in more)), *more]


def cache(config: Any, batch: int, room: Room, width: int) -> EncoderDecoderCache:
    """Makes a cache of the sizes that prefill makes for prompts of a width."""
    # Cross-attention stores keys and values of the prompt as a cache of its width would.
    cross = empty_decoder(config, batch, Room(width))
    mask = jnp.zeros((batch, 1, 1, width), bool)
    return EncoderDecoderCache(
        empty_decoder(config, batch, room), tuple(zip(cross.keys, cross.values, strict=True)), mask
    )


def share(config: Any, path: str) -> float:
    """Keys and values of the prompt are made in prefill; biases and positions are looked up."""
    unread = path.startswith("encoder") or "cross/key" in path or "cross/value" in path
    looked_up = path.endswith("table") or "position" in path
    if unread or looked_up or (path.startswith("embedding") and not config.tied_head):
        return 0.0
    return 1.0


def trimmed(config: Any, tokens: int) -> tuple[Any, tuple[str, ...]]:
    """Returns the configuration with a head for so many tokens, and the names of the head's
    parameters.
    """
    # These must be ids of the smaller vocabulary, too, although a head does not read them.
    lists = ("begin_tokens", "banned_tokens")
    ids = {name: () for name in lists if hasattr(config, name)}
    biased = ()
    if getattr(config, "logits_bias", False):
        biased = ("head",)
    if config.tied_head:
        parts = ("embedding", *biased)
    else:
        parts = ("head",)
    return dataclasses.replace(config, vocab_size=tokens, start_token=0, **ids), parts


def network(
    name: str,
    config: type,
    net: Any,
    language_model: Callable[..., LanguageModel],
    init: Init,
    **options: Any,
) -> Network:
    """Makes the record of an encoder-decoder whose layers are alike; `options` are other fields of
    `Network`.
    """

    def axes(config: Any) -> Axes:
        return Axes(
            {
                "heads": config.heads,
                "kv_heads": config.heads,
                "ff": config.ff_dim,
                "vocab": config.vocab_size,
            }
        )

    shared: dict[str, Any] = dict(
        pieces=_pieces, cache=cache, axes=axes, share=share, trimmed=trimmed, small_kernels=9
    )
    return Network(name, config, init, language_model, net, stacks, **shared | options)
