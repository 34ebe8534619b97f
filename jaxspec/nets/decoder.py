"""The decoder-only network of today's model families: RMS norms, gated feed-forward, rotary or relative positions.

One frozen configuration says which of their options a model has. Llama, Mistral, Qwen, Gemma and LaMDA are values of
it: see `jaxspec.weights.hf_families`. Local layers attend to a window only, and their caches are rings that hold little
more (`core.kv_cache`), where there is room for more.

Shapes: B batch, T step, S cache capacity, H heads, D head dimension, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec.core import LanguageModel, Params, Parts, Room
from jaxspec.core import kv_cache as kv
from jaxspec.core.checks import one_of
from jaxspec.nets import rotary, stack
from jaxspec.nets.attention import (
    ACTIVATIONS,
    Attention,
    Bias,
    FeedForward,
    Mask,
    QueryMask,
    RMSNorm,
    for_queries,
    softcap,
)
from jaxspec.nets.dense import Dense
from jaxspec.nets.embedding import Embedding
from jaxspec.nets.network import Network
from jaxspec.nets.relative import RelativeBias, biases, distances
from jaxspec.nets.rotary import RopeScaling, Rotation
from jaxspec.sharding import Axes


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, and which options it has.

    Attributes:
        vocab_size, dim, ff_dim, layers: as they say.
        heads, kv_heads, head_dim: query heads, key-value heads that groups of them share, and their dimension.
        activation: of the gated feed-forward block: "silu", "gelu" (by tanh), "gelu_erf" (the exact one) or "relu".
        tied_head: whether the head is the embedding.
        epsilon: added to the mean square in every norm.
        qkv_bias, out_bias, ff_bias: whether these projections have biases.
        head_norms: whether each query head and key head is normalised (Qwen 3, Gemma 3).
        post_norms: whether what a block adds is normalised, too (Gemma 2 and 3).
        norms_from_one: whether norms store their scale minus 1 (Gemma).
        scale_embedding: whether embeddings are multiplied by the root of dim (Gemma).
        query_scalar: scores are divided by its root; None for head_dim.
        attention_cap, logits_cap: soft caps of scores and logits; None for none.
        window: how many positions a local layer attends to, its own included.
        local: whether layer 0, 1, ... is local; repeated as often as needed. Empty: none is.
        positions: "rotary", or "relative" for T5's biases.
        rope_base, local_rope_base: rotary bases of global layers, and of local ones (None: the same).
        rope_scaling, rope_factor, rope_low, rope_high, rope_original, rope_whole: of global layers; see
            `rotary.RopeScaling`.
        rope_magnitude: of global layers: multiplies cosines and sines (YaRN).
        buckets, max_distance: of relative biases.
        max_positions: longest row to accept; None if nothing limits it.
        end_tokens: what ends a row; empty for the tokenizer's end-of-sequence token.
        dtype: of the computation: "float32" or "bfloat16". Logits are float32 always.
    """

    vocab_size: int
    dim: int
    ff_dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str = "silu"
    tied_head: bool = False
    epsilon: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    ff_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    norms_from_one: bool = False
    scale_embedding: bool = False
    query_scalar: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    window: int | None = None
    local: tuple[bool, ...] = ()
    positions: str = "rotary"
    rope_base: float = 10_000.0
    local_rope_base: float | None = None
    rope_scaling: str = "default"
    rope_factor: float = 1.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_original: int = 8192
    rope_whole: bool = True
    rope_magnitude: float = 1.0
    buckets: int = 32
    max_distance: int = 128
    max_positions: int | None = None
    end_tokens: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key-value heads: expected a divisor"
            )
        if any(self.local) and self.window is None:
            raise ValueError("some layers are local, but window is None: expected how many positions they attend to")
        for name, options in (("activation", ACTIVATIONS), ("positions", POSITIONS), ("rope_scaling", rotary.SCALINGS)):
            one_of(getattr(self, name), name, options)

    def is_local(self, layer: int) -> bool:
        """Tells whether a layer attends to the window only: with (True, False), layers 0, 2, 4, ... do."""
        return bool(self.local) and self.local[layer % len(self.local)]


POSITIONS = ("rotary", "relative")


class AttentionInputs(NamedTuple):
    """Inputs of attention that depend on positions, the same for all layers of one kind, local or global."""

    mask: Mask | QueryMask
    rotary: Rotation | None
    bias: Bias


def rotation_of(config: DecoderConfig, position: Int[Array, "B T"]) -> Rotation | None:
    """Computes the rotation of global layers at some positions; None if positions are not rotary."""
    c = config
    if c.positions != "rotary":
        return None
    scaling = RopeScaling(c.rope_scaling, c.rope_factor, c.rope_low, c.rope_high, c.rope_original, c.rope_whole)
    return rotary.rotation(position, rotary.frequencies(c.head_dim, c.rope_base, scaling), c.rope_magnitude)


