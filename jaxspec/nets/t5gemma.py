"""T5Gemma (arXiv 2504.06225) and T5Gemma 2 (2512.14856): encoder-decoders made of Gemma 2's and
Gemma 3's layers.

Both sides are `shapes.DecoderConfig`s, with layers of `nets.decoder`. The encoder reads in both
directions; its windows are centred. T5Gemma's decoder layers have cross-attention between their two
blocks. Layers of T5Gemma 2 attend to the decoder's keys and the encoder's in one softmax, and both
sides share an embedding. The encoder's keys are rotated in neither.

Shapes: B batch, P prompt (encoder), T step (decoder), K key-value heads, D head dimension, M model
dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Params, Prompt, Room
from jaxspec.core import kv_cache as kv
from jaxspec.core.checks import check_ids
from jaxspec.nets import decoder, encoder_decoder
from jaxspec.nets.attention import LayerInputs, Mask, QueryMask, for_queries
from jaxspec.nets.decoder import DecoderNet, empty_cache, layers_of
from jaxspec.nets.dense import parameter
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.encoder_decoder import EncoderDecoder, EncoderDecoderCache
from jaxspec.nets.network import Network
from jaxspec.nets.shapes import DecoderConfig, LayerShape
from jaxspec.sharding import Axes


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(DecoderConfig):
    """The shape of a T5Gemma: a decoder's, whose layers read an encoder, and that encoder's.

    Attributes:
        encoder: the encoder's shape. A window is the number of positions that a token attends to,
            with itself in the middle; an even number has one more position ahead than behind.
        start_token: the id that the decoder's row begins with.
        begin_tokens: ids that follow it in each row.
        shares_embedding: whether both sides read tokens with one embedding (T5Gemma 2).
        end_of_image: the id of a token with a separate vector in place of its row of the embedding;
            None without one.
    """

    encoder: DecoderConfig = dataclasses.field(kw_only=True)
    start_token: int = 2
    begin_tokens: tuple[int, ...] = ()
    shares_embedding: bool = False
    end_of_image: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.encoder.dtype != self.dtype:  # both sides compute in one dtype
            object.__setattr__(self, "encoder", dataclasses.replace(self.encoder, dtype=self.dtype))
        check_ids([self.start_token], "the start of a row", self.vocab_size)
        if any(layer.cross is None and not layer.attention.reads_source for layer in self.layers):
            raise ValueError(
                "a decoder layer reads no encoder: expected `cross`, or attention with "
                "`reads_source`"
            )

    @property
    def source_vocab(self) -> int | None:
        """Number of ids of the encoder's embedding; None: it shares the decoder's."""
        if self.shares_embedding:
            return None
        return self.encoder.vocab_size

    @property
    def encoder_layers(self) -> int:
        """Counts the encoder's layers."""
        return len(self.encoder.layers)

    @property
    def decoder_layers(self) -> int:
        """Counts the decoder's layers."""
        return len(self.layers)


def t5gemma_config(
    encoder: DecoderConfig, decoder: DecoderConfig, *, merged: bool = False, **options: Any
) -> T5GemmaConfig:
    """Joins the shapes of an encoder and of a decoder that knows no encoder yet.

    Args:
        encoder: the encoder's shape.
        decoder: the decoder's; its layers get cross-attention of the shape of their self-attention.
        merged: whether they read the encoder's keys in the same softmax as the decoder's (T5Gemma
            2).
        options: the fields that `T5GemmaConfig` adds to these.

    >>> from jaxspec.nets.decoder import decoder_config
    >>> wide, narrow = (
    ...     decoder_config(32, dim, 32, 1, 2, 1, 8, window=4, local=(True,)) for dim in (24, 16)
    ... )
    >>> t5gemma_config(wide, narrow).layers[0].cross.window is None
    True
    """

    def reading(layer: LayerShape) -> LayerShape:
        if merged:
            return dataclasses.replace(
                layer, attention=dataclasses.replace(layer.attention, reads_source=True)
            )
        return dataclasses.replace(
            layer, cross=dataclasses.replace(layer.attention, window=None, rotary=None)
        )

    fields: dict[str, Any] = vars(decoder) | {"layers": tuple(map(reading, decoder.layers))}
    return T5GemmaConfig(**fields, encoder=encoder, **options)


