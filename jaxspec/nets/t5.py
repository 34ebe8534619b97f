"""T5 (Raffel et al., arXiv 1910.10683), T5 v1.1 and umT5 (2304.09151): encoder-decoders with relative position biases.

v1.1 has a gated GELU feed-forward and its own output head; 1.0 has a ReLU one and reuses the embedding as its head,
which reads the decoder's output times dim ** -0.5. Cross-attention keys and values are computed once, in prefill.
Attention is not scaled (the initialisation is), there are no biases, and normalisation is RMS.

Shapes: B batch, P prompt (encoder), T step (decoder), S cache capacity, H heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import Encoder, Forward, LanguageModel, Limits, Params, Parts, Prompt, Room
from jaxspec.core import kv_cache as kv
from jaxspec.nets import stack
from jaxspec.nets.attention import Attention, Bias, FeedForward, LayerInputs, Mask, QueryMask, RMSNorm, for_queries
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.mismatch import named_mismatch
from jaxspec.nets.network import Network
from jaxspec.nets.relative import RelativeBias, biases, distances
from jaxspec.sharding import Axes


@dataclasses.dataclass(frozen=True)
class T5Config:
    """The shape of a T5.

    Attributes:
        vocab_size: rows of the embedding (and columns of the head).
        dim, ff_dim, heads, head_dim: model, feed-forward, and attention sizes.
        encoder_layers, decoder_layers: depth of either side.
        activation, gated: "gelu" (by tanh) and True for v1.1, "relu" and False for 1.0; of `attention.ACTIVATIONS`.
        tied_head: whether the head is the embedding (1.0) or a matrix of its own (v1.1).
        scaled_head: whether the head reads the decoder's output times dim ** -0.5; None for what `tied_head` is, as in
            1.0 and v1.1. After construction True or False.
        buckets, max_distance: options of the relative position biases.
        bias_by_layer: whether each layer has biases of its own (umT5); False for one table per side.
        start_token: the id that the decoder's row begins with (T5 uses its padding id).
        max_positions: longest prompt and longest output to accept; T5's biases would go on for ever.
        dtype: the dtype of the computation, "float32" or "bfloat16". Logits are float32 always.
        epsilon: added to the mean square in every norm.
        end_tokens: ids that end a row; empty for the tokenizer's end-of-sequence token.
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

    def __post_init__(self):
        if self.scaled_head is None:
            object.__setattr__(self, "scaled_head", self.tied_head)
        if not 4 <= self.buckets < 2 * self.max_distance:
            raise ValueError(
                f"{self.buckets} buckets for distances up to {self.max_distance}: "
                "expected at least 4, and fewer than twice the distance"
            )
        if not 0 <= self.start_token < self.vocab_size:
            raise ValueError(f"the start token is {self.start_token}, expected an id from 0 to {self.vocab_size - 1}")


def _v11(dim: int, ff_dim: int, heads: int, layers: int) -> T5Config:
    return T5Config(32128, dim, ff_dim, heads, 64, layers, layers)


def _v10(dim: int, ff_dim: int, heads: int, head_dim: int, layers: int) -> T5Config:
    return T5Config(32128, dim, ff_dim, heads, head_dim, layers, layers, "relu", gated=False, tied_head=True)


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


Cross = tuple[Float[Array, "B H P D"], Float[Array, "B H P D"]]  # keys and values of an encoded prompt


def _bias(config: T5Config, bidirectional: bool) -> RelativeBias:
    return RelativeBias(config.heads, config.buckets, config.max_distance, bidirectional)


class EncoderLayer(nn.Module):
    """Self-attention over the whole prompt, then the feed-forward block."""

    config: T5Config

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.attention_norm, self.ff_norm = RMSNorm(c.epsilon, dtype=dtype), RMSNorm(c.epsilon, dtype=dtype)
        self.attention = Attention(c.heads, c.heads, c.head_dim, c.dim, dtype=dtype)
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, c.gated, dtype=dtype)
        if c.bias_by_layer:
            self.bias = _bias(c, bidirectional=True)

    def __call__(self, x: Float[Array, "B P M"], mask: Mask | QueryMask, bias: Bias):
        y = self.attention_norm(x)
        keys, values = self.attention.keys_values(y)
        x = x + self.attention(y, keys, values, mask, bias)
        return x + self.ff(self.ff_norm(x))