def norm_of(config: DecoderConfig) -> Callable[[], RMSNorm]:
    """Makes norms of a configuration's kind."""
    return functools.partial(RMSNorm, config.epsilon, config.norms_from_one, jnp.dtype(config.dtype))


def empty_cache(config: DecoderConfig, batch: int, room: Room) -> kv.KVCache:
    """Makes an empty cache for a configuration's layers."""
    c, dtype = config, jnp.dtype(config.dtype)
    kinds = {False: kv.whole(c.kv_heads, c.head_dim, dtype)}
    if c.window is not None:  # relative biases go by slots, so that entry i must lie in slot i
        kinds[True] = kv.window(c.kv_heads, c.head_dim, c.window, dtype, ring=c.positions == "rotary")
    return kv.empty(batch, room, [kinds[c.is_local(layer)] for layer in range(c.layers)])


class DecoderLayer(nn.Module):
    """Attention and a gated feed-forward block, each after a norm."""

    config: DecoderConfig

    def setup(self):
        c, dtype, norm = self.config, jnp.dtype(self.config.dtype), norm_of(self.config)
        self.attention_norm, self.ff_norm = norm(), norm()
        if c.post_norms:
            self.attention_post_norm, self.ff_post_norm = norm(), norm()
        self.attention = Attention(
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.dim,
            (c.query_scalar or c.head_dim) ** -0.5,
            c.qkv_bias,
            c.out_bias,
            c.attention_cap,
            norm if c.head_norms else None,
            dtype=dtype,
        )
        self.ff = FeedForward(c.dim, c.ff_dim, c.activation, gated=True, use_bias=c.ff_bias, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        update_cache: stack.UpdateCache,
        inputs: AttentionInputs,
        attention: bool = True,
        mlp: bool = True,
    ):
        """Computes the layer; `update_cache` takes this step's keys and values, and returns all it may attend to."""
        keys = values = None
        if attention:
            y = self.attention_norm(x)
            keys, values = update_cache(*self.attention.keys_values(y, inputs.rotary))
            added = self.attention(y, keys, values, inputs.mask, inputs.bias, inputs.rotary)
            x = x + (self.attention_post_norm(added) if self.config.post_norms else added)
        if mlp:
            added = self.ff(self.ff_norm(x))
            x = x + (self.ff_post_norm(added) if self.config.post_norms else added)
        return x, keys, values