def without_encoder(config: T5GemmaConfig) -> DecoderConfig:
    """Returns the decoder's shape as `t5gemma_config` took it."""

    def alone(layer: LayerShape) -> LayerShape:
        attention = dataclasses.replace(layer.attention, reads_source=False)
        return dataclasses.replace(layer, cross=None, attention=attention)

    fields: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in dataclasses.fields(DecoderConfig)
    }
    fields["layers"] = tuple(map(alone, config.layers))
    return DecoderConfig(**fields)


class T5Gemma(EncoderDecoder, DecoderNet):
    """The network: `DecoderNet` with an encoder before it. `__call__` is teacher forcing."""

    config: T5GemmaConfig
    empty = staticmethod(empty_cache)
    stacks = staticmethod(
        lambda config: {"encoder": config.encoder_layers, "layers": config.decoder_layers}
    )

    def setup(self):
        super().setup()  # the decoder: `embedding`, `layers`, `norm`, `head`
        c = self.config
        dtype = jnp.dtype(self.config.dtype)
        self.encoder = layers_of(c.encoder)
        self.encoder_norm = c.encoder.norm_module()
        if not c.shares_embedding:
            self.encoder_embedding = Embedding(c.encoder.vocab_size, c.encoder.dim, dtype=dtype)
        if c.end_of_image is not None:
            # Its name says that a drafter with the target's encoder shares it.
            self.encoder_image_end = parameter(
                self, "encoder_image_end", nn.initializers.zeros, (c.encoder.dim,)
            )

    @property
    def decoder(self) -> list[decoder.DecoderLayer]:
        """The decoder's layers, as `EncoderDecoder` calls them."""
        return self.layers

    @property
    def decoder_norm(self) -> Any:
        """Its final norm."""
        return self.norm

    def encode(self, prompt: Prompt, mask: Bool[Array, "B 1 1 P"]) -> Float[Array, "B P M"]:
        """Computes the encoder's output; `mask` comes from `real`."""
        c = self.config.encoder
        width = prompt.tokens.shape[1]
        position = jnp.arange(width, dtype=jnp.int32)

        def visible(window: int | None) -> Mask | QueryMask:
            def make(first: int | Int[Array, ""], count: int) -> tuple[Mask, None]:
                if window is None:
                    return mask, None
                # [T, P]
                distance = position[None, :] - (first + jnp.arange(count, dtype=jnp.int32))[:, None]
                within = (-distance < (window + 1) // 2) & (distance <= window // 2)
                return mask & within[None, None], None

            return for_queries(width, make)[0]

        shapes = [layer.attention for layer in c.layers]
        masks = {window: visible(window) for window in dict.fromkeys(x.window for x in shapes)}
        turns = {
            x.rotation: x.rotation and x.rotation[0].at(position[None], x.rotation[1])
            for x in shapes
        }
        inputs = [LayerInputs(masks[x.window], turns[x.rotation], None) for x in shapes]
        if self.config.shares_embedding:
            table = self.embedding
        else:
            table = self.encoder_embedding
        x = table(prompt.tokens)
        if c.scale_embedding:
            x = x * jnp.asarray(c.dim**0.5, x.dtype)
        return self.encoder_norm(self.run_encoder(self._with_image_end(prompt.tokens, x), inputs))

    def embed_at(
        self, tokens: Int[Array, "B T"], position: Int[Array, "#B T"]
    ) -> Float[Array, "B T M"]:
        """Embeds the decoder's tokens; where they lie does not matter to the first layer."""
        return self._with_image_end(tokens, self._embed(tokens, position))

    def _with_image_end(
        self, tokens: Int[Array, "B T"], x: Float[Array, "B T M"]
    ) -> Float[Array, "B T M"]:
        """Puts the vector of the token that ends an image in its places; it is not scaled."""
        if self.config.end_of_image is None:
            return x
        return jnp.where(
            (tokens == self.config.end_of_image)[..., None],
            self.encoder_image_end.astype(x.dtype),
            x,
        )

    def layer_inputs(self, pass_: kv.Pass, cache: kv.KVCache) -> list[LayerInputs]:
        """Makes the inputs of a pass: a mask for each kind of cache, a rotation for each kind of
        layer.
        """
        return self._inputs(pass_, cache.views(pass_), [None] * self.config.decoder_layers)


def language_model(config: T5GemmaConfig, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a T5Gemma's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: decoder layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> from jaxspec.nets.decoder import decoder_config
    >>> wide, narrow = (decoder_config(32, dim, 32, 1, 2, 1, 8, tied_head=True) for dim in (24, 16))
    >>> config = t5gemma_config(wide, narrow)
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = language_model(config).prefill(
    ...     init(config, jax.random.key(0)), prompt, Room(8)
    ... )
    >>> forward.logits.shape, cache.cross[0][0].shape
    ((2, 1, 32), (2, 1, 5, 8))
    """
    return encoder_decoder.language_model(T5Gemma, config, taps)


def init(config: T5GemmaConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, embeddings of standard deviation 0.02."""
    return encoder_decoder.init_params(T5Gemma, config, key)


def _pieces(config: T5GemmaConfig) -> list[tuple[T5GemmaConfig, int]]:
    """Each side varies while the other one is shallow; the network with two shallow sides was
    counted twice.
    """
    decoders = decoder.NETWORK.pieces(config)
    encoders = decoder.NETWORK.pieces(config.encoder)
    shallow = decoders[0][0]
    encoder = encoders[0][0]
    return [
        *((dataclasses.replace(piece, encoder=encoder), times) for piece, times in decoders),
        *((dataclasses.replace(shallow, encoder=piece), times) for piece, times in encoders),
        (dataclasses.replace(shallow, encoder=encoder), -1),
    ]


def _cache(config: T5GemmaConfig, batch: int, room: Room, width: int) -> EncoderDecoderCache:
    shapes = [layer.cross or layer.attention for layer in config.layers]
    # Cross-attention stores keys and values of the prompt as a cache of its width would.
    cross = [kv.whole(x.kv_heads, x.head_dim, jnp.dtype(config.dtype)) for x in shapes]
    encoded = kv.empty(batch, Room(width), cross)
    pairs = tuple(zip(encoded.keys, encoded.values, strict=True))
    return EncoderDecoderCache(
        empty_cache(config, batch, room), pairs, jnp.zeros((batch, 1, 1, width), bool)
    )


def _axes(config: T5GemmaConfig) -> Axes:
    # An axis is cut into parts that fit the layers of both sides.
    layers = config.layers + config.encoder.layers
    return decoder.NETWORK.axes(dataclasses.replace(without_encoder(config), layers=layers))


def _trimmed(config: T5GemmaConfig, tokens: int) -> tuple[T5GemmaConfig, tuple[str, ...]]:
    smaller, modules = encoder_decoder.trimmed(config, tokens)
    return dataclasses.replace(smaller, end_of_image=None), modules  # a head alone embeds nothing


NETWORK = Network(
    "t5gemma",
    T5GemmaConfig,
    init,
    language_model,
    T5Gemma,
    T5Gemma.stacks,
    _pieces,
    _cache,
    _axes,
    encoder_decoder.share,
    embedding_scale=decoder.NETWORK.embedding_scale,
    logits_cap=decoder.NETWORK.logits_cap,
    trimmed=_trimmed,
    alike=lambda config: {
        "encoder": decoder.numbers_of(config.encoder.layers),
        "layers": decoder.numbers_of(config.layers),
    },
)
