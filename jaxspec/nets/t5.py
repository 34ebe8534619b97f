"""T5 (Raffel et al., arXiv 1910.10683), T5 v1.1 and umT5 (2304.09151): encoder-decoders with
relative position biases.

v1.1 has a gated GELU feed-forward and a separate output head; 1.0 has a ReLU one and reuses the
embedding as its head, which reads the decoder's output times dim ** -0.5. Cross-attention keys and
values are computed once, in prefill. Attention is not scaled (the initialisation is), layers have
no biases, and normalisation is RMS.

Shapes: B batch, P prompt (encoder), T step (decoder), S cache capacity, H heads, D head dimension,
M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Params, Prompt
from jaxspec.core import kv_cache as kv
from jaxspec.core.checks import check_ids
from jaxspec.nets import encoder_decoder
from jaxspec.nets.attention import Bias, LayerInputs, Mask, Norm, for_queries
from jaxspec.nets.decoder import DecoderLayer
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.encoder_decoder import EncoderDecoder
from jaxspec.nets.relative import RelativeBias, biases, distances
from jaxspec.nets.shapes import AttentionShape, FeedForwardShape, NormShape


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The shape of a T5.

    Attributes:
        vocab_size: rows of the embedding (and columns of the head).
        dim, ff_dim, heads, head_dim: model, feed-forward, and attention sizes.
        encoder_layers, decoder_layers: depth of either side.
        activation, gated: "gelu" (by tanh) and True for v1.1, "relu" and False for 1.0; of
            `attention.ACTIVATIONS`.
        tied_head: whether the head is the embedding (1.0) or a separate matrix (v1.1).
        scaled_head: whether the head reads the decoder's output times dim ** -0.5; None for what
            `tied_head` is, as in 1.0 and v1.1. After construction True or False.
        buckets, max_distance: options of the relative position biases.
        bias_by_layer: whether each layer has a table of biases (umT5); False for one table per
            side.
        start_token: the id that the decoder's row begins with (T5 uses its padding id).
        max_positions: longest prompt and longest output to accept; T5's biases would go on for
            ever.
        dtype: the dtype of the computation, "float32" or "bfloat16". Logits are float32 always.
        epsilon: added to the mean square in every norm.
        end_tokens: ids that end a row; empty for the tokenizer's end-of-sequence token.
        begin_tokens: ids that a decoder's row has after its start token.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    heads: int
    head_dim: int
    encoder_layers: int
    decoder_layers: int
    activation: str = "gelu"
    gated: bool = True
    tied_head: bool = False
    buckets: int = 32
    max_distance: int = 128
    start_token: int = 0
    max_positions: int | None = None
    dtype: str = "float32"
    scaled_head: bool | None = None
    epsilon: float = 1e-6
    end_tokens: tuple[int, ...] = ()
    bias_by_layer: bool = False
    begin_tokens: tuple[int, ...] = ()

    source_vocab = None  # no field: both sides share an embedding

    def __post_init__(self):
        if self.scaled_head is None:
            object.__setattr__(self, "scaled_head", self.tied_head)
        if not 4 <= self.buckets < 2 * self.max_distance:
            expected = "at least 4, and fewer than twice the distance"
            raise ValueError(
                f"{self.buckets} buckets for distances up to {self.max_distance}: expected "
                f"{expected}"
            )
        check_ids([self.start_token], "the start of a row", self.vocab_size)


def _v11(dim: int, ff_dim: int, heads: int, layers: int) -> T5Config:
    return T5Config(32128, dim, ff_dim, heads, 64, layers, layers)


def _v10(dim: int, ff_dim: int, heads: int, head_dim: int, layers: int) -> T5Config:
    return T5Config(
        32128, dim, ff_dim, heads, head_dim, layers, layers, "relu", gated=False, tied_head=True
    )


SIZES = {  # the models of the paper's tables (v1.1) and their 1.0 ancestors
    "t5-v1_1-small": _v11(512, 1024, 6, 8),
    "t5-v1_1-base": _v11(768, 2048, 12, 12),
    "t5-v1_1-large": _v11(1024, 2816, 16, 24),
    "t5-v1_1-xl": _v11(2048, 5120, 32, 24),
    "t5-v1_1-xxl": _v11(4096, 10240, 64, 24),
    "t5-small": _v10(512, 2048, 8, 64, 6),
    "t5-base": _v10(768, 3072, 12, 64, 12),
    "t5-large": _v10(1024, 4096, 16, 64, 24),
    "t5-3b": _v10(1024, 16384, 32, 128, 24),
    "t5-11b": _v10(1024, 65536, 128, 128, 24),
}


def _bias(config: T5Config, bidirectional: bool) -> RelativeBias:
    return RelativeBias(config.heads, config.buckets, config.max_distance, bidirectional)


def _layers(config: T5Config, depth: int, has_cross: bool) -> list[DecoderLayer]:
    attention = AttentionShape(config.heads, config.heads, config.head_dim, query_scalar=1.0)
    ff = FeedForwardShape(config.ff_dim, config.activation, config.gated)
    bias = None
    if config.bias_by_layer:
        bias = functools.partial(_bias, config, not has_cross)
    norm = NormShape("rms", config.epsilon)
    return encoder_decoder.side(
        config, depth, attention, ff, norm, has_cross=has_cross, make_bias=bias
    )


class T5(EncoderDecoder):
    """The network. `__call__` is teacher forcing; `encode`, `embed` and `run` are the steps of
    decoding.
    """

    config: T5Config

    def setup(self):
        c = self.config
        dtype = jnp.dtype(self.config.dtype)
        self.embedding = Embedding(
            c.vocab_size, c.dim, dtype=dtype, embedding_init=nn.initializers.normal(0.5)
        )
        if not c.bias_by_layer:
            self.encoder_bias = _bias(c, bidirectional=True)
            self.decoder_bias = _bias(c, bidirectional=False)
        self.encoder = _layers(c, c.encoder_layers, has_cross=False)
        self.decoder = _layers(c, c.decoder_layers, has_cross=True)
        self.encoder_norm = Norm(c.epsilon, dtype=dtype)
        self.decoder_norm = Norm(c.epsilon, dtype=dtype)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, dtype=dtype)

    def encode(self, prompt: Prompt, mask: Bool[Array, "B 1 1 P"]) -> Float[Array, "B P M"]:
        """Computes the encoder's output; `mask` comes from `real`."""
        pass_ = kv.Pass(jnp.zeros((1,), jnp.int32), prompt.tokens.shape[1])
        # The mask [B, 1, 1, P] is of all queries; biases are [1, H, T, P].
        inputs = self._inputs(
            self.encoder, "encoder_bias", pass_, pass_.step, lambda start, count: mask
        )
        return self.encoder_norm(self.run_encoder(self.embedding(prompt.tokens), inputs))

    def _inputs(
        self,
        layers: Sequence[DecoderLayer],
        shared: str,
        pass_: kv.Pass,
        size: int,
        mask: Callable[[Any, int], Mask],
    ) -> list[LayerInputs]:
        """Makes the masks and the biases of a side's layers over `size` keys, or how to make them.

        They go by each layer's own table of biases; where one table serves all of them (`shared`),
        they are made once.
        """

        def visible(table: RelativeBias) -> LayerInputs:
            # A table by distance serves all queries: [H, 2 size], where biases would be [B, H, T,
            # S].
            by_distance = table(distances(size))

            def make(first: int | Int[Array, ""], count: int) -> tuple[Mask, Bias]:
                start = pass_.length + first
                bias = biases(by_distance, start, count, size, pass_.parent)
                return mask(start, count), bias

            seen, bias = for_queries(pass_.step, make, pass_.parent)
            return LayerInputs(seen, None, bias)

        if self.config.bias_by_layer:
            return [visible(layer.bias) for layer in layers]
        return [visible(getattr(self, shared))] * len(layers)

    def embed_at(
        self, tokens: Int[Array, "B T"], position: Int[Array, "#B T"]
    ) -> Float[Array, "B T M"]:
        """Embeds tokens; where they lie does not matter to the first layer."""
        return self.embedding(tokens)

    def layer_inputs(self, pass_: kv.Pass, cache: kv.KVCache) -> list[LayerInputs]:
        """Makes the masks and the biases of a decoder's pass, or how to make them."""

        def mask(start: Int[Array, " B"], count: int) -> Mask:
            return kv.mask(start, count, cache.capacity, pass_.parent)[:, None]

        return self._inputs(self.decoder, "decoder_bias", pass_, cache.capacity, mask)

    def logits(
        self, features: Float[Array, "B T M"], training: bool = False, *, raw: bool = False
    ) -> Float[Array, "B T V"]:
        """Applies the head; `raw` changes nothing, since the scale belongs to features, and T5 has
        no cap.
        """
        c = self.config
        # T5 1.0 shares its embedding, whose entries are of size 1, with the head: logits would be
        # sqrt(dim) too large.
        if c.scaled_head:
            scaled = features * jnp.asarray(c.dim**-0.5, features.dtype)
        else:
            scaled = features
        if c.tied_head:
            logits = self.embedding.logits(scaled, training)
        else:
            logits = self.head(scaled)
        return logits.astype(jnp.float32)


def language_model(config: T5Config, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a T5's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: decoder layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = T5Config(
    ...     32, dim=16, ff_dim=32, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1
    ... )
    >>> lm = language_model(config)
    >>> params = init(config, jax.random.key(0))
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(params, prompt, jaxspec.core.Room(8))
    >>> forward.logits.shape, cache.decoder.length.tolist()
    ((2, 1, 32), [1, 1])
    """
    return encoder_decoder.language_model(T5, config, taps)


def init(config: T5Config, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, attention queries scaled down by head_dim **
    -0.5.
    """
    return encoder_decoder.init_params(T5, config, key)


NETWORK = encoder_decoder.network(
    "t5",
    T5Config,
    T5,
    language_model,
    init,
    # Its attention does not scale the scores.
    spread=lambda config, path: config.head_dim**-0.5 if "query" in path else 1.0,
)