class T5DecoderLayer(nn.Module):
    """Causal self-attention, attention to what the encoder read, then the feed-forward block."""

    config: T5Config

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.attention_norm, self.cross_norm, self.ff_norm = (RMSNorm(c.epsilon, dtype=dtype) for _ in range(3))
        self.attention = Attention(c.heads, c.heads, c.head_dim, c.dim, dtype=dtype)
        self.cross = Attention(c.heads, c.heads, c.head_dim, c.dim, dtype=dtype)
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, c.gated, dtype=dtype)
        if c.bias_by_layer:
            self.bias = _bias(c, bidirectional=False)

    def cross_keys_values(self, encoded: Float[Array, "B P M"]) -> Cross:
        keys, values = self.cross.keys_values(encoded)
        return keys, values

    def __call__(
        self,
        x: Float[Array, "B T M"],
        read: stack.Read,
        inputs: LayerInputs,
        cross: tuple[Array, Array, Mask | QueryMask],
        attention: bool = True,
        mlp: bool = True,
    ):
        """Computes the layer: see `stack.Layer`."""
        record = None
        if attention:
            added, record = self.attention.mix(self.attention_norm(x), read, inputs)
            x = x + added
            # Keys and values of the prompt were made once, in prefill; only the query depends on the row.
            x = x + self.cross(self.cross_norm(x), *cross)
        return (x + self.ff(self.ff_norm(x)) if mlp else x), record


class T5Cache(NamedTuple):
    """The decoder's cache, and what prefill computed once.

    Attributes:
        decoder: self-attention keys and values.
        cross: keys and values of the encoded prompt, for each decoder layer.
        cross_mask: True at real encoder positions.
    """

    decoder: kv.KVCache
    cross: tuple[Cross, ...]
    cross_mask: Bool[Array, "B 1 1 P"]


def empty_decoder(config: T5Config, batch: int, room: Room) -> kv.KVCache:
    """Makes empty caches of the decoder's own attention."""
    layer = kv.whole(config.heads, config.head_dim, jnp.dtype(config.dtype))
    return kv.empty(batch, room, [layer] * config.decoder_layers)