class Decoder(nn.Module):
    """The network. `__call__` is teacher forcing; `embed`, `run`, `features` and `logits` are the steps of decoding."""

    config: DecoderConfig
    taps: tuple[int, ...] = ()

    def setup(self):
        c, dtype = self.config, jnp.dtype(self.config.dtype)
        self.embedding = Embedding(c.vocab_size, c.dim, dtype=dtype, embedding_init=nn.initializers.normal(0.02))
        self.layers = [DecoderLayer(c) for _ in range(c.layers)]
        self.norm = norm_of(c)()
        if c.positions == "relative":
            self.bias = RelativeBias(c.heads, c.buckets, c.max_distance, bidirectional=False)
        if not c.tied_head:
            self.head = Dense(c.vocab_size, dtype=dtype)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Computes the logits of each position of whole rows."""
        return self.logits(self.features(self.streams(tokens)[-1]), training=True)

    def streams(
        self, tokens: Int[Array, "B T"], runs: Bool[Array, "layers B"] | None = None
    ) -> list[Float[Array, "B T M"]]:
        """Computes the residual stream of whole rows after each layer; see `stack.without_cache`."""
        at = kv.Pass(jnp.zeros((tokens.shape[0],), jnp.int32), tokens.shape[1])
        c = self.config
        views = [at.view(at.step, c.window if c.is_local(layer) else None) for layer in range(c.layers)]
        inputs = self._attention_inputs(at, views)
        return stack.without_cache(self._layers(inputs), self._embed(tokens), runs)

    def embed(
        self, cache: kv.KVCache, tokens: Int[Array, "B T"], parent: Int[Array, "B N"] | None = None
    ) -> Float[Array, "B T M"]:
        """Embeds tokens for the first layer; where they lie does not matter to it."""
        return self._embed(tokens)

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
        inputs = self._attention_inputs(at, cache.views(at))
        return stack.with_cache(self._layers(inputs), x, cache, self.taps, parts, at)

    def _layers(self, inputs: Sequence[AttentionInputs]) -> list[stack.Layer]:
        return [functools.partial(layer, inputs=x) for layer, x in zip(self.layers, inputs, strict=True)]

    def _attention_inputs(self, at: kv.Pass, views: Sequence[kv.View]) -> list[AttentionInputs]:
        """Makes the inputs of each layer; layers that read the same view share them."""
        c, position, rotations = self.config, at.positions(), dict[float | None, Rotation | None]()

        def rotation(is_local: bool) -> Rotation | None:
            # A base of their own is not scaled: within the window no distance is longer than in training.
            base = c.local_rope_base if is_local and c.positions == "rotary" else None
            if base not in rotations:
                unscaled = None if base is None else rotary.rotation(position, rotary.frequencies(c.head_dim, base))
                rotations[base] = rotation_of(c, position) if base is None else unscaled
            return rotations[base]

        def make(view: kv.View, is_local: bool) -> AttentionInputs:
            by_distance = self.bias(distances(view.size)) if c.positions == "relative" else None

            def mask_and_bias(first: int | Int[Array, ""], count: int) -> tuple[Mask, Bias]:
                mask, start = view.mask(first, count)[:, None], at.length + first  # [B, 1, T, S]
                if by_distance is None:
                    return mask, None
                return mask, biases(by_distance, start, count, view.size, at.parent)  # [B, H, T, S]

            mask, bias = for_queries(at.step, mask_and_bias, at.parent)
            return AttentionInputs(mask, rotation(is_local), bias)

        inputs = dict[kv.View, AttentionInputs]()
        for layer, view in enumerate(views):
            if view not in inputs:
                inputs[view] = make(view, c.is_local(layer))
        return [inputs[view] for view in views]

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        x = self.embedding(tokens)
        return x * jnp.asarray(self.config.dim**0.5, x.dtype) if self.config.scale_embedding else x

    def features(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Applies the final norm."""
        return self.norm(x)

    def logits(self, features: Float[Array, "B T M"], training: bool = False) -> Float[Array, "B T V"]:
        """Applies the head."""
        logits = self.embedding.logits(features, training) if self.config.tied_head else self.head(features)
        logits = logits.astype(jnp.float32)
        return logits if self.config.logits_cap is None else softcap(logits, self.config.logits_cap)


def language_model(config: DecoderConfig, taps: Sequence[int] = ()) -> LanguageModel:
    """Makes a decoder's pure functions of (params, ...), for `jaxspec.decode`.

    Args:
        config: its shape.
        taps: layers whose output `Forward.taps` is to hold; see `stack.check_taps`.

    >>> import jax, jaxspec
    >>> config = DecoderConfig(32, dim=16, ff_dim=32, layers=1, heads=4, kv_heads=2, head_dim=4)
    >>> lm = language_model(config)
    >>> prompt = jaxspec.Prompt(jnp.ones((2, 5), jnp.int32), jnp.array([5, 3]))
    >>> forward, cache = lm.prefill(init(config, jax.random.key(0)), prompt, Room(8))
    >>> forward.logits.shape, cache.keys[0].shape
    ((2, 1, 32), (2, 2, 8, 4))
    """
    return _language_model(config, stack.check_taps(taps, config.layers))


@functools.lru_cache
def _language_model(config: DecoderConfig, taps: tuple[int, ...]) -> LanguageModel:
    c, empty = config, functools.partial(empty_cache, config)
    return stack.decoder_only(
        Decoder(c, taps), init, c, empty, c.layers, c.vocab_size, c.max_positions, c.dim, taps, c.end_tokens
    )


def init(config: DecoderConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters: fan-in scaled matrices, embeddings of standard deviation 0.02."""
    return stack.init_params(Decoder(config), key, jnp.zeros((1, 2), jnp.int32))


def _pieces(config: DecoderConfig) -> list[tuple[DecoderConfig, int]]:
    """Takes local and global layers apart, whose caches differ."""
    local = sum(config.is_local(i) for i in range(config.layers))
    shallow = dataclasses.replace(config, layers=1, local=())
    more = [
        (dataclasses.replace(config, layers=2, local=(False, is_local)), times)
        for is_local, times in ((True, local), (False, config.layers - local - 1))
        if times
    ]
    return [(shallow, 1 - sum(times for _, times in more)), *more]


NETWORK = Network(
    "decoder",
    DecoderConfig,
    init,
    language_model,
    Decoder,
    stack.stack_of_layers,
    _pieces,
    axes=lambda c: Axes({"heads": c.heads, "kv_heads": c.kv_heads, "ff": c.ff_dim, "vocab": c.vocab_size}),
    share=stack.share,
    trimmed=stack.trimmed,
    logits_cap=lambda config: config.logits_cap,
)