class T5(nn.Module):
    """The network. `__call__` is teacher forcing; `prefill` and `extend` are the two halves of decoding."""

    config: T5Config
    taps: tuple[int, ...] = ()

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=nn.initializers.normal(0.5))
        if not c.bias_by_layer:
            self.encoder_bias, self.decoder_bias = _bias(c, bidirectional=True), _bias(c, bidirectional=False)
        self.encoder = [EncoderLayer(c) for _ in range(c.encoder_layers)]
        self.decoder = [T5DecoderLayer(c) for _ in range(c.decoder_layers)]
        self.encoder_norm, self.decoder_norm = RMSNorm(c.epsilon, dtype=dtype), RMSNorm(c.epsilon, dtype=dtype)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, dtype=dtype)

    def __call__(self, prompt: Prompt, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Computes the logits of each decoder position, given the decoder's inputs (start token first)."""
        return self.logits(self.features(self.streams(prompt, tokens)[-1]), training=True)

    def streams(
        self, prompt: Prompt, tokens: Int[Array, "B T"], runs: Bool[Array, "layers B"] | None = None
    ) -> list[Float[Array, "B T M"]]:
        """Computes the residual stream of whole rows after each decoder layer; see `stack.without_cache`."""
        mask = self.real(prompt)
        encoded = self.encode(prompt, mask)
        visible = self._causal(jnp.zeros((1,), jnp.int32), tokens.shape[1], tokens.shape[1], None)
        cross = [layer.cross_keys_values(encoded) for layer in self.decoder]
        x = self.embedding(tokens)
        return stack.without_cache(self._decoder_layers(x, visible, cross, mask), x, runs)

    def real(self, prompt: Prompt) -> Bool[Array, "B 1 1 P"]:
        """Tells which of a prompt's positions hold tokens."""
        position = jnp.arange(prompt.tokens.shape[1], dtype=prompt.length.dtype)
        return (position[None, :] < prompt.length[:, None])[:, None, None, :]

    def encode(self, prompt: Prompt, mask: Bool[Array, "B 1 1 P"]) -> Float[Array, "B P M"]:
        """Computes the encoder's output; `mask` is that of `real`."""
        width = prompt.tokens.shape[1]
        start, x = jnp.zeros((1,), jnp.int32), self.embedding(prompt.tokens)

        def visible(table: RelativeBias) -> tuple[Mask | QueryMask, Bias]:
            by_distance = table(distances(width))

            def make(first: int | Int[Array, ""], count: int) -> tuple[Mask, Bias]:
                return mask, biases(by_distance, start + first, count, width, None)  # [B, 1, 1, P], [1, H, T, P]

            return for_queries(width, make)

        tables = [layer.bias for layer in self.encoder] if self.config.bias_by_layer else [self.encoder_bias]
        # One table serves all layers, or each layer has its own.
        for layer, mask_and_bias in zip(self.encoder, itertools.cycle(map(visible, tables)), strict=False):
            x = layer(x, *mask_and_bias)
        return self.encoder_norm(x)

    def prefill(
        self, prompt: Prompt, room: Room, encoded: Float[Array, "B P M"] | None = None
    ) -> tuple[Forward, T5Cache]:
        """Encodes (unless that is done), computes the layers' cross-attention, and feeds the start token."""
        c, batch = self.config, prompt.tokens.shape[0]
        mask = self.real(prompt)
        encoded = self.encode(prompt, mask) if encoded is None else encoded
        cross, read = list[Cross](), encoded
        for layer in self.decoder:
            cross.append(layer.cross_keys_values(read))
            read = _after(read, cross[-1])
        empty = empty_decoder(c, batch, room)
        # A row begins with the start token: prefill ends with the decoder's first pass.
        forward, cache = self.extend(T5Cache(empty, tuple(cross), mask), jnp.full((batch, 1), c.start_token, jnp.int32))
        return forward._replace(encoded=encoded), cache

    def extend(
        self, cache: T5Cache, tokens: Int[Array, "B T"], parent: Int[Array, "B N"] | None = None
    ) -> tuple[Forward, T5Cache]:
        """Feeds `tokens` at each row's own length."""
        x, taps, cache = self.run(cache, self.embed(cache, tokens), parent)
        features = self.features(x)
        return Forward(self.logits(features), features, taps), cache

    def embed(
        self, cache: T5Cache, tokens: Int[Array, "B T"], parent: Int[Array, "B N"] | None = None
    ) -> Float[Array, "B T M"]:
        """Embeds tokens for the first layer; where they lie does not matter to it."""
        return self.embedding(tokens)

    def run(
        self,
        cache: T5Cache,
        x: Float[Array, "B T M"],
        parent: Int[Array, "B N"] | None = None,
        parts: Parts | None = None,
    ) -> tuple[Float[Array, "B T M"], stack.Taps, T5Cache]:
        """Runs decoder layers at each row's own length, as far as the final norm."""
        at = kv.Pass(cache.decoder.length, x.shape[1], parent)
        visible = self._causal(at.length, at.step, cache.decoder.capacity, parent)
        layers = self._decoder_layers(x, visible, cache.cross, cache.cross_mask)
        x, taps, grown = stack.with_cache(layers, x, cache.decoder, self.taps, parts, at)
        return x, taps, cache._replace(decoder=grown)

    def _causal(
        self, length: Int[Array, " B"], step: int, capacity: int, parent: Int[Array, "B N"] | None
    ) -> list[LayerInputs]:
        """Makes the masks and the biases of a decoder's pass at each row's own length, or how to make them.

        There is one for all layers, or one for each where each layer has its own biases.
        """

        def visible(table: RelativeBias) -> LayerInputs:
            # A table by distance serves all queries: [H, 2 capacity], where biases would be [B, H, T, S].
            by_distance = table(distances(capacity))

            def make(first: int | Int[Array, ""], count: int) -> tuple[Mask, Bias]:
                start = length + first
                bias = biases(by_distance, start, count, capacity, parent)  # [B, H, T, S]
                return kv.mask(start, count, capacity, parent)[:, None], bias

            mask, bias = for_queries(step, make, parent)
            return LayerInputs(mask, None, bias)

        tables = [layer.bias for layer in self.decoder] if self.config.bias_by_layer else [self.decoder_bias]
        return [visible(table) for table in tables]

    def _decoder_layers(
        self, x: Float[Array, "B T M"], visible: list[LayerInputs], cross: Iterable[Cross], real
    ) -> list[stack.Layer]:
        seen = for_queries(x.shape[1], lambda *_: (real, None))[0]
        triples = zip(self.decoder, itertools.cycle(visible), cross, strict=False)
        return [functools.partial(layer, inputs=inputs, cross=(*kv, seen)) for layer, inputs, kv in triples]

    def features(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Applies the decoder's final norm."""
        return self.decoder_norm(x)

    def logits(
        self, features: Float[Array, "B T M"], training: bool = False, *, raw: bool = False
    ) -> Float[Array, "B T V"]:
        """Applies the head; `raw` changes nothing, since the scale is one of features, and there is no cap."""
        c = self.config
        # T5 1.0 shares its embedding, whose entries are of size 1, with the head: logits would be sqrt(dim) too large.
        scaled = features * jnp.asarray(c.dim**-0.5, features.dtype) if c.scaled_head else features
        logits = self.embedding.logits(scaled, training) if c.tied_head else self.head(scaled)
        return logits.astype(jnp.float32)


def _after(encoded: Float[Array, "B P M"], cross: Cross) -> Float[Array, "B P M"]:
    """Has a GPU's compiler compute a layer's cross-attention before it reads the encoder's output for the next one.

    Else it joins the products of all layers into one, and copies their weights into one matrix first: 1.6 GB of T5-XXL.
    """

    def barrier(encoded: Array, cross: Cross) -> Array:
        return jax.lax.optimization_barrier((encoded, cross))[0]

    return jax.lax.platform_dependent(encoded, cross, cuda=barrier, rocm=barrier, default=lambda encoded, _: encoded)


def language_model(config: T5Config, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a T5's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: decoder layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = T5Config(32, dim=16, ff_dim=32, heads=2, head_dim=8, encoder_layers=1, decoder_layers=1)
    >>> lm = language_model(config)
    >>> params = init(config, jax.random.key(0))
    >>> prompt = Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(params, prompt, Room(8))
    >>> forward.logits.shape, cache.decoder.length.tolist()
    ((2, 1, 32), [1, 1])
    """
    return _language_model(config, stack.check_taps(taps, config.decoder_layers))


@functools.lru_cache
def _language_model(config: T5Config, taps: tuple[int, ...]) -> LanguageModel:
    module = T5(config, taps)

    def prefill(params, prompt, room, encoded=None):
        with named_mismatch(params, init, config, stacks(config)):
            return module.apply({"params": params}, prompt, room, encoded, method="prefill")

    def extend(params, cache, tokens, parent=None, real=None):  # whoever gives `real` rewinds to it
        return module.apply({"params": params}, cache, tokens, parent, method="extend")

    def rewind(cache, length):
        return cache._replace(decoder=kv.rewind(cache.decoder, length))

    def select(cache, start, path):
        return cache._replace(decoder=kv.select(cache.decoder, start, path))

    def keys_values(cache, layer):
        return kv.keys_values(cache.decoder, layer)

    inside = stack.inside(module, config.dim, taps, config.decoder_layers)
    encoder = Encoder(encoder_params, lambda params, encoder: params | encoder, prefill)
    return LanguageModel(
        prefill,
        extend,
        rewind,
        config.vocab_size,
        select,
        Limits(config.start_token, config.max_positions, config.max_positions, config.end_tokens),
        inside._replace(encoder=encoder, keys_values=keys_values),
        is_causal=True,
    )


def encoder_params(params: Params) -> Params:
    """Returns the parameters that prompts are encoded with; the decoder reads tokens with the same embedding."""
    return {name: value for name, value in params.items() if name.startswith("encoder") or name == "embedding"}


def same_encoder(first: T5Config, second: T5Config) -> bool:
    """Tells whether two networks may share an encoder: they differ in the decoder's depth and the head at most."""
    # The fields that no parameter of the encoder depends on.
    names = ("decoder_layers", "tied_head", "scaled_head", "max_positions", "end_tokens", "dtype")
    return dataclasses.replace(first, **{name: getattr(second, name) for name in names}) == second


def init(config: T5Config, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, attention queries scaled down by head_dim ** -0.5."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    return stack.init_params(T5(config), key, Prompt(tokens, jnp.full((1,), 2, jnp.int32)), tokens)


def stacks(config: T5Config) -> dict[str, int]:
    """Returns the depth of either side."""
    return {"encoder": config.encoder_layers, "decoder": config.decoder_layers}


def _pieces(config: T5Config) -> list[tuple[T5Config, int]]:
    shallow = dataclasses.replace(config, encoder_layers=1, decoder_layers=1)
    more = [
        (dataclasses.replace(shallow, **{f"{side}_layers": 2}), depth - 1) for side, depth in stacks(config).items()
    ]
    return [(shallow, 1 - sum(times for _, times in more)), *more]


def _cache(config: T5Config, batch: int, room: Room, width: int) -> T5Cache:
    # Cross-attention stores keys and values of the prompt as a cache of its width would.
    cross = empty_decoder(config, batch, Room(width))
    mask = jnp.zeros((batch, 1, 1, width), bool)
    return T5Cache(empty_decoder(config, batch, room), tuple(zip(cross.keys, cross.values, strict=True)), mask)


def _share(config: T5Config, path: str) -> float:
    """Keys and values of the prompt are made in prefill; biases are looked up."""
    unread = "encoder" in path or "cross/key" in path or "cross/value" in path or path.endswith("table")
    return 0.0 if unread or (path.startswith("embedding") and not config.tied_head) else 1.0


def _trimmed(config: T5Config, tokens: int) -> tuple[T5Config, str]:
    # The start token must be an id of the smaller vocabulary, too, although a head does not read it.
    return dataclasses.replace(config, vocab_size=tokens, start_token=0), "embedding" if config.tied_head else "head"


NETWORK = Network(
    "t5",
    T5Config,
    init,
    language_model,
    T5,
    stacks,
    _pieces,
    _cache,
    axes=lambda c: Axes({"heads": c.heads, "kv_heads": c.heads, "ff": c.ff_dim, "vocab": c.vocab_size}),
    share=_share,
    # Its attention does not scale the scores.
    trimmed=_trimmed,
    spread=lambda config, path: config.head_dim**-0.5 if "query" in path else 1.0,
)
